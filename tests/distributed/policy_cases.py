"""Training by each policy, with profiles that are measured once and changed on the way."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset

from lightning_hiertrain import HierTrainStrategy, Profile, Schedule
from lightning_hiertrain.profiles import AffineTime, LayerProfile
from lightning_hiertrain.transport.network import Network
from tests.distributed.models import MODELS

BATCH = 12


def images(count: int, seed: int) -> TensorDataset:
    """Made-up 8-bit images, normalised as users do it."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (count, 3, 32, 32), generator=generator)
    mean = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
    return TensorDataset(
        (pixels / 255 - mean) / 0.25, torch.randint(10, (count,), generator=generator)
    )


def slower(layer: LayerProfile, factor: float) -> LayerProfile:
    times = (layer.forward_seconds, layer.backward_seconds)
    forward, backward = (
        {t: AffineTime(fixed=x.fixed, per_sample=x.per_sample) for t, x in time.items()}
        for time in times
    )
    for time in (forward, backward):
        device = time["device"]
        time["device"] = AffineTime(
            fixed=factor * device.fixed, per_sample=factor * device.per_sample
        )
    return replace(layer, forward_seconds=forward, backward_seconds=backward)


def train(
    *,
    plain: bool = False,
    folder: str | None = None,
    measure: bool = False,
    slow: float | None = None,
    device_factor: float = 1.0,
    schedule: dict[str, Any] | None = None,
    max_steps: int = 6,
    precision: str = "64-true",
    **arguments: Any,
) -> dict[str, Any]:
    """Trains LeNet-5 and returns its weights and what was planned and sent.

    Args:
        plain: Whether by plain Lightning.
        folder: Where the profile lies.
        measure: Whether to measure it first and write it there.
        slow: Bytes per second that every link shall carry, as profiled and as seen.
        device_factor: By how much longer the device shall take for a layer.
        schedule: A schedule to carry out as it is.
        max_steps: Training steps.
        precision: The Trainer's.
        **arguments: More for the strategy.
    """
    seed_everything(7)
    module = MODELS["ModuleLeNet"](optimizer="sgd")
    initial = {name: value.clone() for name, value in module.state_dict().items()}
    strategy: Any = "auto"
    if not plain:
        profile = None
        if folder is not None and not measure:
            profile = Profile.from_json(Path(folder, "profile.json"))
            if slow is not None:
                links = [replace(x, bandwidth_bytes_per_second=slow) for x in profile.links]
                layers = [slower(layer, device_factor) for layer in profile.layers]
                profile = replace(profile, links=tuple(links), layers=tuple(layers))
        strategy = HierTrainStrategy(
            profile=profile,
            schedule=None if schedule is None else Schedule.from_dict(schedule),
            profile_steps=2,
            profile_seconds=2.0,
            timeout_seconds=60,
            replan_when=None,  # the schedule that was planned first is asked for
            **arguments,
        )
    trainer = Trainer(
        accelerator="cpu",
        devices=1 if plain else 3,
        strategy=strategy,
        max_steps=max_steps,
        precision=precision,  # type: ignore[arg-type]
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    loaders = [DataLoader(images(48, seed), batch_size=BATCH) for seed in (1, 2)]
    if slow is None:
        trainer.fit(module, *loaders)
    else:
        with mock.patch.object(Network, "bytes_per_second", return_value=slow):
            trainer.fit(module, *loaders)
    report: dict[str, Any] = {
        "initial": initial,
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
    }
    if isinstance(trainer.strategy, HierTrainStrategy):
        made = trainer.strategy
        if measure and folder is not None and trainer.is_global_zero:
            assert made.profile is not None
            made.profile.to_json(Path(folder, "profile.json"))
        report["profile"] = None if made.profile is None else json.dumps(made.profile.to_dict())
        report["schedule"] = None if made.schedule is None else made.schedule.to_dict()
        report["sent"] = made.session.network.stats()
    return report
