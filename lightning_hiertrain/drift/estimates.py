"""What the tiers' reports say of each tier's speed and each link's rate.

A tier's *slowness* is the time for which it is busy in a step over the time that the profile
predicts for the schedule in force; 1 is as profiled. Both figures of a link are bytes per second.

A figure has drifted when most of the last few measurements lie on the same side outside a band
around what was last believed. So neither noise nor an outlier nor a figure that is off by the same
factor since long counts as drift.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from lightning_hiertrain.drift.reports import Report
from lightning_hiertrain.topology import Topology
from lightning_hiertrain.transport.goodput import Goodput

_LEAST_SECONDS = 0.02
"""For which a link must have been busy in all to tell its rate."""


@dataclass(kw_only=True)
class Figure:
    """One figure that is watched.

    Args:
        believed: What it is held to be.
        band: By which factor a measurement may differ from that.
        window: How many measurements count.
        enough: How many of them must lie outside the band.
    """

    believed: float
    band: float = 1.25
    window: int = 8
    enough: int = 5
    _latest: deque[float] = field(init=False)

    def __post_init__(self) -> None:
        self._latest = deque(maxlen=self.window)

    def take(self, value: float) -> None:
        """Takes a measurement."""
        self._latest.append(value)

    @property
    def measured(self) -> float | None:
        """The median of the last measurements, `None` if they are too few."""
        return median(self._latest) if len(self._latest) >= self.enough else None

    @property
    def drifted(self) -> float | None:
        """What it has become, `None` if it stays within the band."""
        above = [value for value in self._latest if value > self.believed * self.band]
        below = [value for value in self._latest if value < self.believed / self.band]
        outside = max(above, below, key=len)
        return median(outside) if len(outside) >= self.enough else None

    def believe(self, value: float) -> None:
        """Takes a value as what the figure is now."""
        self.believed = value
        self._latest.clear()


@dataclass(frozen=True, kw_only=True)
class Expected:
    """How long each tier should be busy in a step, by the profile that was measured or given."""

    seconds: Mapping[str, float]
    """Of the tiers that have samples."""
    idle_tiers: frozenset[str] = frozenset()
    """Those that only keep up with the training loop."""


@dataclass(frozen=True, kw_only=True)
class Drift:
    """What is no longer as it was believed to be; by the name of a tier or link."""

    slowness: Mapping[str, float] = field(default_factory=dict)
    bytes_per_second: Mapping[str, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.slowness or self.bytes_per_second)


class TierEstimates:
    """How slow each tier is.

    A tier without samples, which may have lost them because it was slow, shows that it has
    recovered in what it needs to keep up with the training loop: its first steps without samples
    are taken as those of the speed that it had before.

    Args:
        expected: What the first schedule lets expect.
    """

    IDLE_BAND = 2.0

    def __init__(self, expected: Expected) -> None:
        self.slowness = dict.fromkeys((*expected.seconds, *expected.idle_tiers), 1.0)
        """What is believed, by tier."""
        self.expect(expected)

    def expect(self, expected: Expected) -> None:
        """Begins anew under another schedule."""
        self._expected = expected
        self._figures = {tier: Figure(believed=self.slowness[tier]) for tier in expected.seconds}
        self._idle: dict[str, Figure | list[float]] = {tier: [] for tier in expected.idle_tiers}

    def take(self, tier: str, busy_seconds: float) -> None:
        """Takes how long a tier was busy in a step."""
        if tier in self._figures:
            expected = self._expected.seconds[tier]
            if expected > 0:
                self._figures[tier].take(busy_seconds / expected)
        elif tier in self._idle and busy_seconds > 0:
            known = self._idle[tier]
            if isinstance(known, Figure):
                known.take(busy_seconds)
                return
            known.append(busy_seconds)
            if len(known) == Figure.enough:
                self._idle[tier] = Figure(believed=median(known), band=self.IDLE_BAND)

    def measured(self) -> dict[str, float]:
        """Returns how slow the tiers with samples are, as far as enough was seen."""
        found = {tier: figure.measured for tier, figure in self._figures.items()}
        return {tier: value for tier, value in found.items() if value is not None}

    def drifted(self) -> dict[str, float]:
        """Returns how slow those tiers are whose speed has changed."""
        found = {}
        for tier, figure in self._figures.items():
            value = figure.drifted
            if value is not None:
                found[tier] = value
        for tier, known in self._idle.items():
            value = known.drifted if isinstance(known, Figure) else None
            if value is not None and isinstance(known, Figure) and value < known.believed:
                slowness = max(self.slowness[tier] * value / known.believed, 1.0)
                if slowness < self.slowness[tier]:
                    found[tier] = slowness
        return found

    def believe(self, slowness: Mapping[str, float]) -> None:
        """Takes values as what the tiers are now."""
        for tier, value in slowness.items():
            known = self._idle.get(tier)
            if isinstance(known, Figure):
                known.believe(known.believed * value / self.slowness[tier])
            elif tier in self._figures:
                self._figures[tier].believe(value)
            self.slowness[tier] = value


class LinkEstimates:
    """What each link carries, each way.

    Args:
        topology: Which links there are.
        bytes_per_second: What they are believed to carry, by name.
    """

    WINDOW, ENOUGH = 3, 2
    BAND = 1.5

    def __init__(self, topology: Topology, bytes_per_second: Mapping[str, float]) -> None:
        self._topology = topology
        self.bytes_per_second = dict(bytes_per_second)
        """What is believed, by link."""
        self.unconfirmed: set[str] = set()
        """Links of which it is believed by what training showed alone."""
        self.expect()

    def expect(self) -> None:
        """Begins anew under another schedule."""
        self._figures: dict[tuple[str, str], Figure] = {}
        self._pending: dict[tuple[str, str], Goodput] = {}
        """What was seen, too little to tell a rate."""
        self._seen = dict(self.bytes_per_second)
        """What training shows of the links while they are as is believed: it may be less."""

    def take(self, source: str, goodput: Mapping[str, Goodput]) -> None:
        """Takes what has arrived from a tier at its neighbours while links were busy.

        What is relayed behind them is left aside: it may be any link on its way that slows it.
        """
        for target, seen in goodput.items():
            link = self._topology.link(source, target)
            if link is None:
                continue
            hop = (source, target)
            if seen.least_bytes_per_second > self.BAND * self._seen[link.name]:
                self._figure(hop).take(seen.least_bytes_per_second)
                continue
            total = self._pending.pop(hop, Goodput()) + seen
            if total.seconds >= _LEAST_SECONDS:
                self._figure(hop).take(total.num_bytes / total.seconds)
            else:
                self._pending[hop] = total

    def drifted(self) -> dict[str, float]:
        """Returns what those links seem to carry whose rate has changed."""
        found: dict[str, float] = {}
        for hop, figure in self._figures.items():
            value = figure.drifted
            if value is not None:
                name = self._name(hop)
                scaled = value * self.bytes_per_second[name] / self._seen[name]
                found[name] = min(scaled, found.get(name, scaled))
        return found

    def believe(self, seemed: Mapping[str, float]) -> None:
        """Takes values as what links carry now, by what training showed."""
        for name, value in seemed.items():
            self._seen[name] *= value / self.bytes_per_second[name]
            self.bytes_per_second[name] = value
        self.unconfirmed |= seemed.keys()
        for hop, figure in self._figures.items():
            if self._name(hop) in seemed:
                figure.believe(self._seen[self._name(hop)])

    def confirm(self, measured: Mapping[str, float]) -> None:
        """Takes what links carry with nothing beside it."""
        self.bytes_per_second |= measured
        self.unconfirmed -= measured.keys()

    def _figure(self, hop: tuple[str, str]) -> Figure:
        if hop not in self._figures:
            self._figures[hop] = Figure(
                believed=self._seen[self._name(hop)],
                band=self.BAND,
                window=self.WINDOW,
                enough=self.ENOUGH,
            )
        return self._figures[hop]

    def _name(self, hop: tuple[str, str]) -> str:
        link = self._topology.link(*hop)
        assert link is not None
        return link.name


class Estimates:
    """What is known of tiers and links; the data tier's.

    Args:
        expected: What the first schedule lets expect.
        topology: Which links there are.
        bytes_per_second: What they are believed to carry, by name.
    """

    def __init__(
        self, expected: Expected, topology: Topology, bytes_per_second: Mapping[str, float]
    ) -> None:
        self.tiers = TierEstimates(expected)
        self.links = LinkEstimates(topology, bytes_per_second)

    def expect(self, expected: Expected) -> None:
        """Begins anew under another schedule."""
        self.tiers.expect(expected)
        self.links.expect()

    def take(self, tier: str, report: Report) -> None:
        """Takes what a tier reports."""
        for seconds in report.busy_seconds:
            self.tiers.take(tier, seconds)
        self.links.take(tier, report.goodput)

    def drift(self) -> Drift:
        """Returns what is no longer as it was believed to be."""
        return Drift(slowness=self.tiers.drifted(), bytes_per_second=self.links.drifted())
