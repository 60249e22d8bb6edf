"""A callback that records some training steps on all tiers and writes them to a file."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_hiertrain.accelerators import synchronise
from lightning_hiertrain.profiles import Profile
from lightning_hiertrain.schedule import Schedule
from lightning_hiertrain.session import Session
from lightning_hiertrain.timeline.clocks import Clock, compare_clocks
from lightning_hiertrain.timeline.data import Timeline
from lightning_hiertrain.timeline.joining import join
from lightning_hiertrain.timeline.predicted import predicted_step
from lightning_hiertrain.timeline.recorder import Recorder

log = logging.getLogger(__name__)

_STEPS_IN_FORCE = 5
"""Steps under a schedule before some are recorded by default."""
_RECORDED_STEPS = 3


class Watched(Protocol):
    """What the callback needs of the strategy."""

    @property
    def session(self) -> Session:
        """This tier's part in the run."""

    @property
    def profile(self) -> Profile | None:
        """What was measured or given."""

    @property
    def profiling_progress(self) -> float:
        """1 when nothing is left to be measured."""


class TimelineCallback(Callback):
    """Records what each tier computes and each link carries in some training steps.

    The file that rank 0 writes when they are over is shown by `hiertrain timeline`.

    Args:
        steps: Which training steps, by `trainer.global_step` at their start; by default three in a
            row, once a schedule has been in force for five steps and nothing is being measured.
        path: The file.
    """

    def __init__(
        self, *, steps: Iterable[int] | None = None, path: str | Path = "timeline.json"
    ) -> None:
        self.path = Path(path)
        self._asked = None if steps is None else frozenset(steps)
        if self._asked is not None and (not self._asked or min(self._asked) < 0):
            raise ValueError(f"`steps` must name steps from 0 on, got {sorted(self._asked)}")
        self._begin_run()

    def _begin_run(self) -> None:
        self._wanted = self._asked
        self._recorder: Recorder | None = None
        self._step = -1
        """The step that ended last."""
        self._schedules: dict[int, Schedule] = {}
        """The schedule of each recorded step."""
        self._in_force: tuple[Schedule | None, int] = (None, 0)
        """A schedule and its number of steps."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins to record if a step that was asked for is near."""
        if not hasattr(trainer.strategy, "session"):
            raise MisconfigurationException(
                "`TimelineCallback` records what tiers do and needs `strategy=HierTrainStrategy()`,"
                f" got `{type(trainer.strategy).__name__}`"
            )
        self._begin_run()
        self._step = trainer.global_step - 1
        self._record_if_near(_strategy(trainer), pl_module)
        if self._recorder is not None:
            self._recorder.step_ended()
            self._recorder.name_step(self._step)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Notes the end of a step; begins or ends recording between two."""
        if trainer.global_step - 1 == self._step:
            return  # gradients only add up
        strategy = _strategy(trainer)
        self._step = trainer.global_step - 1
        if self._recorder is not None:
            assert strategy.session.schedule is not None
            self._recorder.name_step(self._step)
            self._schedules[self._step] = strategy.session.schedule
        if self._wanted is None:
            self._choose(strategy)
        if self._wanted and max(self._wanted) < self._step and self._recorder is not None:
            self._finish(trainer)
        else:
            self._record_if_near(strategy, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes what there is if training ends early."""
        if self._recorder is not None:
            self._finish(trainer)
        elif not self._schedules:
            log.warning(
                "no timeline is written to %s: training ended after step %d, before the steps to "
                "be recorded",
                self.path,
                self._step,
            )

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Ends recording; a run that failed leaves no timeline."""
        if self._recorder is not None:
            _strategy(trainer).session.network.observer = self._recorder = None

    def _choose(self, strategy: Watched) -> None:
        session = strategy.session
        schedule, count = self._in_force
        count = count + 1 if session.schedule is schedule else 1
        self._in_force = (session.schedule, count)
        settled = strategy.profiling_progress >= 1 and not session.changes_schedule
        if settled and count >= _STEPS_IN_FORCE:
            first = self._step + 2  # the one before it is needed to know where it begins
            self._wanted = frozenset(range(first, first + _RECORDED_STEPS))

    def _record_if_near(self, strategy: Watched, module: LightningModule) -> None:
        """Looks on from one step before each wanted one to one after it."""
        near = {self._step, self._step + 1, self._step + 2}
        is_near = self._wanted is not None and not near.isdisjoint(self._wanted)
        if is_near and self._recorder is None:
            self._recorder = Recorder(functools.partial(synchronise, module.device))
        strategy.session.network.observer = self._recorder if is_near else None

    def _finish(self, trainer: Trainer) -> None:
        """Gathers what all tiers have noted; all call it after the same step."""
        strategy, recorder = _strategy(trainer), self._recorder
        session = strategy.session
        network = session.network
        assert recorder is not None
        notes = recorder.notes()
        network.observer = self._recorder = None
        self._wanted = frozenset() if self._wanted is None else self._wanted
        is_zero = session.collectives.by_tier(bool(trainer.is_global_zero))
        zero = next(tier for tier, is_it in is_zero.items() if is_it)
        network.flush()
        session.collectives.barrier("timeline")
        clocks = compare_clocks(network, zero, name=str(self._step))
        gathered = session.collectives.gather_by_tier(notes, zero)
        if gathered is not None:
            here = gathered.keys() & clocks.keys()
            self._write(strategy, {tier: gathered[tier] for tier in here}, clocks)

    def _write(
        self, strategy: Watched, notes: dict[str, dict[str, Any]], clocks: dict[str, Clock]
    ) -> None:
        assert self._wanted is not None
        session = strategy.session
        wanted = self._wanted.intersection(self._schedules)
        schedule = self._schedules[max(wanted)] if wanted else None
        kept = [step for step in wanted if self._schedules[step] == schedule]
        joined = join(
            notes,
            {tier: clock.ahead_seconds for tier, clock in clocks.items()},
            wanted=kept,
            owner="" if schedule is None else schedule.owner,
            overlap=session.overlaps,
        )
        if schedule is None or not joined.steps:
            log.warning("no timeline is written to %s: no step was recorded whole", self.path)
            return
        if missing := sorted(self._wanted - {step.number for step in joined.steps}):
            log.warning(
                "the timeline lacks the steps %s: they were not carried out under its schedule",
                missing,
            )
        predicted = None
        if strategy.profile is not None:
            try:
                predicted = predicted_step(strategy.profile, schedule, overlap=session.overlaps)
            except ValueError as error:
                log.warning("the timeline has no prediction: %s", error)
        timeline = Timeline(
            model=type(session.module).__name__,
            overlap=session.overlaps,
            tiers=session.network.topology.names,
            links=tuple(link.between for link in session.network.topology.links),
            schedule=schedule,
            profile=strategy.profile,
            predicted=predicted,
            clock_uncertainty_seconds={
                tier: clock.uncertainty_seconds for tier, clock in clocks.items()
            },
            steps=joined.steps,
            spans=joined.spans,
            transfers=joined.transfers,
        )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        timeline.to_json(self.path)
        log.info("timeline of %d steps written to %s", len(timeline.steps), self.path)


def _strategy(trainer: Trainer) -> Watched:
    strategy: Any = trainer.strategy
    return strategy  # type: ignore[no-any-return]
