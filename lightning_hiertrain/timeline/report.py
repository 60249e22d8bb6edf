"""A timeline as text: tables of tiers, links and phases."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_hiertrain.reports import schedule_report, table
from lightning_hiertrain.timeline.data import PHASES, RecordedStep, Timeline
from lightning_hiertrain.timeline.summary import (
    carried_by_links,
    computing_seconds,
    mean_phases,
    mean_step_seconds,
    order_of_causes,
    rates_of_links,
    time_of_tiers,
)
from lightning_hiertrain.units import format_bandwidth, format_bytes, format_seconds


def timeline_report(timeline: Timeline, steps: Sequence[RecordedStep]) -> str:
    """Says where the time of steps went.

    Args:
        timeline: The timeline.
        steps: Which of its steps; their mean is shown.
    """
    numbers = ", ".join(str(step.number) for step in steps)
    seconds = mean_step_seconds(timeline, steps)
    head = f"{timeline.model}, training step{'s' * (len(steps) > 1)} {numbers}: "
    head += f"{format_seconds(seconds)}{' on average' * (len(steps) > 1)}"
    if timeline.predicted is not None:
        head += f", predicted {format_seconds(timeline.predicted.seconds)}"
    doubts = [
        f"{tier} {format_seconds(value)}"
        for tier, value in timeline.clock_uncertainty_seconds.items()
        if value
    ]
    parts = [head, schedule_report(timeline.schedule), _tiers(timeline, steps)]
    parts += [_links(timeline, steps), _phases(timeline, steps)]
    if doubts:
        reference = _reference(timeline)
        parts.append(f"clocks are aligned with {reference}'s to within " + ", ".join(doubts))
    return "\n\n".join(part for part in parts if part)


def _tiers(timeline: Timeline, steps: Sequence[RecordedStep]) -> str:
    """Where each tier's time went; each tier's column adds up to the step."""
    totals, seconds = time_of_tiers(timeline, steps), mean_step_seconds(timeline, steps)
    heads = [cell for tier in timeline.tiers for cell in (tier, "")]
    rows: list[Sequence[str]] = [("the step of each tier", *heads)]
    for cause in order_of_causes(name for causes in totals.values() for name in causes):
        cells = [_with_share(totals[tier].get(cause, 0.0), seconds) for tier in timeline.tiers]
        rows.append((cause, *(cell for pair in cells for cell in pair)))
    sums = [_with_share(sum(totals[tier].values()), seconds) for tier in timeline.tiers]
    rows.append(("step", *(cell for pair in sums for cell in pair)))
    return table(rows)


def _with_share(part: float, whole: float) -> tuple[str, str]:
    return (format_seconds(part), f"{part / whole:.1%}") if part else ("-", "")


def _links(timeline: Timeline, steps: Sequence[RecordedStep]) -> str:
    seconds, predicted = mean_step_seconds(timeline, steps), timeline.predicted
    rates = {} if timeline.profile is None else rates_of_links(timeline.profile)
    heads = ["link", "bytes", "busy", "of the step", "rate while busy"]
    heads += ["predicted busy", "rate in the profile"] if predicted is not None else []
    rows: list[Sequence[str]] = [heads]
    for way, carried in carried_by_links(timeline, steps).items():
        busy = carried.busy_seconds
        row = [way, format_bytes(carried.num_bytes) if carried.num_bytes else "-"]
        if not busy:
            row += ["-", "-", "-"]
        else:
            row += [format_seconds(busy)]
            row += [f"{busy / seconds:.1%}", format_bandwidth(carried.num_bytes / busy)]
        if predicted is not None:
            row += [
                format_seconds(predicted.busy_seconds.get(way, 0.0)),
                format_bandwidth(rates[way]) if way in rates else "-",
            ]
        rows.append(row)
    return table(rows)


def _phases(timeline: Timeline, steps: Sequence[RecordedStep]) -> str:
    """The step's phases and each tier's computing against the prediction."""
    measured, predicted = mean_phases(steps), timeline.predicted
    if predicted is None:
        rows: list[Sequence[str]] = [("phase", "measured")]
        rows += [(name, format_seconds(measured[name])) for name in PHASES if measured]
        return table(rows) if measured else ""
    rows = [("phase", "measured", "predicted", "measured / predicted")]
    if measured:
        rows += [_compared(name, measured[name], predicted.phases[name]) for name in PHASES]
    path = sum(predicted.phases.values())
    if predicted.seconds - path > 1e-9 * predicted.seconds:
        busiest = max(predicted.busy_seconds, key=lambda name: predicted.busy_seconds[name])
        rows.append((f"waiting for {busiest}", "", format_seconds(predicted.seconds - path), ""))
    rows.append(_compared("step", mean_step_seconds(timeline, steps), predicted.seconds))
    for tier, seconds in computing_seconds(timeline, steps).items():
        busy = predicted.busy_seconds.get(tier, 0.0)
        rows.append(_compared(f"{tier} computing", seconds, busy))
    return table(rows)


def _compared(name: str, measured: float, predicted: float) -> tuple[str, str, str, str]:
    ratio = f"{measured / predicted:.2f}" if predicted else "-"
    return name, format_seconds(measured), format_seconds(predicted), ratio


def _reference(timeline: Timeline) -> str:
    """The tier whose clock the others' times were put on."""
    doubts = timeline.clock_uncertainty_seconds
    return next((tier for tier in timeline.tiers if not doubts.get(tier)), timeline.tiers[0])
