"""A run that goes on until it is told to end, and plain Lightning on the same batches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_hiertrain import HierTrainStrategy
from tests.distributed.bad_input_cases import BATCH, Small, schedule

TIERS = ("device", "edge", "cloud")
WIDTH = 512
_CLOCK = 64
"""Steps after which samples come again."""


class Wide(Small):
    """Small, with first layers of which each step moves some hundred kilobytes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 2)
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class UntilTold(IterableDataset[tuple[Tensor, Tensor]]):
    """Whole mini-batches until a file is there, or so many.

    Args:
        told: The file that ends it.
        limit: The number of mini-batches after which it ends anyway.
        seconds_per_step: The least time between two mini-batches, so that steps are not all that a
            machine has time for.
    """

    def __init__(self, told: Path | None, limit: int, seconds_per_step: float = 0.0) -> None:
        self.told = told
        self.limit = limit
        self.seconds_per_step = seconds_per_step
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(_CLOCK * BATCH, WIDTH, generator=generator)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for step in range(self.limit):
            if self.told is not None and self.told.exists():
                return
            time.sleep(self.seconds_per_step)
            for row in range(BATCH):
                x = self.x[(step * BATCH + row) % len(self.x)]
                yield x, x[:2]


class Progress(Callback):
    """Writes the number of steps that are done into a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            self.path.write_text(str(trainer.global_step))


def steps_done(path: Path) -> int:
    """Returns how many steps rank 0 has done."""
    try:
        return int(path.read_text() or 0)
    except FileNotFoundError:
        return 0


def train(
    folder: Path | None,
    *,
    limit: int = 1_000_000,
    seconds_per_step: float = 0.0,
    topology: str | None = None,
    owner: str = "edge",
    module: LightningModule | None = None,
    strategy: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Trains until `folder/stop` is there; without a folder by plain Lightning.

    Returns:
        The weights and the number of steps.
    """
    seed_everything(11, verbose=False)
    module = module or Wide()
    callbacks = list(options.pop("callbacks", []))
    made: Any = "auto"
    if folder is not None:
        callbacks.append(Progress(folder / "steps.txt"))
        settings = {"timeout_seconds": 60.0, "silence_seconds": 10.0, **(strategy or {})}
        made = HierTrainStrategy(schedule=schedule(owner), topology=topology, **settings)
    trainer = Trainer(
        **{  # type: ignore[arg-type]
            "accelerator": "cpu",
            "devices": 3 if folder is not None and topology is None else 1,
            "num_nodes": 3 if topology is not None else 1,
            "strategy": made,
            "max_epochs": 1,
            "callbacks": callbacks,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **options,
        }
    )
    told = None if folder is None else folder / "stop"
    data = UntilTold(told, limit, seconds_per_step)
    trainer.fit(module, DataLoader(data, batch_size=BATCH))
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    return {"weights": weights, "steps": trainer.global_step}


def largest_difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """Returns the largest absolute difference between weights of the same names."""
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)
