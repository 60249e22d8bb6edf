"""Puts the notes of all tiers together: one clock, spans without gaps, messages end to end.

A tier that waits for a message waits first for the tier that sends it and then for the link:

```
sender      ... computes ...| queued
link                        |=============| arrived
receiver    | waiting for   | waiting     | goes on
            |  the tier     | for the link|
```
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from lightning_hiertrain.timeline.data import (
    OTHER,
    WAITING_FOR_LINK,
    WAITING_FOR_TIER,
    WHATS,
    RecordedStep,
    Span,
    Transfer,
)

_TAG = re.compile(r"\d+/(batch|activations|activation_gradients|gradients|weights)(?:/(\d+))?")
_MEANINGS = {
    "batch": ("samples", ""),
    "activations": ("activations", "chunk"),
    "activation_gradients": ("activation gradients", "chunk"),
    "gradients": ("gradients", "layer"),
    "weights": ("weights", "layer"),
}
_PACKING = ("samples", "gradients", "weights")


@dataclass(frozen=True, kw_only=True)
class Joined:
    """What happened in the recorded steps."""

    steps: tuple[RecordedStep, ...]
    spans: tuple[Span, ...]
    transfers: tuple[Transfer, ...]


def join(
    notes: Mapping[str, Mapping[str, Any]],
    ahead_seconds: Mapping[str, float],
    *,
    wanted: Iterable[int],
    owner: str,
    overlap: bool,
) -> Joined:
    """Puts notes together.

    Args:
        notes: Each tier's, by its own clock.
        ahead_seconds: How far each tier's clock is ahead of that of one of them.
        wanted: The numbers of the steps to keep; those that were not seen whole are left out.
        owner: The owner.
        overlap: Whether transfers overlap with computation: then a step ends with the owner's
            update, else when all tiers have the new weights.
    """
    ends = {
        tier: {int(step): time - ahead_seconds[tier] for step, time in note["ends"].items()}
        for tier, note in notes.items()
    }
    deciding = [owner] if overlap else list(notes)
    known = set.intersection(*(set(ends[tier]) for tier in deciding))
    bounds = {step: max(ends[tier][step] for tier in deciding) for step in known}
    frames = [
        (step, bounds[step - 1], bounds[step])
        for step in sorted(wanted)
        if step in bounds and step - 1 in bounds
    ]
    if not frames:
        return Joined(steps=(), spans=(), transfers=())
    zero = frames[0][1]
    transfers = _transfers(notes, ahead_seconds, zero)
    queued = {key: transfer.queued for key, transfer in transfers.items()}
    spans: list[Span] = []
    for tier, note in notes.items():
        offset = ahead_seconds[tier] + zero
        waits = _waits(tier, note["waits"], offset, transfers, queued)
        spans += _covered(tier, note["activities"], offset, waits)
    steps, kept = [], []
    for number, start, end in frames:
        start, end = start - zero, end - zero
        within = [clipped for span in spans if (clipped := _clipped(span, start, end))]
        phases = _phases(within, start, end, owner=owner, overlap=overlap)
        steps.append(RecordedStep(number=number, start=start, end=end, phases=phases))
        kept += within
    carried = [
        transfer
        for transfer in _one_after_another(transfers.values())
        if any(transfer.arrived > s.start and transfer.queued < s.end for s in steps)
    ]
    return Joined(steps=tuple(steps), spans=tuple(kept), transfers=tuple(carried))


_Key = tuple[str, str, str, int]
"""Source, target, tag, and how many messages had that tag before."""


def _transfers(
    notes: Mapping[str, Mapping[str, Any]], ahead_seconds: Mapping[str, float], zero: float
) -> dict[_Key, Transfer]:
    """Matches what was received with when it was sent."""
    sent: defaultdict[tuple[str, str, str], deque[float]] = defaultdict(deque)
    for source, note in notes.items():
        for item in note["sent"]:
            time = item["queued"] - ahead_seconds[source] - zero
            sent[source, item["peer"], item["tag"]].append(time)
    transfers: dict[_Key, Transfer] = {}
    counts: defaultdict[tuple[str, str, str], int] = defaultdict(int)
    for target, note in notes.items():
        for item in note["received"]:
            way = (item["peer"], target, item["tag"])
            arrived = item["arrived"] - ahead_seconds[target] - zero
            queued = sent[way].popleft() if sent[way] else item["began"] - item["arrived"] + arrived
            what, detail = meaning(item["tag"])
            transfers[(*way, counts[way])] = Transfer(
                source=item["peer"],
                target=target,
                queued=min(queued, arrived),
                arrived=arrived,
                num_bytes=item["bytes"],
                what=what,
                detail=detail,
            )
            counts[way] += 1
    return transfers


def _one_after_another(transfers: Iterable[Transfer]) -> list[Transfer]:
    """Lets a message of tensors begin when the one ahead of it has arrived."""
    result, last = [], dict[tuple[str, str], float]()
    for transfer in sorted(transfers, key=lambda transfer: transfer.arrived):
        if transfer.what != "control":
            way = (transfer.source, transfer.target)
            begin = max(transfer.queued, last.get(way, transfer.queued))
            transfer, last[way] = replace(transfer, queued=begin), transfer.arrived
        result.append(transfer)
    return sorted(result, key=lambda transfer: transfer.queued)


def meaning(tag: str) -> tuple[str, str]:
    """Returns what travels under a tag, and which part of it."""
    match = _TAG.fullmatch(tag)
    if match is None:
        return "control", ""
    what, unit = _MEANINGS[match[1]]
    number = 0 if match[2] is None else int(match[2]) + (unit == "chunk")
    return what, f"{unit} {number}" if number else ""


def _waits(
    tier: str,
    notes: Sequence[Mapping[str, Any]],
    offset: float,
    transfers: Mapping[_Key, Transfer],
    queued: Mapping[_Key, float],
) -> list[Span]:
    waits: list[Span] = []
    counts: defaultdict[tuple[str, str, str], int] = defaultdict(int)
    for note in notes:
        start, end = note["start"] - offset, note["end"] - offset
        source, target = (tier, note["peer"]) if note["sends"] else (note["peer"], tier)
        for_tier = for_link = end
        if note["sends"]:
            for_tier = start
        else:
            way = (source, target, note["tag"])
            key = (*way, counts[way])
            counts[way] += 1
            for_link = min(end, max(start, transfers[key].arrived))
            for_tier = min(for_link, max(start, queued[key]))
        for what, since, until in (
            (WAITING_FOR_TIER, start, for_tier),
            (WAITING_FOR_LINK, for_tier, for_link),
        ):
            if until > since:
                waits.append(
                    Span(
                        tier=tier,
                        start=since,
                        end=until,
                        what=what,
                        detail=note["operation"],
                        source=source,
                        target=target,
                    )
                )
    return sorted(waits, key=lambda wait: wait.start)


def _covered(
    tier: str,
    activities: Sequence[tuple[float, str, str]],
    offset: float,
    waits: Sequence[Span],
) -> list[Span]:
    """Fills what lies between waits with what was done at that time."""
    spans = list(waits)
    rest = deque(waits)
    for (start, what, detail), (end, *_) in pairwise(activities):
        start, end = start - offset, end - offset
        word = "packing" if what in _PACKING else what if what in WHATS else OTHER
        part = f"{what} {detail}".strip() if word == "packing" else detail
        while rest and rest[0].end <= start:
            rest.popleft()
        for wait in rest:
            if wait.start >= end:
                break
            if wait.start > start:
                spans.append(Span(tier=tier, start=start, end=wait.start, what=word, detail=part))
            start = max(start, wait.end)
        if end > start:
            spans.append(Span(tier=tier, start=start, end=end, what=word, detail=part))
    return sorted(spans, key=lambda span: span.start)


def _clipped(span: Span, start: float, end: float) -> Span | None:
    since, until = max(span.start, start), min(span.end, end)
    return replace(span, start=since, end=until) if until > since else None


def _phases(
    spans: Sequence[Span], start: float, end: float, *, owner: str, overlap: bool
) -> dict[str, float]:
    """Divides a step as the cost model does; with several mini-batches, by the last one's loss."""

    def of_owner(what: str, detail: str | None = None) -> list[float]:
        return [
            span.start
            for span in spans
            if span.tier == owner and span.what == what and detail in (None, span.detail)
        ]

    losses = of_owner("loss", "forward")
    backwards, optimizers = of_owner("backward"), of_owner("optimizer")
    if not losses:
        return {}
    # The first moment of the last loss: a wait may have parted it.
    before = [time for time in backwards if time < losses[-1]]
    lost = min(time for time in losses if not before or time > before[-1])
    backward = min((time for time in backwards if time > lost), default=None)
    if backward is None or not optimizers or optimizers[-1] < backward:
        return {}
    optimizer = min(time for time in optimizers if time > backward)
    gradients = optimizer
    if not overlap:
        ends = [span.end for span in spans if span.what == "backward"]
        gradients = min(max(ends), optimizer)
    return {
        "forward": lost - start,
        "loss": backward - lost,
        "backward": gradients - backward,
        "update": end - gradients,
    }
