"""Callbacks that the strategy adds by itself."""

from __future__ import annotations

import logging
from typing import Any, Protocol

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_hiertrain.partition.chain import LayerChain
from lightning_hiertrain.partition.rows import (
    batch_leaves,
    num_samples,
    select_rows,
    split_positions,
    with_leaves,
)
from lightning_hiertrain.profiles import LayerProfile, Profile, TierProfile
from lightning_hiertrain.profiling.layers import LayerProfiler, TierMeasurement
from lightning_hiertrain.profiling.links import measure_links
from lightning_hiertrain.sandbox import Sandbox
from lightning_hiertrain.session import Session

log = logging.getLogger(__name__)

_EXAMPLE_ROWS = 8
"""Rows of the first mini-batch that all tiers get to measure with."""


class Profiled(Protocol):
    """What the callback needs of the strategy."""

    @property
    def session(self) -> Session:
        """This tier's part in the run."""

    def sandbox(self) -> Sandbox:
        """Returns a copy of the module to measure."""

    def adopt_profile(self, profile: Profile) -> None:
        """Plans from a profile; all tiers call it together."""


class ProfilingCallback(Callback):
    """Measures layers and links between the first training steps.

    Every tier measures at once, a slice of time ahead of each step; the steps themselves are real
    ones, taken by the data tier. It ends after `num_steps` steps, when everything is known well
    enough, or with the first epoch.

    Args:
        num_steps: Steps over which the measuring is spread.
        seconds: Time for measuring layers in all.
    """

    def __init__(self, *, num_steps: int, seconds: float) -> None:
        self.progress = 0.0
        """How far the slowest tier is, from 0 to 1."""
        self._num_steps = num_steps
        self._seconds = seconds
        self._slices = 0
        self._profiler: LayerProfiler | None = None
        self._sandbox: Any = None
        self._trainer: Trainer | None = None

    def attach(self, trainer: Trainer) -> None:
        """Joins a trainer's callbacks, as the first one."""
        self.detach()
        self._trainer, self._slices, self.progress = trainer, 0, 0.0
        trainer.callbacks.insert(0, self)  # type: ignore[attr-defined]

    def detach(self) -> None:
        """Leaves the trainer's callbacks."""
        self._profiler = self._sandbox = None
        if self._trainer is not None and self in self._trainer.callbacks:  # type: ignore[attr-defined]
            self._trainer.callbacks.remove(self)  # type: ignore[attr-defined]
        self._trainer = None

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Measures for a while."""
        if self.progress < 1:
            with isolate_rng():  # the user's random numbers are not ours to take
                self._measure(_strategy(trainer), batch)

    def _measure(self, strategy: Profiled, batch: Any) -> None:
        if self._profiler is None:
            self._start(strategy, batch)
        assert self._profiler is not None
        with self._sandbox.isolated():
            self._profiler.run_for(self._seconds / self._num_steps)
        self._slices += 1
        slowest = min(strategy.session.collectives.all_gather(self._profiler.progress))
        self.progress = 1.0 if self._slices >= self._num_steps else slowest
        rank_zero_info(f"HierTrain: profiling {100 * self.progress:3.0f} %")
        if self.progress >= 1:
            self._finish(strategy)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends the measuring with the first epoch at the latest."""
        if self._slices > 0 and self.progress < 1:
            self.progress = 1.0
            with isolate_rng():
                self._finish(_strategy(trainer))

    def _start(self, strategy: Profiled, batch: Any) -> None:
        session = strategy.session
        assert session.chain is not None
        assert session.mini_batch is not None
        rank_zero_info(
            f"HierTrain: measuring {len(session.chain)} layers on the tiers "
            f"{', '.join(session.network.topology.names)}"
        )
        rows = None
        if session.is_data_tier:
            samples = num_samples(batch)
            positions = split_positions(batch, samples)
            rows = select_rows(batch, positions, slice(0, min(samples, _EXAMPLE_ROWS)))
            if session.keeps_inputs:
                rows = with_leaves(rows, [torch.zeros_like(leaf) for leaf in batch_leaves(rows)])
        rows = session.placed(session.collectives.broadcast(rows, session.data_tier))
        self._sandbox = strategy.sandbox()
        self._profiler = LayerProfiler(
            session.chain,
            self._sandbox.loss,
            self._sandbox.module,
            rows,
            batch_size=session.mini_batch.num_samples,
            optimizer=self._sandbox.optimizers[0],
            seconds=self._seconds,
        )

    def _finish(self, strategy: Profiled) -> None:
        session = strategy.session
        assert self._profiler is not None
        assert session.chain is not None
        measured = session.collectives.all_gather(self._profiler.result())
        self._profiler = self._sandbox = None
        tiers = session.network.topology.names
        links = measure_links(session.network)
        profile = assemble(
            type(session.module).__name__,
            session.chain,
            session.data_tier,
            dict(zip(tiers, measured, strict=True)),
            links,
        )
        strategy.adopt_profile(profile)


def assemble(
    model: str,
    chain: LayerChain,
    data_tier: str,
    measured: dict[str, TierMeasurement],
    links: Any,
) -> Profile:
    """Puts what the tiers measured together.

    Args:
        model: The model's name.
        chain: Its layers.
        data_tier: The tier that has the data.
        measured: What each tier measured, in order of rank.
        links: What the links carry.
    """
    end = len(chain.calls)
    leaves = list(zip(chain.leaf_shapes, chain.first_leaf_use, chain.last_leaf_use, strict=True))
    return Profile(
        model=model,
        input_bytes_per_sample=sum(
            s.bytes_per_sample for s, first, _ in leaves if s and first < end
        ),
        target_bytes_per_sample=sum(
            s.bytes_per_sample for s, _, last in leaves if s and last >= end
        ),
        data_tier=data_tier,
        tiers={
            tier: TierProfile(optimizer_seconds=m.optimizer_seconds, loss_seconds=m.loss_seconds)
            for tier, m in measured.items()
        },
        layers=tuple(
            LayerProfile(
                name=layer.name,
                output_bytes_per_sample=layer.output_bytes_per_sample,
                parameter_bytes=layer.parameter_bytes,
                forward_seconds={tier: m.forward[i] for tier, m in measured.items()},
                backward_seconds={tier: m.backward[i] for tier, m in measured.items()},
            )
            for i, layer in enumerate(chain)
        ),
        links=links,
    )


def _strategy(trainer: Trainer) -> Profiled:
    strategy: Any = trainer.strategy
    return strategy  # type: ignore[no-any-return]
