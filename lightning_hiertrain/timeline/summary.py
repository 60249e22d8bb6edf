"""Adding up a timeline: where each tier's time went, and what each link carried."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_hiertrain.profiles import Profile
from lightning_hiertrain.timeline.data import (
    COMPUTING,
    OTHER,
    PHASES,
    WAITING_FOR_TIER,
    RecordedStep,
    Span,
    Timeline,
    Transfer,
)

SMALL_BYTES = 2000
"""A message with fewer bytes keeps no link busy, however long its tiers take to notice it."""


@dataclass(frozen=True, kw_only=True)
class Carried:
    """What one direction of a link carried in a step, on average."""

    num_bytes: float
    busy_seconds: float
    """How long something of `SMALL_BYTES` or more was on its way."""


def mean_step_seconds(timeline: Timeline, steps: Sequence[RecordedStep]) -> float:
    """Returns the mean length of steps."""
    return sum(step.seconds for step in steps) / len(steps)


def mean_phases(steps: Sequence[RecordedStep]) -> dict[str, float]:
    """Returns the mean of each phase; empty if a step has none."""
    if not all(step.phases for step in steps):
        return {}
    return {name: sum(step.phases[name] for step in steps) / len(steps) for name in PHASES}


def time_of_tiers(timeline: Timeline, steps: Sequence[RecordedStep]) -> dict[str, dict[str, float]]:
    """Returns for each tier what a step's time went into; a tier's values add up to the step.

    Args:
        timeline: The timeline.
        steps: Which of its steps; their mean is taken.
    """
    totals: dict[str, dict[str, float]] = {}
    for tier in timeline.tiers:
        sums: defaultdict[str, float] = defaultdict(float)
        for span in timeline.spans:
            if span.tier == tier:
                sums[cause(timeline, span)] += overlap_with(span.start, span.end, steps)
        mean = {name: seconds / len(steps) for name, seconds in sums.items() if seconds > 0}
        covered = sum(mean.values())
        missing = mean_step_seconds(timeline, steps) - covered
        mean[OTHER] = mean.get(OTHER, 0.0) + max(0.0, missing)
        totals[tier] = mean
    return totals


def cause(timeline: Timeline, span: Span) -> str:
    """Returns what a span's time went into, in words."""
    if span.source is None or span.target is None:
        return span.what
    if span.what == WAITING_FOR_TIER:
        return f"waiting for {span.source}"
    return "waiting for link " + ", ".join(timeline.crossed(span.source, span.target))


def order_of_causes(causes: Iterable[str]) -> list[str]:
    """Sorts: computing first, then waiting, then the rest."""
    known = [*COMPUTING, OTHER]
    found = dict.fromkeys(causes)
    computing = [name for name in COMPUTING if name in found]
    waiting = sorted(name for name in found if name not in known)
    return [*computing, *waiting, *([OTHER] if OTHER in found else [])]


def computing_seconds(timeline: Timeline, steps: Sequence[RecordedStep]) -> dict[str, float]:
    """Returns for each tier how long it worked in a step: all that is neither waiting nor other."""
    return {
        tier: sum(seconds for name, seconds in causes.items() if name in COMPUTING)
        for tier, causes in time_of_tiers(timeline, steps).items()
    }


def carried_by_links(timeline: Timeline, steps: Sequence[RecordedStep]) -> dict[str, Carried]:
    """Returns what each direction of each link carried in a step, on average."""
    sizes: dict[str, float] = dict.fromkeys(timeline.directions, 0.0)
    stretches: dict[str, list[tuple[float, float]]] = {name: [] for name in timeline.directions}
    for transfer in timeline.transfers:
        whole = transfer.seconds
        inside = overlap_with(transfer.queued, transfer.arrived, steps)
        if whole > 0:
            share = inside / whole
        else:
            share = float(any(s.start < transfer.arrived <= s.end for s in steps))
        for way, start, end in on_links(timeline, transfer):
            sizes[way] += share * transfer.num_bytes
            if transfer.num_bytes >= SMALL_BYTES:
                stretches[way].append((start, end))
    return {
        way: Carried(
            num_bytes=sizes[way] / len(steps),
            busy_seconds=sum(overlap_with(a, b, steps) for a, b in united(stretches[way]))
            / len(steps),
        )
        for way in timeline.directions
    }


def on_links(timeline: Timeline, transfer: Transfer) -> list[tuple[str, float, float]]:
    """Returns which directions of links a transfer keeps busy, from when to when.

    When a relayed message was on which link was not noted. As far as the profile tells, a link
    that is faster than the way as a whole has it for less of the time: the first at the beginning,
    others at the end.
    """
    ways = timeline.crossed(transfer.source, transfer.target)
    rates = {} if timeline.profile is None else rates_of_links(timeline.profile)
    stretches = []
    for place, way in enumerate(ways):
        seconds = transfer.seconds
        if len(ways) > 1 and way in rates:
            seconds = min(seconds, transfer.num_bytes / rates[way])
        start = transfer.queued if place == 0 else transfer.arrived - seconds
        stretches.append((way, start, start + seconds))
    return stretches


def rates_of_links(profile: Profile) -> dict[str, float]:
    """Returns the bytes per second of each direction of each link."""
    return {
        ">".join(way): link.bandwidth_bytes_per_second
        for link in profile.links
        for way in (link.between, link.between[::-1])
    }


def united(stretches: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Joins stretches of time that overlap."""
    result: list[tuple[float, float]] = []
    for start, end in sorted(stretches):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def overlap_with(start: float, end: float, steps: Iterable[RecordedStep]) -> float:
    """Returns how much of a stretch of time lies within steps."""
    return sum(max(0.0, min(end, step.end) - max(start, step.start)) for step in steps)
