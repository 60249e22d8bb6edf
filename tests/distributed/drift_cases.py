"""Runs in which a tier or a link is not as fast as the profile says, and plain Lightning beside.

Layers take their time by sleeping, as long for a sample as their tier says: so several tiers on few
cores, or on busy ones, are as fast as they shall be.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hiertrain import HierTrainStrategy, Profile
from lightning_hiertrain.profiles import AffineTime, LayerProfile, LinkProfile, TierProfile
from tests.distributed.endless import largest_difference
from tests.distributed.forked import End, apart, forked
from tests.distributed.namespaces import Namespaces

TIERS = ("device", "edge", "cloud")
BATCH, LAYERS = 16, 4
SECONDS = {"device": 16e-3, "edge": 4e-3, "cloud": 2e-3}
"""For a layer and sample, by tier."""
OVERHEAD_SECONDS = 10e-3
FAST, SLOW = 50e6 / 8, 0.5e6
DROP = 8
"""The step with which the link between edge and cloud becomes slow."""
SETTLED = 5
"""Steps under a schedule until something else happens."""


class Sleeping(nn.Linear):
    """A layer that takes so many seconds for each sample."""

    seconds_per_sample = 0.0

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds_per_sample * len(x))
        return super().forward(x)


class Sleeper(LightningModule):
    """Layers that sleep; `width` numbers make up a sample."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [width, *[8] * (LAYERS - 1), 2]
        self.net = nn.Sequential(*(Sleeping(a, b) for a, b in pairwise(sizes)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Speeds(Callback):
    """Makes the layers of this tier as slow as they shall be, and notes schedules.

    With hosts the link between edge and cloud is slow from a step on, until the cloud has been
    without samples for some steps; when it has some again the run ends.

    Args:
        tier: This tier.
        hosts: Whose links they are.
    """

    def __init__(self, tier: str, hosts: Namespaces | None = None) -> None:
        self.seconds = SECONDS[tier]
        self.hosts = hosts
        self.schedules: list[tuple[int, dict[str, Any]]] = []
        self.recovered: int | None = None
        """The step at which the link became fast again."""

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        for module in pl_module.net:
            module.seconds_per_sample = self.seconds

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        step, made = trainer.global_step, getattr(trainer.strategy, "schedule", None)
        assert made is not None
        if not self.schedules or self.schedules[-1][1] != made.to_dict():
            self.schedules.append((step, made.to_dict()))
        if self.hosts is None:
            return
        seen = step - self.schedules[-1][0]
        uses_cloud = made.shares["cloud"].num_samples > 0
        if step == DROP:
            self._limit(trainer, SLOW)
        elif step > DROP and self.recovered is None and not uses_cloud and seen >= SETTLED:
            self.recovered = step
            self._limit(trainer, FAST)
        elif self.recovered is not None and uses_cloud and seen >= SETTLED:
            trainer.should_stop = True

    def _limit(self, trainer: Trainer, bytes_per_second: float) -> None:
        assert self.hosts is not None
        if trainer.is_global_zero:
            self.hosts.limit_rate("edge", "cloud", bytes_per_second=bytes_per_second)


def profile_of(width: int, factors: Mapping[str, float], rate: float = FAST) -> Profile:
    """Returns the profile of `Sleeper` with some tiers slower by a factor than they are."""

    def times(factor: float) -> dict[str, AffineTime]:
        return {
            tier: AffineTime(fixed=1e-4, per_sample=factor * factors.get(tier, 1.0) * seconds)
            for tier, seconds in SECONDS.items()
        }

    sizes = [width, *[8] * (LAYERS - 1), 2]
    layers = [
        LayerProfile(
            name=f"layer {n}",
            output_bytes_per_sample=4 * sizes[n + 1],
            parameter_bytes=4 * (sizes[n] + 1) * sizes[n + 1],
            forward_seconds=times(1.0),
            backward_seconds=times(0.01),
        )
        for n in range(LAYERS)
    ]
    return Profile(
        model="Sleeper",
        input_bytes_per_sample=4 * width,
        target_bytes_per_sample=8,
        data_tier="device",
        tiers={tier: TierProfile(overhead_seconds=OVERHEAD_SECONDS) for tier in TIERS},
        layers=tuple(layers),
        links=(
            LinkProfile(between=("device", "edge"), bandwidth_bytes_per_second=FAST),
            LinkProfile(between=("edge", "cloud"), bandwidth_bytes_per_second=rate),
        ),
        optimizer_state_bytes=sum(layer.parameter_bytes for layer in layers),
    )


def train(
    steps: int,
    *,
    width: int,
    strategy: HierTrainStrategy | None = None,
    speeds: Speeds | None = None,
    num_nodes: int = 1,
) -> tuple[dict[str, Tensor], int]:
    """Trains and returns the weights and the number of steps.

    Without a strategy it does so by plain Lightning, without sleep.
    """
    seed_everything(11, verbose=False)
    logging.basicConfig(format="%(name)s: %(message)s")
    logging.getLogger("lightning_hiertrain.drift").setLevel(logging.INFO)
    module = Sleeper(width)
    trainer = Trainer(
        accelerator="cpu",
        devices=1 if strategy is None or num_nodes > 1 else len(TIERS),
        num_nodes=num_nodes,
        strategy=strategy or "auto",
        max_steps=steps,
        callbacks=[] if speeds is None else [speeds],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    x = torch.randn(5 * BATCH, width, generator=torch.Generator().manual_seed(5))
    trainer.fit(module, DataLoader(TensorDataset(x, x[:, :2].contiguous()), batch_size=BATCH))
    return {name: x.clone() for name, x in module.state_dict().items()}, trainer.global_step


def train_with_drift(
    scenarios: Sequence[Mapping[str, Any]], timeout_seconds: float = 80.0
) -> list[dict[str, Any]]:
    """Trains while tiers and links are, or become, other than profiled; all scenarios at once.

    Args:
        scenarios: Arguments of `work_of`.
        timeout_seconds: When they are given up.

    Returns:
        For each: how the tiers ended, the schedules by the step in which they were in force first,
        the number of steps, and how far weights are from plain Lightning's.
    """
    with ExitStack() as stack:
        runs = []
        for scenario in scenarios:
            options = {
                "layout": "nodes" if "topology" in scenario else "local",
                "namespaces": scenario.get("namespaces"),
            }
            work = functools.partial(work_of, **scenario)
            runs.append(stack.enter_context(forked(work, TIERS, **options)))
        deadline = time.monotonic() + timeout_seconds
        for running in runs:
            running.wait(deadline - time.monotonic())
        ended = [running.ends() for running in runs]
    return [_report(ends, scenario) for ends, scenario in zip(ended, scenarios, strict=True)]


def work_of(
    tier: str,
    *,
    steps: int,
    width: int = 16,
    believed: Mapping[str, float] | None = None,
    topology: str | None = None,
    namespaces: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Trains as one tier.

    Args:
        tier: The tier.
        steps: Training steps at most.
        width: Numbers in a sample.
        believed: By which factor tiers are slower by the profile than they are.
        topology: The topology file, in namespaces.
        namespaces: Their names.
    """
    speeds = Speeds(tier, None if namespaces is None else Namespaces(dict(namespaces)))
    strategy = HierTrainStrategy(
        profile=profile_of(width, believed or {}), topology=topology, timeout_seconds=30.0
    )
    num_nodes = 1 if topology is None else len(TIERS)
    weights, count = train(
        steps, width=width, strategy=strategy, speeds=speeds, num_nodes=num_nodes
    )
    return {
        "weights": weights,
        "steps": count,
        "schedules": speeds.schedules,
        "recovered": speeds.recovered,
    }


def _report(ends: Mapping[str, End], scenario: Mapping[str, Any]) -> dict[str, Any]:
    values = {tier: end.value for tier, end in ends.items() if end.value is not None}
    device = values.get("device", {"schedules": [], "steps": 0, "recovered": None})
    width, count = scenario.get("width", 16), device["steps"]
    plain, _ = apart(lambda: train(count, width=width))
    return {
        "codes": {tier: end.code for tier, end in ends.items()},
        "outputs": {tier: end.output[-4000:] for tier, end in ends.items()},
        **{name: device[name] for name in ("schedules", "steps", "recovered")},
        "agree": all(value["schedules"] == device["schedules"] for value in values.values()),
        "differences": [largest_difference(plain, v["weights"]) for v in values.values()],
    }
