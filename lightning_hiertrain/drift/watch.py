"""Watching a run: reports come in, plans are made beside the training, a switch is proposed.

    drift seen for long enough -> plan in the background -> worth it? no: believe it, go on
                                                        -> links involved? measure them, plan again
                                                        -> propose the schedule

All tiers have a `DriftWatch`; the data tier's alone decides. It proposes by the announcement of the
next mini-batch, so that all tiers measure or switch together between two optimizer steps.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any

from lightning_hiertrain.drift.decision import (
    Patience,
    Verdict,
    drifted_profile,
    expected_busy,
    judge,
)
from lightning_hiertrain.drift.estimates import Drift, Estimates
from lightning_hiertrain.drift.reports import Prober, Report, StepNotes
from lightning_hiertrain.errors import PeerLostError
from lightning_hiertrain.profiles import Profile
from lightning_hiertrain.profiling.links import measure_links
from lightning_hiertrain.schedule import Schedule
from lightning_hiertrain.transport.network import Network

log = logging.getLogger(__name__)

_REPORT_TAG = "drift/report"
_REPORT_SECONDS = 0.3
"""Between two reports."""
_STEPS = 3
"""Whose median is what a step takes now."""
_LINK_SECONDS = 0.6
"""For measuring a link when a schedule depends on what it seems to carry."""
_BACKGROUND_NICENESS = 10
_SWITCH_INTERVAL_SECONDS = 5e-4
"""For which a plan in the making may keep the interpreter from the training."""
_CLOSING_SECONDS = 10.0


class NoWatch:
    """Watches nothing: in place of a `DriftWatch` where no schedule is to change."""

    believed: Profile | None = None

    def batch_dealt(self, num_samples: int, *, is_divided: bool) -> None:
        """Does nothing, as all methods."""

    def disturb(self) -> None: ...

    def switched(self, schedule: Schedule) -> None: ...

    def step_ended(self) -> None: ...

    def news(self) -> dict[str, Any] | None: ...

    def hear(self, news: dict[str, Any] | None) -> None: ...

    def close(self) -> None: ...


class DriftWatch:
    """One tier's part in noticing drift.

    Args:
        network: The links of this tier.
        data_tier: The tier that decides.
        profile: What was measured or given.
        plan: Makes the best schedule from a profile; runs on a thread of its own.
        overlap: Whether transfers overlap with computation.
        least_saving: The part of a step that a new schedule must save.
        steps_left: Returns how many steps are to come.
        believe: Told on the data tier what is believed when another schedule is proposed.
    """

    def __init__(
        self,
        network: Network,
        data_tier: str,
        profile: Profile,
        *,
        plan: Callable[[Profile], Schedule],
        overlap: bool,
        least_saving: float,
        steps_left: Callable[[], float],
        believe: Callable[[Profile], None],
    ) -> None:
        self.believed = profile
        """The profile, with what has drifted, as it is believed to be now; the data tier's."""
        self._network = network
        self._data_tier = data_tier
        self._profile = profile
        self._plan = plan
        self._overlap = overlap
        self._least_saving = least_saving
        self._steps_left = steps_left
        self._believe = believe
        self._notes = StepNotes(network)
        self._prober = Prober(network)
        self._patience = Patience()
        self._schedule: Schedule | None = None
        self._estimates: Estimates | None = None
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._planning: _Planning | None = None
        self._to_measure: tuple[str, ...] = ()
        self._proposed: Verdict | None = None
        self._reported = 0.0
        self._seen: dict[str, Any] = {}
        self._has_measured = False

    @property
    def _decides(self) -> bool:
        return self._network.tier == self._data_tier

    # What the session tells

    def batch_dealt(self, num_samples: int, *, is_divided: bool) -> None:
        """Notes a mini-batch of the step at hand."""
        whole = self._schedule.batch_size if self._schedule is not None else -1
        self._notes.batch_dealt(is_whole=is_divided and num_samples == whole)

    def disturb(self) -> None:
        """Notes that this step holds something that others do not, such as a validation."""
        self._notes.disturb()

    def switched(self, schedule: Schedule) -> None:
        """Notes that a schedule was put in force, by whomever."""
        self._schedule = schedule
        self._notes.switched()
        self._steps.clear()
        if not self._decides:
            return
        if self._estimates is not None:
            self._patience.switched()
        self._proposed, self._to_measure, self._has_measured = None, (), False
        if self._planning is not None:
            self._planning.is_outdated = True
        expected = expected_busy(self._profile, schedule, overlap=self._overlap)
        if self._estimates is None:
            rates = {
                link.name: known.bandwidth_bytes_per_second
                for link in self._profile.topology.links
                if (known := self._profile.link(*link.between)) is not None
            }
            self._estimates = Estimates(expected, self._profile.topology, rates)
        else:
            self._estimates.expect(expected)

    def step_ended(self) -> None:
        """Notes the end of a step on this tier; on the data tier it may begin to plan."""
        notes, network = self._notes, self._network
        notes.step_ended()
        goodput = network.take_goodput()
        self._prober.run(goodput)
        for peer, seen in goodput.items():
            self._seen[peer] = self._seen[peer] + seen if peer in self._seen else seen
        if not self._decides:
            self._report()
            return
        if self._estimates is None:
            return
        if notes.step_seconds is not None:
            self._steps.append(notes.step_seconds)
        self._patience.step()
        self._estimates.take(network.tier, notes.take(self._taken_goodput()))
        self._hear_reports(self._estimates)
        self._decide(self._estimates)

    # Between two steps

    def news(self) -> dict[str, Any] | None:
        """Returns what all tiers must do before the next mini-batch, on the data tier."""
        if self._to_measure:
            return {"lost": None, "schedule": None, "measure": list(self._to_measure)}
        if self._proposed is not None:
            verdict, self._proposed = self._proposed, None
            names = set(verdict.schedule.shares)
            if any(self._network.membership.spares(tier) for tier in names):
                return None  # a tier has died meanwhile
            return {
                "lost": None,
                "schedule": verdict.schedule.to_dict(),
            }
        return None

    def hear(self, news: dict[str, Any] | None) -> None:
        """Takes in what `news` returned on the data tier; all tiers call this together."""
        names = None if news is None else news.get("measure")
        if not names:
            return
        self._notes.disturb()
        self._network.flush()  # nothing else shall travel meanwhile
        links = measure_links(
            self._network,
            seconds_per_link=_LINK_SECONDS,
            collector=self._data_tier,
            again={name: self._latency(name) for name in names},
        )
        self._network.take_goodput()
        if self._decides and self._estimates is not None:
            self._to_measure, self._has_measured = (), True
            measured = {
                link.name: known.bandwidth_bytes_per_second
                for link in self._profile.topology.links
                for known in links
                if set(known.between) == set(link.between)
            }
            log.info("links were measured again: %s", measured)
            self._estimates.links.confirm(measured)
            self._start_planning(self._estimates)

    def close(self) -> None:
        """Waits for a plan that is being made."""
        if self._planning is not None:
            self._planning.join(_CLOSING_SECONDS)

    # Inside

    def _latency(self, name: str) -> float:
        link = next(link for link in self._profile.topology.links if link.name == name)
        known = self._profile.link(*link.between)
        return 0.0 if known is None else known.latency_seconds

    def _taken_goodput(self) -> dict[str, Any]:
        seen, self._seen = self._seen, {}
        return seen

    def _report(self) -> None:
        now = self._notes.ended
        if now - self._reported >= _REPORT_SECONDS:
            self._reported = now
            report = self._notes.take(self._taken_goodput())
            self._network.send(
                self._data_tier, _REPORT_TAG, report.to_dict(), control=True, at_once=False
            )

    def _hear_reports(self, estimates: Estimates) -> None:
        for tier in self._network.topology.names:
            if tier == self._network.tier:
                continue
            with contextlib.suppress(PeerLostError):  # others will find out
                while self._network.poll(tier, _REPORT_TAG):
                    report = Report.from_dict(self._network.receive(tier, _REPORT_TAG))
                    if report.schedule == self._notes.schedule:
                        estimates.take(tier, report)

    def _decide(self, estimates: Estimates) -> None:
        if self._planning is not None:
            if not self._planning.is_done:
                return
            planning, self._planning = self._planning, None
            if not planning.is_outdated:
                self._take_verdict(estimates, planning)
            return
        if self._to_measure or self._proposed is not None or not self._patience.allows:
            return
        drift = estimates.drift()
        if drift:
            log.info("drift was seen: %s", drift)
            self._patience.drifted()
        if self._steps and (drift or self._patience.wants_another_look):
            self._accept(estimates, drift)
            self._has_measured = False
            self._start_planning(estimates)

    def _accept(self, estimates: Estimates, drift: Drift) -> None:
        """Believes what has drifted, and of the other tiers what was measured."""
        slowness = {**estimates.tiers.measured(), **drift.slowness}
        estimates.tiers.believe(slowness)
        estimates.links.believe(drift.bytes_per_second)

    def _start_planning(self, estimates: Estimates) -> None:
        assert self._schedule is not None
        profile = drifted_profile(
            self._profile, estimates.tiers.slowness, estimates.links.bytes_per_second
        )
        current, measured, left = self._schedule, median(self._steps), self._steps_left()

        def work() -> Verdict:
            return judge(
                profile,
                current,
                plan=self._plan,
                measured_seconds=measured,
                overlap=self._overlap,
                least_saving=self._least_saving,
                steps_left=left,
            )

        self._planning = _Planning(work, profile)

    def _take_verdict(self, estimates: Estimates, planning: _Planning) -> None:
        verdict = planning.verdict
        self.believed = planning.profile
        if verdict is None or not verdict.is_worth_it:
            log.info("another schedule is not worth a switch: %s", verdict)
            self._patience.refused()
            return
        links = estimates.links
        if links.unconfirmed and not self._has_measured:
            self._to_measure = tuple(sorted(links.unconfirmed))
            return
        log.info(
            "the schedule changes: a step takes %.4g s and shall take %.4g s",
            verdict.current_seconds,
            verdict.new_seconds,
        )
        self._believe(planning.profile)
        self._proposed = verdict


class _Planning:
    """A plan in the making, on a thread that gives way to others."""

    def __init__(self, work: Callable[[], Verdict], profile: Profile) -> None:
        self.profile = profile
        self.verdict: Verdict | None = None
        """What came of it, `None` as long as it is made or if there is no schedule."""
        self.is_outdated = False
        """Whether another schedule was put in force meanwhile."""
        self._work = work
        self._thread = threading.Thread(target=self._run, name="hiertrain-plan", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def join(self, timeout_seconds: float) -> None:
        self._thread.join(timeout_seconds)

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # Linux knows a niceness of threads
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BACKGROUND_NICENESS)
        interval = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_INTERVAL_SECONDS)
        try:
            self.verdict = self._work()
        except ValueError as error:  # no schedule fits
            log.debug("no schedule for what has drifted: %s", error)
        except Exception:
            log.warning("planning anew failed; training goes on as it was", exc_info=True)
        finally:
            sys.setswitchinterval(interval)
