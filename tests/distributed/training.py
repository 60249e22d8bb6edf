"""Trains the projects of `models`, across tiers or by plain Lightning, and reports on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lightning_hiertrain import HierTrainStrategy, Schedule
from tests.distributed.models import MODELS, loader

SAMPLES, BATCH = 44, 12  # three whole mini-batches and one of eight


class Switch(Callback):
    """Puts other schedules in force in the middle of training."""

    def __init__(self, schedules: dict[int, Schedule]) -> None:
        self.schedules = schedules

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step in self.schedules:
            trainer.strategy.session.adopt(self.schedules.pop(trainer.global_step))  # type: ignore[attr-defined]


def train(
    model: str,
    *,
    optimizer: str = "sgd",
    schedule: dict[str, Any] | None = None,
    switches: dict[str, dict[str, Any]] | None = None,
    plain: bool = False,
    folder: str | None = None,
    max_steps: int = 20,
    monitor: bool = False,
    resume: str | None = None,
    samples: int = SAMPLES,
    overlap: bool = True,
    trainer: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Trains a model and returns its weights and what Lightning knows of the run."""
    seed_everything(7)
    module = MODELS[model](optimizer=optimizer, plateau=monitor)
    initial = {name: value.clone() for name, value in module.state_dict().items()}
    strategy: Any = "auto"
    if not plain:
        strategy = HierTrainStrategy(
            schedule=None if schedule is None else Schedule.from_dict(schedule),
            overlap=overlap,
            timeout_seconds=60,
            replan_when=None,
        )
    callbacks: list[Callback] = []
    if switches:
        callbacks.append(Switch({int(k): Schedule.from_dict(v) for k, v in switches.items()}))
    if monitor:
        callbacks += [
            EarlyStopping("val_loss", patience=1, min_delta=0.004),
            ModelCheckpoint(
                dirpath=folder, monitor="val_loss", save_top_k=2, save_last=True,
                filename="{epoch}-{step}-{val_loss:.4f}",
            ),
        ]  # fmt: skip
    made = Trainer(
        accelerator="cpu",
        devices=1 if plain else 3,
        strategy=strategy,
        max_steps=-1 if monitor else max_steps,
        max_epochs=12 if monitor else -1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=monitor,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=2 if monitor else 0,
        limit_val_batches=None if monitor else 0,
        **(trainer or {}),
    )
    made.fit(
        module,
        loader(model, count=samples, batch_size=BATCH, seed=1, shuffle=True),
        loader(model, count=20, batch_size=8, seed=2, shuffle=False),
        ckpt_path=resume,
    )
    report: dict[str, Any] = {
        "initial": initial,
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "global_step": made.global_step,
        "epoch": made.current_epoch,
        "metrics": {name: value.clone() for name, value in made.callback_metrics.items()},
        "lr": made.optimizers[0].param_groups[0]["lr"],
    }
    if folder is not None:
        report["files"] = sorted(path.name for path in Path(folder).glob("*.ckpt"))
    return report


def largest_difference(first: dict[str, Any], second: dict[str, Any]) -> float:
    """Returns the largest absolute difference between two reports' weights."""
    one, two = first["weights"], second["weights"]
    assert one.keys() == two.keys()
    return max(float((one[name] - two[name]).abs().max()) for name in one)


def train_plainly(model: str, **kwargs: Any) -> dict[str, Any]:
    """Trains in this process by plain Lightning."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return train(model, plain=True, **kwargs)
    finally:
        torch.set_num_threads(threads)
