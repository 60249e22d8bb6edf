"""A model whose last layers are large, and what each tier holds of it step by step."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_hiertrain import HierTrainStrategy, Schedule

WIDTH = 256


class LateLayers(LightningModule):
    """Nearly all weights lie in the layers `late`; in every layout that a weight may have."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Conv2d(1, 8, 3, padding=1)
        self.late = nn.Sequential(
            nn.Conv2d(8, WIDTH, 3, stride=2).to(memory_format=torch.channels_last),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, WIDTH), nn.ReLU(),
            nn.Linear(WIDTH, 4),
        )  # fmt: skip

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.late(self.early(x).relu()), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.late(self.early(x).relu()), y))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Weighing(HierTrainStrategy):
    """Notes after each step how many bytes of weights this tier holds."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.held: list[int] = []

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Counts what is in memory once."""
        result = super().optimizer_step(*args, **kwargs)
        assert self.lightning_module is not None
        storages = [p.untyped_storage() for p in self.lightning_module.parameters()]
        self.held.append(sum({x.data_ptr(): x.nbytes() for x in storages}.values()))
        return result


def train(
    *,
    schedule: dict[str, Any] | None = None,
    plain: bool = False,
    **strategy: Any,
) -> dict[str, Any]:
    """Trains the model; without a schedule the first steps are measured."""
    seed_everything(3)
    module = LateLayers()
    whole = sum(p.untyped_storage().nbytes() for p in module.parameters())
    generator = torch.Generator().manual_seed(1)
    images, labels = torch.randn(96, 1, 8, 8, generator=generator), torch.arange(96) % 4
    data = TensorDataset(images, labels)
    made = None
    if not plain:
        made = Weighing(
            schedule=None if schedule is None else Schedule.from_dict(schedule),
            timeout_seconds=60,
            **strategy,
        )
    trainer = Trainer(
        accelerator="cpu",
        devices=1 if plain else 3,
        strategy=made or "auto",
        max_steps=24,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=8), DataLoader(data, batch_size=32))
    return {
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "strides": {name: value.stride() for name, value in module.state_dict().items()},
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "whole": whole,
        "held": made.held if made is not None else [],
    }
