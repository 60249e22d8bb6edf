"""`hiertrain timeline`: prints a timeline file, writes its trace and its picture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lightning_hiertrain.profiles import Profile
from lightning_hiertrain.timeline.data import RecordedStep, Timeline
from lightning_hiertrain.timeline.figure import draw
from lightning_hiertrain.timeline.predicted import predicted_step
from lightning_hiertrain.timeline.report import timeline_report
from lightning_hiertrain.timeline.trace import write_trace


def show_timeline(
    file: str | Path,
    *,
    step: int | None = None,
    profile: str | Path | None = None,
    trace: str | Path | None = None,
    plot: str | Path | None = None,
) -> str:
    """Returns what there is to say about a timeline file.

    Args:
        file: The file.
        step: The number of one recorded step; all of them by default.
        profile: A profile file to predict from, in place of the run's own.
        trace: Where to write a trace.
        plot: Where to draw a picture; of several steps, the one of median length.

    Raises:
        ValueError: If a file is not what it should be, or the step was not recorded.
        ImportError: If a picture is asked for and matplotlib is missing.
    """
    timeline = Timeline.from_json(file)
    if profile is not None:
        given = Profile.from_json(profile)
        predicted = predicted_step(given, timeline.schedule, overlap=timeline.overlap)
        timeline = replace(timeline, profile=given, predicted=predicted)
    steps = [each for each in timeline.steps if step in (None, each.number)]
    if not steps:
        numbers = [each.number for each in timeline.steps]
        raise ValueError(f"step {step} was not recorded; {file} holds the steps {numbers}")
    text = timeline_report(timeline, steps)
    if trace is not None:
        write_trace(timeline, trace)
        text += f"\n\ntrace written to {trace}; open it at https://ui.perfetto.dev"
    if plot is not None:
        draw(timeline, _median(steps)).savefig(plot, dpi=150)
        text += f"\n\npicture written to {plot}"
    return text


def _median(steps: list[RecordedStep]) -> RecordedStep:
    return sorted(steps, key=lambda step: step.seconds)[(len(steps) - 1) // 2]
