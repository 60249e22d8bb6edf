"""Trains by `HierTrainStrategy` under one schedule after the other and times the steps.

    … -- python -m benchmarks.workloads.hiertrain --profile            measure, plan and time that
    … -- python -m benchmarks.workloads.hiertrain --cases cases.json   time given schedules
    … -- python -m benchmarks.workloads.hiertrain --plain              Lightning alone, on rank 0

A case is `{"name": …, "schedule": {…}, "rates_mbit": {"edge-cloud": 10}}`. All write
`hiertrain.json`, the first form `profile.json` too, with the links as measured at each of
`--rates`; with `--steps 0` it ends there.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.testbed import join_quota, set_rate
from benchmarks.workloads import records
from benchmarks.workloads.models import Batch, Turns, make_batches, make_chain, make_optimizer
from benchmarks.workloads.step_ends import StepEnds
from lightning_hiertrain import HierTrainStrategy, Schedule
from lightning_hiertrain.profiling.links import measure_links

SWITCH_STEPS = 10
"""After so many steps a new schedule must be in force."""


class Model(L.LightningModule):
    """A chain of layers with the loss and optimizer that all systems use."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Returns the cross entropy of a mini-batch."""
        images, labels = batch
        return F.cross_entropy(self.layers(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer of all systems."""
        return make_optimizer(self.parameters())


class Data(L.LightningDataModule):
    """Mini-batches that are kept ready."""

    def __init__(self, parsed: argparse.Namespace) -> None:
        super().__init__()
        self._parsed = parsed

    def train_dataloader(self) -> Any:
        """Returns mini-batches without end."""
        parsed = self._parsed
        return Turns(make_batches(parsed.model, parsed.pixels, parsed.batch_size)).loader()


class Timer(StepEnds):
    """Times the steps of one case after the other, from the end of one step to that of the next.

    All tiers make the same moves; the data tier alone decides and writes.

    Args:
        cases: What to time.
        protocol: How many steps.
        head: What goes ahead of the results in their file.
        rates: Bandwidths, in Mbit/s, of the link `edge-cloud` at which links are measured, if a
            profile is to be made first.
    """

    def __init__(
        self,
        cases: list[dict[str, Any]],
        protocol: records.Protocol,
        *,
        head: Mapping[str, Any],
        rates: tuple[float, ...] = (),
    ) -> None:
        super().__init__()
        self._cases = cases
        self._protocol = protocol
        self._head = head
        self._rates = rates
        self._at = 0
        self._warm: list[float] = []
        self._counted: list[float] = []
        self._to_count: int | None = None
        self._waited = 0
        self._last = 0.0
        self._results: list[dict[str, Any]] = []

    def begin(self) -> None:
        """Joins the quota: from here on everything runs as slow as its tier."""
        join_quota()
        self._prepare(self.trainer)

    def step_ended(self) -> None:
        """Counts a step."""
        trainer = self.trainer
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        if getattr(trainer.strategy, "profiling_progress", 1.0) < 1:
            return
        if self._rates:
            self._measure_links(trainer)
            return
        if not self._is_in_force(trainer):
            return
        if self._to_count is None:
            self._warm.append(seconds)
            # The data tier's clock decides for all.
            self._to_count = _agreed(trainer, self._decide())
            if self._to_count is not None:
                _meet(trainer)
                self._last = time.perf_counter()
        else:
            self._counted.append(seconds)
        if self._to_count == len(self._counted):
            self._finish(trainer)

    def _decide(self) -> int | None:
        if not self._protocol.ends_warm_up(self._warm):
            return None
        return self._protocol.counted_steps(self._warm)

    def _is_in_force(self, trainer: L.Trainer) -> bool:
        wanted = self._cases[self._at].get("schedule")
        strategy: Any = trainer.strategy
        if wanted is None or Schedule.from_dict(wanted) == strategy.schedule:
            return True
        self._waited += 1
        if self._waited > SWITCH_STEPS:
            raise RuntimeError(
                f"{SWITCH_STEPS} steps after it was adopted the schedule of "
                f"{self._cases[self._at]['name']!r} is not in force"
            )
        return False

    def _prepare(self, trainer: L.Trainer) -> None:
        """Puts the schedule and the links of the next case in force, between two steps."""
        case = self._cases[self._at]
        self._warm, self._counted, self._to_count, self._waited = [], [], None, 0
        if self._at and case.get("schedule") is not None:
            strategy: Any = trainer.strategy
            strategy.session.adopt(Schedule.from_dict(case["schedule"]))
        if trainer.is_global_zero:
            for link, mbit in case.get("rates_mbit", {}).items():
                set_rate(link, mbit)
        _meet(trainer)
        self._last = time.perf_counter()

    def _finish(self, trainer: L.Trainer) -> None:
        case = self._cases[self._at]
        used = getattr(trainer.strategy, "schedule", None)
        more = {} if used is None or case.get("schedule") else {"schedule": used.to_dict()}
        self._results.append(records.record(case, self._warm, self._counted, **more))
        data = {**self._head, "peak_memory_bytes": records.peak_memory_bytes()}
        records.write("hiertrain.json", {**data, "results": self._results})
        if trainer.is_global_zero:
            result = self._results[-1]
            seconds = result["median_seconds"] or result["cut_off_seconds"]
            _say(f"{case['name']}: {seconds:.4f} s, {result['num_steps']} steps")
        self._at += 1
        if self._at == len(self._cases):
            trainer.should_stop = True
        else:
            self._prepare(trainer)

    def _measure_links(self, trainer: L.Trainer) -> None:
        """Measures the links at each rate and keeps them with the profile."""
        strategy: Any = trainer.strategy
        profile = strategy.profile
        assert profile is not None
        links = {}
        for mbit in self._rates:
            if trainer.is_global_zero:
                set_rate("edge-cloud", mbit)
            _meet(trainer)
            measured = measure_links(strategy.session.network)
            links[f"{mbit:g}"] = [
                {
                    "between": list(link.between),
                    "bandwidth_bytes_per_second": link.bandwidth_bytes_per_second,
                    "latency_seconds": link.latency_seconds,
                }
                for link in measured
            ]
        self._rates = ()
        if trainer.is_global_zero:
            data = {"profile": profile.to_dict(), "links_by_rate_mbit": links}
            records.write("profile.json", {**self._head, **data})
            _say(f"profile of {len(profile.layers)} layers, links at {list(links)} Mbit/s")
        if self._protocol.steps:
            self._prepare(trainer)
        else:
            trainer.should_stop = True


def _agreed(trainer: L.Trainer, value: Any) -> Any:
    return trainer.strategy.broadcast(value, 0)


def _meet(trainer: L.Trainer) -> None:
    trainer.strategy.barrier("benchmark")


def main() -> None:
    """Runs the workload."""
    made = records.parser(__doc__ or "")
    made.add_argument("--cases", type=Path)
    made.add_argument("--profile", action="store_true", help="measure, and plan from that")
    made.add_argument("--rates", type=float, nargs="*", default=[], help="Mbit/s of edge-cloud")
    made.add_argument("--plain", action="store_true", help="Lightning alone, on rank 0")
    made.add_argument("--policy", default="hiertrain")
    made.add_argument("--no-overlap", action="store_true")
    made.add_argument("--profile-steps", type=int, default=10)
    made.add_argument("--profile-seconds", type=float, default=15)
    made.add_argument("--timeout", type=float, default=600, help="seconds a tier waits for another")
    parsed, protocol = records.parse(made)
    _quieten()
    if parsed.plain and os.environ.get("NODE_RANK", "0") != "0":
        return
    cases: list[dict[str, Any]] = [{"name": "plain" if parsed.plain else parsed.policy}]
    if parsed.cases is not None:
        cases = records.read_cases(parsed.cases)
    strategy: Any = "auto"
    if not parsed.plain:
        first = cases[0].get("schedule")
        strategy = HierTrainStrategy(
            topology=os.environ["HIERTRAIN_TOPOLOGY"],
            schedule=None if first is None else Schedule.from_dict(first),
            policy=parsed.policy,
            overlap=not parsed.no_overlap,
            profile_steps=parsed.profile_steps,
            profile_seconds=parsed.profile_seconds,
            timeout_seconds=parsed.timeout,
            silence_seconds=60.0,  # a tenth of a core may be busy with one layer for long
        )
    head = {
        "system": "plain" if parsed.plain else "hiertrain",
        "model": parsed.model,
        "batch_size": parsed.batch_size,
        "pixels": parsed.pixels,
        "overlap": not parsed.no_overlap,
        "command": sys.argv[1:],
        "machine": records.machine(),
    }
    timer = Timer(cases, protocol, head=head, rates=tuple(parsed.rates) if parsed.profile else ())
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=1 if parsed.plain else int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        profiler=timer,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    timer.trainer = trainer
    trainer.fit(Model(make_chain(parsed.model, parsed.pixels)), datamodule=Data(parsed))


def _quieten() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
