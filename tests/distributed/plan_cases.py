"""Trainings whose schedule the strategy plans itself, or whose tiers are more than three."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything

from lightning_hiertrain import HierTrainStrategy, Profile, Schedule
from tests.distributed.models import ModuleLeNet, loader


class _FirstPolicy(Callback):
    """Notes which policy made the schedule of the first step; `None` while measuring."""

    policy: str | None = None

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == 1 and isinstance(trainer.strategy, HierTrainStrategy):
            assert trainer.strategy.schedule is not None
            self.policy = trainer.strategy.schedule.policy


def train(
    *,
    tiers: list[str] | None = None,
    schedule: Mapping[str, Any] | None = None,
    profile: Mapping[str, Any] | None = None,
    max_steps: int = 10,
    plain: bool = False,
    profile_file: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Trains LeNet-5 in double precision.

    Args:
        tiers: Names of the tiers; device, edge and cloud by default.
        schedule: A schedule to use.
        profile: A profile to plan from.
        max_steps: Training steps.
        plain: Whether to train by plain Lightning instead.
        profile_file: Where each tier writes its profile if it has measured one, and reads it from
            if it is there already; its rank is appended.
        **options: Further arguments of the strategy.

    Returns:
        Weights, validation loss, schedule, profile and what this tier sent to each other.
    """
    seed_everything(3)
    module = ModuleLeNet()
    strategy: Any = "auto"
    own_file = None
    if profile_file is not None:
        own_file = Path(f"{profile_file}.{os.environ['LOCAL_RANK']}")
        profile = None
    if not plain:
        strategy = HierTrainStrategy(
            tiers=tiers or ("device", "edge", "cloud"),
            schedule=None if schedule is None else Schedule.from_dict(dict(schedule)),
            profile=own_file
            if own_file is not None and own_file.exists()
            else None
            if profile is None
            else Profile.from_dict(dict(profile)),
            timeout_seconds=60,
            replan_when=None,  # the schedule that was planned first is asked for
            **options,
        )
    first = _FirstPolicy()
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
        callbacks=[first],
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
        if own_file is not None and made.profile is not None:
            made.profile.to_json(own_file)
        report["measured_step_seconds"] = made.measured_step_seconds
        report["first_policy"] = first.policy
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
