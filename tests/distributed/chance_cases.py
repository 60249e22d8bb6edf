"""Models with batch statistics or dropout in the layers that several tiers run."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_hiertrain import HierTrainStrategy, Schedule


class Classifier(LightningModule):
    def __init__(self, model: nn.Module, rate: float) -> None:
        super().__init__()
        self.model = model
        self.rate = rate

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.model(x), y)
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.model(x), y))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(4),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(16, 4),
    )  # fmt: skip


def normalised() -> nn.Module:
    return nn.Sequential(
        nn.BatchNorm2d(3, affine=False), nn.Flatten(), nn.Linear(768, 16), nn.Tanh(),
        nn.BatchNorm1d(16, momentum=None), nn.Linear(16, 4),
    )  # fmt: skip


def dropped() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(768, 32), nn.Tanh(), nn.Dropout(0.5), nn.Linear(32, 32), nn.Tanh(),
        nn.Dropout(0.5), nn.Linear(32, 4),
    )  # fmt: skip


def train(
    model: str,
    *,
    schedule: dict[str, Any] | None = None,
    plain: bool = False,
    max_steps: int = 12,
    rate: float = 0.05,
    samples: int = 96,
    trainer: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Trains one of the models and validates it."""
    seed_everything(5)
    module = Classifier(globals()[model](), rate)
    masks: list[Tensor] = []
    for child in module.modules():
        if isinstance(child, nn.Dropout):
            child.register_forward_hook(lambda _, inputs, output: masks.append(output == 0))
    strategy: Any = "auto"
    if not plain:
        assert schedule is not None
        strategy = HierTrainStrategy(schedule=Schedule.from_dict(schedule), timeout_seconds=60)
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(4, (96,), generator=generator)
    images = torch.randn(96, 3, 16, 16, generator=generator) + 0.5 * labels[:, None, None, None]
    data = TensorDataset(images[:samples].double(), labels[:samples])
    made = Trainer(
        accelerator="cpu",
        devices=1 if plain else 3,
        strategy=strategy,
        precision="64-true",
        max_steps=max_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **(trainer or {}),
    )
    made.fit(module, DataLoader(data, batch_size=24), DataLoader(data, batch_size=32))
    return {
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "metrics": {name: float(value) for name, value in made.callback_metrics.items()},
        "masks": masks,
    }
