"""Callbacks that the strategy adds by itself."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_hiertrain.partition.chain import LayerChain
from lightning_hiertrain.partition.isolation import same_chance
from lightning_hiertrain.partition.rows import (
    batch_leaves,
    num_samples,
    select_rows,
    split_positions,
    with_leaves,
)
from lightning_hiertrain.profiles import (
    AffineTime,
    CodecProfile,
    LayerProfile,
    Profile,
    TierProfile,
)
from lightning_hiertrain.profiling.codecs import (
    accuracy_losses,
    codec_profiles,
    crossings,
    sampled_cuts,
    time_codecs,
)
from lightning_hiertrain.profiling.layers import LayerProfiler, TierMeasurement
from lightning_hiertrain.profiling.links import measure_links
from lightning_hiertrain.profiling.overhead import StepClock, mean_seconds
from lightning_hiertrain.sandbox import Sandbox
from lightning_hiertrain.session import Session
from lightning_hiertrain.transport.network import Network

log = logging.getLogger(__name__)

_EXAMPLE_ROWS = 8
"""Rows of the first mini-batch that all tiers get to measure with."""
_MOST_ROWS = 32
_MOST_BYTES = 4 << 20
"""Of the first mini-batch, to find out what travels of it."""
_CALIBRATION_BYTES = 1 << 20
"""Of the first mini-batch, to measure codecs on; more if that is less than the rows above."""
_LEAST_STEPS = 6
"""How many training steps it takes to know what a step needs besides its layers."""
_CODECS_PART = 0.3
"""Of the time for measuring layers, what measuring codecs may take on top."""


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
    ones, taken by the data tier, and show what a step needs besides its layers. It ends after
    `num_steps` steps, when everything is known well enough, or with the first epoch.

    Args:
        num_steps: Steps over which the measuring is spread.
        seconds: Time for measuring layers in all.
        codecs: Names of the link codecs to measure.
    """

    def __init__(self, *, num_steps: int, seconds: float, codecs: Sequence[str] = ()) -> None:
        self.progress = 0.0
        """How far the slowest tier is, from 0 to 1."""
        self._num_steps = num_steps
        self._seconds = seconds
        self._codecs = tuple(codecs)
        self._slices = 0
        self._clock = StepClock(torch.device("cpu"))
        self._profiler: LayerProfiler | None = None
        self._sandbox: Any = None
        self._example: Any = None
        """Rows of the first mini-batch, on the data tier."""
        self._calibration: Any = None
        self._trainer: Trainer | None = None

    def attach(self, trainer: Trainer) -> None:
        """Joins a trainer's callbacks, as the first one."""
        self.detach()
        self._trainer, self._slices, self.progress = trainer, 0, 0.0
        self._clock = StepClock(trainer.strategy.root_device)
        trainer.callbacks.insert(0, self)  # type: ignore[attr-defined]

    def detach(self) -> None:
        """Leaves the trainer's callbacks."""
        self._forget()
        if self._trainer is not None and self in self._trainer.callbacks:  # type: ignore[attr-defined]
            self._trainer.callbacks.remove(self)  # type: ignore[attr-defined]
        self._trainer = None

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Measures for a while."""
        if self.progress < 1:
            # The user's random numbers are not ours to take.
            with self._clock.between_steps(), same_chance():
                self._measure(_strategy(trainer), batch)

    def _measure(self, strategy: Profiled, batch: Any) -> None:
        if self._profiler is None:
            self._start(strategy, batch)
        assert self._profiler is not None
        with self._sandbox.isolated(), self._clock.working():
            self._profiler.run_for(self._seconds / self._num_steps)
        self._slices += 1
        slowest = min(strategy.session.collectives.all_gather(self._profiler.progress))
        self.progress = min(slowest, self._slices / min(_LEAST_STEPS, self._num_steps))
        if self._slices >= self._num_steps:
            self.progress = 1.0
        rank_zero_info(f"HierTrain: profiling {100 * self.progress:3.0f} %")
        if self.progress >= 1:
            self._finish(strategy)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Notes when the step has ended."""
        if self.progress < 1:
            self._clock.step_ended()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends the measuring with the first epoch at the latest."""
        if self._slices > 0 and self.progress < 1:
            self.progress = 1.0
            with same_chance():
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
            self._example = _rows(batch, _MOST_ROWS, _MOST_BYTES)
            rows = _rows(self._example, _EXAMPLE_ROWS, 0)
            if session.keeps_inputs:
                rows = with_leaves(rows, [torch.zeros_like(leaf) for leaf in batch_leaves(rows)])
        rows = session.placed(session.collectives.broadcast(rows, session.data_tier))
        if self._codecs:
            self._calibration = self._share_calibration(session)
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
        own = self._profiler.result()
        overhead = self._clock.overhead_seconds(self._computed_seconds(session, own))
        measured = session.collectives.by_tier(replace(own, overhead_seconds=overhead))
        codecs = self._measure_codecs(session, measured) if self._codecs else {}
        with self._clock.carrying(lambda: _carried_bytes(session.network)):
            links = measure_links(session.network, collector=session.data_tier)
        here = session.collectives.by_tier(self._clock.transfer_seconds_per_byte())
        profile = assemble(
            type(session.module).__name__,
            session.chain,
            session.data_tier,
            {
                tier: replace(measured[tier], transfer_seconds_per_byte=seconds)
                for tier, seconds in here.items()
            },
            tuple(link for link in links if here.keys() >= set(link.between)),
        )
        dealt = self._measure_dealing(session, session.chain, profile)
        self._forget()
        strategy.adopt_profile(replace(profile, codecs=codecs, **dealt))

    @staticmethod
    def _computed_seconds(session: Session, measured: TierMeasurement) -> float:
        """What this tier computed of each training step meanwhile."""
        if not session.is_owner:
            return 0.0
        assert session.mini_batch is not None
        return measured.step_seconds(session.mini_batch.num_samples) + measured.optimizer_seconds

    def _forget(self) -> None:
        self._profiler = self._sandbox = self._example = self._calibration = None

    def _share_calibration(self, session: Session) -> Any:
        """Gives all tiers some rows to measure codecs on: noise where inputs must stay at home."""
        own = shared = None
        if session.is_data_tier:
            own = shared = _rows(self._example, _MOST_ROWS, _CALIBRATION_BYTES)
            if session.keeps_inputs:
                shared = with_leaves(own, [_noise_like(leaf) for leaf in batch_leaves(own)])
        shared = session.placed(session.collectives.broadcast(shared, session.data_tier))
        return shared if own is None else session.placed(own)

    def _measure_codecs(
        self, session: Session, measured: Mapping[str, TierMeasurement]
    ) -> dict[str, CodecProfile]:
        """Measures the codecs: times on every tier, the loss of accuracy on the fastest one."""
        chain, sandbox = session.chain, self._sandbox
        assert chain is not None
        assert session.mini_batch is not None
        size = session.mini_batch.num_samples
        calibrator = min(measured, key=lambda tier: measured[tier].step_seconds(size))
        if session.keeps_inputs:
            calibrator = session.data_tier
        cuts, seconds = sampled_cuts(chain), _CODECS_PART * self._seconds / 2
        losses = None
        with sandbox.isolated():
            crossing = crossings(chain, sandbox.loss, self._calibration, cuts)
            times = time_codecs(crossing, self._codecs, seconds=seconds)
            if session.tier == calibrator:
                losses = accuracy_losses(
                    chain,
                    sandbox.loss,
                    sandbox.module,
                    self._calibration,
                    cuts,
                    self._codecs,
                    seconds=seconds,
                )
        gathered = session.collectives.by_tier(times)
        losses = session.collectives.broadcast(losses, calibrator)
        return codec_profiles(gathered, losses, calibrator)

    def _measure_dealing(
        self, session: Session, chain: LayerChain, profile: Profile
    ) -> dict[str, Any]:
        """Measures what it takes to deal out samples, on the slowest way from the data tier.

        Returns:
            Those fields of the profile.
        """
        fields = None
        if session.is_data_tier:
            others = [tier for tier in profile.tiers if tier != session.data_tier]
            rates = [profile.bytes_per_second(session.data_tier, tier) for tier in others]
            rate = min(rates, default=math.inf)
            rows = num_samples(self._example)
            bytes_per_sample = [x / rows for x in session.bytes_of_leaves(self._example, rate)]
            inputs, targets = _input_and_target(chain, bytes_per_sample)
            packing = mean_seconds(lambda: session.bytes_of_leaves(self._example, rate))
            fields = {
                "input_bytes_per_sample": inputs,
                "target_bytes_per_sample": targets,
                "dealing_seconds": AffineTime(
                    fixed=self._clock.dealing_seconds(), per_sample=packing / rows
                ).to_dict(),
            }
        shared = session.collectives.broadcast(fields, session.data_tier)
        return {**shared, "dealing_seconds": AffineTime(**shared["dealing_seconds"])}


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
    raw = [0 if shape is None else shape.bytes_per_sample for shape in chain.leaf_shapes]
    inputs, targets = _input_and_target(chain, raw)
    return Profile(
        model=model,
        input_bytes_per_sample=inputs,
        target_bytes_per_sample=targets,
        data_tier=data_tier,
        tiers={
            tier: TierProfile(
                optimizer_seconds=m.optimizer_seconds,
                overhead_seconds=m.overhead_seconds,
                transfer_seconds_per_byte=m.transfer_seconds_per_byte,
                loss_seconds=m.loss_seconds,
            )
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


def _input_and_target(chain: LayerChain, bytes_per_sample: Sequence[float]) -> tuple[int, int]:
    """Adds up the leaves that the chain reads, and those that what follows it reads."""
    end = len(chain.calls)
    leaves = [
        (size, first, last)
        for size, first, last, shape in zip(
            bytes_per_sample,
            chain.first_leaf_use,
            chain.last_leaf_use,
            chain.leaf_shapes,
            strict=True,
        )
        if shape is not None
    ]
    inputs = sum(size for size, first, _ in leaves if first < end)
    targets = sum(size for size, _, last in leaves if last >= end)
    return math.ceil(inputs), math.ceil(targets)


def _carried_bytes(network: Network) -> int:
    """Returns how many bytes a tier has sent and received, those that it has relayed twice."""
    return sum(
        peer["bytes_sent"] + peer["bytes_received"] + 2 * peer["bytes_relayed"]
        for peer in network.stats().values()
    )


def _rows(batch: Any, most: int, most_bytes: int) -> Any:
    """Copies the first rows of a batch, up to a number and bytes, but as many as all tiers get."""
    samples = num_samples(batch)
    positions = split_positions(batch, samples)
    leaves = batch_leaves(batch)
    bytes_per_row = sum(leaves[i].nbytes for i in positions) // max(samples, 1)
    count = max(min(most, most_bytes // max(bytes_per_row, 1)), _EXAMPLE_ROWS)
    rows = select_rows(batch, positions, slice(0, min(samples, count)))
    return with_leaves(rows, [leaf.clone() for leaf in batch_leaves(rows)])


def _noise_like(leaf: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    if not leaf.is_floating_point():
        return torch.zeros_like(leaf)
    return torch.randn(leaf.shape, generator=generator).to(leaf)


def _strategy(trainer: Trainer) -> Profiled:
    strategy: Any = trainer.strategy
    return strategy  # type: ignore[no-any-return]
