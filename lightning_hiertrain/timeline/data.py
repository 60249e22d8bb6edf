"""A timeline as data: spans of tiers, transfers of links, all on one clock, and its file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning_hiertrain.profiles import Profile, check_number
from lightning_hiertrain.schedule import Schedule
from lightning_hiertrain.topology import Link, Tier, Topology, check_format, read_json

FORMAT = 1
COMPUTING = ("forward", "loss", "backward", "optimizer", "codec", "packing")
"""What a tier does that the cost model knows, and packing of messages."""
WAITING_FOR_TIER, WAITING_FOR_LINK = "waiting for tier", "waiting for link"
OTHER = "other"
WHATS = (*COMPUTING, WAITING_FOR_TIER, WAITING_FOR_LINK, OTHER)
"""All kinds of spans; those of one tier fill a step without gaps or overlap."""
PHASES = ("forward", "loss", "backward", "update")
_DIGITS = 7
"""Of a second in a file."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """One stretch of time of one tier."""

    tier: str
    start: float
    end: float
    what: str
    """One of `WHATS`."""
    detail: str = ""
    """Which part: a chunk, layers; in a wait, what was waited for."""
    source: str | None = None
    """In a wait, the tier whose message was waited for."""
    target: str | None = None
    """In a wait, the tier that the message was for: this one, unless it waited for room to send."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One message on its way from tier to tier."""

    source: str
    target: str
    queued: float
    """When the source gave it to the link, or was done with the message ahead of it."""
    arrived: float
    """When its last byte was there."""
    num_bytes: int
    what: str
    """samples, activations, activation gradients, gradients, weights or control."""
    detail: str = ""
    """Which chunk or layer."""

    @property
    def seconds(self) -> float:
        return self.arrived - self.queued


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """One training step, from the end of the update before it to the end of its own."""

    number: int
    """Training steps before it."""
    start: float
    end: float
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each of `PHASES`; empty if they could not be told apart."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class PredictedStep:
    """The step as the cost model expects it, from 0 on."""

    seconds: float
    phases: Mapping[str, float]
    busy_seconds: Mapping[str, float]
    """How long each tier computes and each link direction carries."""
    spans: tuple[Span, ...] = ()
    transfers: tuple[Transfer, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Some training steps of a run. All times are seconds since the first recorded step began."""

    model: str
    overlap: bool
    tiers: tuple[str, ...]
    """In order of rank."""
    links: tuple[tuple[str, str], ...]
    schedule: Schedule
    profile: Profile | None = None
    predicted: PredictedStep | None = None
    clock_uncertainty_seconds: Mapping[str, float] = field(default_factory=dict)
    """By tier: how far its times may be off against those of rank 0, which has 0."""
    steps: tuple[RecordedStep, ...]
    spans: tuple[Span, ...]
    transfers: tuple[Transfer, ...]

    def __post_init__(self) -> None:
        if not self.steps:
            raise ValueError("a timeline must hold at least one step")
        for span in self.spans:
            if span.tier not in self.tiers or span.what not in WHATS or span.end < span.start:
                raise ValueError(f"a timeline holds an impossible span: {span}")
        for transfer in self.transfers:
            if not {transfer.source, transfer.target} <= set(self.tiers):
                raise ValueError(f"a timeline holds an impossible transfer: {transfer}")
        object.__setattr__(self, "_topology", _topology(self.tiers, self.links))

    @property
    def directions(self) -> tuple[str, ...]:
        """All directions of links, `edge>cloud`."""
        both = (way for a, b in self.links for way in ((a, b), (b, a)))
        return tuple(">".join(way) for way in both)

    def crossed(self, source: str, target: str) -> tuple[str, ...]:
        """Returns the directions of links that lie between two tiers."""
        topology: Topology = self._topology  # type: ignore[attr-defined]
        return tuple(">".join(hop) for hop in pairwise(topology.route(source, target)))

    def to_json(self, path: str | Path) -> None:
        """Writes the timeline to a file."""
        Path(path).write_text(json.dumps(self.to_dict()) + "\n")

    @classmethod
    def from_json(cls, path: str | Path) -> Timeline:
        """Reads a timeline file.

        Raises:
            ValueError: If the file is not a timeline of this format.
        """
        return cls.from_dict(read_json(path, kind="timeline"))

    def to_dict(self) -> dict[str, Any]:
        predicted = None
        if self.predicted is not None:
            predicted = {
                "seconds": self.predicted.seconds,
                "phases": dict(self.predicted.phases),
                "busy_seconds": dict(self.predicted.busy_seconds),
                "spans": [_short(span) for span in self.predicted.spans],
                "transfers": [_short(transfer) for transfer in self.predicted.transfers],
            }
        return {
            "format": FORMAT,
            "model": self.model,
            "overlap": self.overlap,
            "tiers": list(self.tiers),
            "links": [list(link) for link in self.links],
            "clock_uncertainty_seconds": dict(self.clock_uncertainty_seconds),
            "schedule": self.schedule.to_dict(),
            "profile": None if self.profile is None else self.profile.to_dict(),
            "predicted": predicted,
            "steps": [_short(step) for step in self.steps],
            "spans": [_short(span) for span in self.spans],
            "transfers": [_short(transfer) for transfer in self.transfers],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Timeline:
        check_format(data, FORMAT, kind="timeline")
        try:
            for event in (*data["steps"], *data["spans"]):
                _check_times(event, "start", "end")
            for event in data["transfers"]:
                _check_times(event, "queued", "arrived")
            return cls(
                model=data["model"],
                overlap=data["overlap"],
                tiers=tuple(data["tiers"]),
                links=tuple((link[0], link[1]) for link in data["links"]),
                schedule=Schedule.from_dict(data["schedule"]),
                profile=None if data["profile"] is None else Profile.from_dict(data["profile"]),
                predicted=None if data["predicted"] is None else _predicted(data["predicted"]),
                clock_uncertainty_seconds=data["clock_uncertainty_seconds"],
                steps=tuple(RecordedStep(**step) for step in data["steps"]),
                spans=tuple(Span(**span) for span in data["spans"]),
                transfers=tuple(Transfer(**transfer) for transfer in data["transfers"]),
            )
        except KeyError as error:
            raise ValueError(f"this is not a timeline: it lacks the field {error}") from error
        except (TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"this is not a timeline: {error}") from error


def _predicted(data: dict[str, Any]) -> PredictedStep:
    return PredictedStep(
        seconds=data["seconds"],
        phases=data["phases"],
        busy_seconds=data["busy_seconds"],
        spans=tuple(Span(**span) for span in data["spans"]),
        transfers=tuple(Transfer(**transfer) for transfer in data["transfers"]),
    )


def _topology(tiers: tuple[str, ...], links: tuple[tuple[str, str], ...]) -> Topology:
    return Topology(
        tiers=tuple(Tier(name=name) for name in tiers),
        links=tuple(Link(between=link) for link in links),
    )


def _check_times(event: Mapping[str, Any], *names: str) -> None:
    for name in names:
        # A transfer may have begun before the first recorded step.
        check_number(name, abs(event[name]))


def _short(item: Span | Transfer | RecordedStep) -> dict[str, Any]:
    """Returns the fields that say something, with times rounded."""
    return {
        name: round(value, _DIGITS) if isinstance(value, float) else value
        for name, value in asdict(item).items()
        if value not in ("", None, {})
    }
