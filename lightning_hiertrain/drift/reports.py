"""What a tier notes of its own steps, and the bursts by which a link that rests is looked at."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from lightning_hiertrain.transport.goodput import Goodput
from lightning_hiertrain.transport.network import Network

_WARM_UP_STEPS = 2
"""Under a new schedule: they set things up."""
_PROBE_TAG = "drift/probe"
_LEAST_PROBE_BYTES, _MOST_PROBE_BYTES = 64 << 10, 1 << 20
_PROBED_PART = 0.1
"""Of a resting link's time that probing it may take."""
_PAUSE_SECONDS = 1.0
"""At least, between two bursts."""
_FAST_PAUSES = 20
_JUMP, _URGENT, _LONGER = 2.0, 2, 4


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a tier saw of some steps; travels as a dictionary."""

    schedule: int
    """How many schedules there were before the one in force."""
    busy_seconds: tuple[float, ...] = ()
    """For each step: what of it the tier did not wait for others, for one mini-batch."""
    goodput: Mapping[str, Goodput] = field(default_factory=dict)
    """What has arrived at each peer while links were busy."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "schedule": self.schedule,
            "busy": list(self.busy_seconds),
            "goodput": {peer: asdict(seen) for peer, seen in self.goodput.items()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        return cls(
            schedule=data["schedule"],
            busy_seconds=tuple(data["busy"]),
            goodput={peer: Goodput(**seen) for peer, seen in data["goodput"].items()},
        )


class StepNotes:
    """Notes how long this tier is busy in each step, from the end of one to that of the next.

    Steps with something else in them, such as validation, a checkpoint or a mini-batch of another
    size, are left out; so are the first few under a new schedule.

    Args:
        network: The links of this tier, which know how long it has waited.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self.schedule = 0
        """How many schedules there were before the one in force."""
        self.ended = 0.0
        """When the last step ended."""
        self.step_seconds: float | None = None
        """How long the last step took, for one mini-batch; `None` if it was left out."""
        self._busy: list[float] = []
        self._mini_batches = 0
        self._is_disturbed = True
        self._warm_up = _WARM_UP_STEPS
        self._waited = 0.0

    def batch_dealt(self, *, is_whole: bool) -> None:
        """Notes a mini-batch; `is_whole` if it is one that the schedule was made for."""
        self._mini_batches += 1
        self._is_disturbed |= not is_whole

    def disturb(self) -> None:
        """Notes that this step holds something that others do not."""
        self._is_disturbed = True

    def switched(self) -> None:
        """Begins anew under another schedule."""
        self.schedule += 1
        self._warm_up = _WARM_UP_STEPS
        self._busy.clear()
        self._is_disturbed = True

    def step_ended(self) -> None:
        """Notes the end of a step."""
        now, waited = time.perf_counter(), self._network.waited_seconds
        self.step_seconds = None
        if self._is_disturbed or not self._mini_batches:
            pass
        elif self._warm_up:
            self._warm_up -= 1
        else:
            self.step_seconds = (now - self.ended) / self._mini_batches
            busy = now - self.ended - (waited - self._waited)
            self._busy.append(max(busy, 0.0) / self._mini_batches)
        self.ended, self._waited = now, waited
        self._is_disturbed, self._mini_batches = False, 0

    def take(self, goodput: Mapping[str, Goodput]) -> Report:
        """Returns what was noted since the last call.

        Args:
            goodput: What the links have carried meanwhile.
        """
        busy, self._busy = tuple(self._busy), []
        return Report(schedule=self.schedule, busy_seconds=busy, goodput=goodput)


class Prober:
    """Sends a burst now and then over each link upwards that carries nothing else.

    It travels with what is needed later, so that nothing waits for it, and takes a tenth
    of the link's time. A burst that is gone too quickly to tell anything is followed by a longer
    one.

    Args:
        network: The links of this tier.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        names = network.topology.names
        rank = names.index(network.tier)
        neighbours = network.topology.neighbours(network.tier)
        self._above = {t: _Probed() for t in neighbours if names.index(t) > rank}
        self._below = [tier for tier in neighbours if names.index(tier) < rank]

    def run(self, seen: Mapping[str, Goodput]) -> None:
        """Sends what is due and drops what has come from below.

        Args:
            seen: What has arrived at each peer since the last call.
        """
        network, now = self._network, time.monotonic()
        for tier in self._below:
            if not network.membership.spares(tier):
                while network.poll(tier, _PROBE_TAG):
                    network.receive(tier, _PROBE_TAG)
        for tier, probed in self._above.items():
            if network.membership.spares(tier):
                continue
            goodput = seen.get(tier)
            if goodput is not None and goodput.bytes_per_second:
                probed.tells(goodput, now)
            elif network.is_resting(tier) and probed.is_due(now):
                burst = torch.zeros(probed.num_bytes, dtype=torch.uint8)
                network.send(tier, _PROBE_TAG, burst, ahead=True, at_once=False)


@dataclass(kw_only=True)
class _Probed:
    """The bursts on one link."""

    num_bytes: int = _LEAST_PROBE_BYTES
    _due: float = 0.0
    _rate: float = 0.0
    _urgent: int = 0
    """How many longer bursts leave without a pause, to make sure of a jump."""
    _told: bool = True
    """Whether something was seen since the last burst."""

    def tells(self, goodput: Goodput, now: float) -> None:
        """Notes what was seen."""
        rate = goodput.bytes_per_second
        self.num_bytes = _LEAST_PROBE_BYTES
        self._urgent = _URGENT if rate > _JUMP * self._rate > 0 else max(self._urgent - 1, 0)
        if self._urgent:
            self.num_bytes *= _LONGER
        pause = max(self.num_bytes / rate / _PROBED_PART, _PAUSE_SECONDS)
        self._due = now if self._urgent else now + pause
        self._rate, self._told = rate, True

    def is_due(self, now: float) -> bool:
        """Returns whether to send a burst now, and notes that it is sent."""
        if now < self._due:
            return False
        pause = _PAUSE_SECONDS
        if not self._told and self.num_bytes < _MOST_PROBE_BYTES:
            self.num_bytes *= 2
        elif not self._told:  # too fast to tell by such bursts, and so fast enough
            pause *= _FAST_PAUSES
        self._due, self._told = now + pause, False
        return True
