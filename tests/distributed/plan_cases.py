"""Trainings whose schedule the strategy plans itself, or whose tiers are more than three."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything

from lightning_hiertrain import HierTrainStrategy, Profile, Schedule
from tests.distributed.models import ModuleLeNet, loader


def train(
    *,
    tiers: list[str] | None = None,
    schedule: Mapping[str, Any] | None = None,
    profile: Mapping[str, Any] | None = None,
    max_steps: int = 10,
    plain: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Trains LeNet-5 in double precision.

    Args:
        tiers: Names of the tiers; device, edge and cloud by default.
        schedule: A schedule to use.
        profile: A profile to plan from.
        max_steps: Training steps.
        plain: Whether to train by plain Lightning instead.
        **options: Further arguments of the strategy.

    Returns:
        Weights, validation loss, schedule, profile and what this tier sent to each other.
    """
    seed_everything(3)
    module = ModuleLeNet()
    strategy: Any = "auto"
    if not plain:
        strategy = HierTrainStrategy(
            tiers=tiers or ("device", "edge", "cloud"),
            schedule=None if schedule is None else Schedule.from_dict(dict(schedule)),
            profile=None if profile is None else Profile.from_dict(dict(profile)),
            timeout_seconds=60,
            **options,
        )
    trainer = Trainer(
        accelerator="cpu",
        devices=1 if plain else len(tiers or "123"),
        strategy=strategy,
        precision="64-true",
        max_steps=max_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(
        module,
        loader("ModuleLeNet", count=96, batch_size=16, seed=1, shuffle=True),
        loader("ModuleLeNet", count=20, batch_size=10, seed=2, shuffle=False),
    )
    report: dict[str, Any] = {
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "val_loss": float(trainer.callback_metrics.get("val_loss", -1)),
    }
    if not plain:
        made = trainer.strategy
        assert isinstance(made, HierTrainStrategy)
        assert made.schedule is not None
        report["schedule"] = made.schedule.to_dict()
        report["profile"] = None if made.profile is None else made.profile.to_dict()
        report["sent"] = {
            peer: stats["bytes_sent"] for peer, stats in made.session.network.stats().items()
        }
    return report


def train_plainly(**kwargs: Any) -> dict[str, Any]:
    """Trains in this process by plain Lightning."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return train(plain=True, **kwargs)
    finally:
        torch.set_num_threads(threads)
