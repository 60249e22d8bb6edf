"""A timeline in the Trace Event Format, for Perfetto (ui.perfetto.dev) and `chrome://tracing`.

A process of the trace is a part of the picture: the steps, the tiers, the links, and the same as
predicted. Its threads are the rows. Transfers that overlap get rows of their own, since complete
events (`"ph": "X"`) of one row must be nested.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_hiertrain.timeline.data import PHASES, Span, Timeline, Transfer
from lightning_hiertrain.timeline.summary import cause, on_links

Event = dict[str, Any]


def write_trace(timeline: Timeline, path: str | Path) -> None:
    """Writes a trace file."""
    document = {"traceEvents": trace_events(timeline), "displayTimeUnit": "ms"}
    Path(path).write_text(json.dumps(document) + "\n")


def trace_events(timeline: Timeline) -> list[Event]:
    """Returns the events of a trace; times are microseconds."""
    steps, rows = _Process("steps", 1), [_Process("tiers", 2), _Process("links", 3)]
    for step in timeline.steps:
        now = step.start
        args = {"seconds": step.seconds}
        steps.add("step", f"step {step.number}", "step", step.start, step.end, args)
        for name in PHASES if step.phases else ():
            steps.add("phases", name, "phase", now, now + step.phases[name], {})
            now += step.phases[name]
    _add_rows(timeline, rows, timeline.spans, timeline.transfers, 0.0)
    processes = [steps, *rows]
    if timeline.predicted is not None:
        rows = [_Process("predicted tiers", 4), _Process("predicted links", 5)]
        for step in timeline.steps:
            predicted = timeline.predicted
            _add_rows(timeline, rows, predicted.spans, predicted.transfers, step.start)
        processes += rows
    return [event for process in processes for event in process.events()]


def _add_rows(
    timeline: Timeline,
    processes: list[_Process],
    spans: Iterable[Span],
    transfers: Iterable[Transfer],
    offset: float,
) -> None:
    tiers, links = processes
    for tier in timeline.tiers:
        tiers.row(tier)
    for way in timeline.directions:
        links.row(way)
    for span in spans:
        name = cause(timeline, span)
        args = {"detail": span.detail}
        tiers.add(span.tier, name, span.what, offset + span.start, offset + span.end, args)
    for transfer in sorted(transfers, key=lambda transfer: transfer.queued):
        for way, start, end in on_links(timeline, transfer):
            links.add(
                way,
                f"{transfer.what} {transfer.detail}".strip(),
                transfer.what,
                offset + start,
                offset + end,
                {"bytes": transfer.num_bytes, "from": transfer.source, "to": transfer.target},
            )


class _Process:
    """A process of the trace, whose rows are threads."""

    def __init__(self, name: str, number: int) -> None:
        self._name = name
        self._number = number
        self._rows: dict[str, list[int]] = {}
        """The threads of each row."""
        self._busy_until: dict[int, float] = {}
        self._events: list[Event] = []

    def row(self, name: str) -> list[int]:
        """Returns the threads of a row, of which there is one at least."""
        if name not in self._rows:
            self._rows[name] = []
            self._new_thread(name)
        return self._rows[name]

    def add(
        self, row: str, name: str, category: str, start: float, end: float, args: Event
    ) -> None:
        """Adds an event, on a thread of the row that is free by then."""
        free = (t for t in self.row(row) if self._busy_until[t] <= start + 1e-9)
        thread = next(free, None)
        thread = self._new_thread(row) if thread is None else thread
        self._busy_until[thread] = end
        self._events.append(
            {
                "ph": "X",
                "name": name,
                "cat": category,
                "pid": self._number,
                "tid": thread,
                "ts": round(1e6 * start, 3),
                "dur": round(1e6 * max(0.0, end - start), 3),
                "args": args,
            }
        )

    def events(self) -> list[Event]:
        """Returns all events, the names of process and threads first."""
        common = {"ph": "M", "pid": self._number, "ts": 0}
        names = [{**common, "name": "process_name", "tid": 0, "args": {"name": self._name}}]
        names.append(
            {**common, "name": "process_sort_index", "tid": 0, "args": {"sort_index": self._number}}
        )
        for row, threads in self._rows.items():
            for thread in threads:
                names.append(
                    {**common, "name": "thread_name", "tid": thread, "args": {"name": row}}
                )
        return names + self._events

    def _new_thread(self, row: str) -> int:
        thread = len(self._busy_until) + 1
        self._busy_until[thread] = float("-inf")
        self._rows[row].append(thread)
        return thread
