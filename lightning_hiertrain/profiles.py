"""What was measured: layers' times on each tier, sizes, the optimizer's time, the links.

Made by the profiling stage or by hand, read by the planner. Pure data in SI units.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning_hiertrain.topology import Link, Tier, Topology, check_format, read_json

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class AffineTime:
    """Seconds that grow with the samples: `fixed + per_sample * num_samples`, and 0 for none."""

    fixed: float
    per_sample: float
    relative_spread: float | None = None
    """Median relative distance of the measurements from the fit; `None` if it was not measured."""
    sample_counts: tuple[int, ...] = ()
    """The numbers of samples at which it was measured."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sample_counts", tuple(self.sample_counts))
        check_number("fixed", self.fixed)
        check_number("per_sample", self.per_sample)
        if self.relative_spread is not None:
            check_number("relative_spread", self.relative_spread)
        for count in self.sample_counts:
            check_number("sample_counts", count)

    def __call__(self, num_samples: int) -> float:
        """Returns the seconds for `num_samples` samples."""
        return self.fixed + self.per_sample * num_samples if num_samples else 0.0

    def to_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = {"fixed": self.fixed, "per_sample": self.per_sample}
        if self.relative_spread is not None:
            data["relative_spread"] = self.relative_spread
        if self.sample_counts:
            data["sample_counts"] = list(self.sample_counts)
        return data


@dataclass(frozen=True, kw_only=True)
class TierProfile:
    """What one tier needs apart from its layers."""

    optimizer_seconds: float = 0.0
    """One optimizer step over all parameters, if this tier is the owner."""
    overhead_seconds: float = 0.0
    """What a training step takes besides: the training loop, hooks, callbacks and messages."""
    transfer_seconds_per_byte: float = 0.0
    """What this tier's processor has to do for each byte that it sends or receives: encryption,
    TCP, copies. A byte that it relays is received and sent."""
    memory_bytes: int | None = None
    """Memory that training may use; `None` for no limit."""
    loss_seconds: AffineTime = field(default_factory=lambda: AffineTime(fixed=0.0, per_sample=0.0))
    """What the owner runs after the chain on the whole mini-batch: loss, metrics and their
    backward."""

    def __post_init__(self) -> None:
        check_number("optimizer_seconds", self.optimizer_seconds)
        check_number("overhead_seconds", self.overhead_seconds)
        check_number("transfer_seconds_per_byte", self.transfer_seconds_per_byte)
        if self.memory_bytes is not None:
            check_number("memory_bytes", self.memory_bytes, positive=True)


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """One layer of the chain on every tier."""

    name: str
    output_bytes_per_sample: int
    """Bytes of one sample at the cut after this layer."""
    parameter_bytes: int
    """Bytes of the parameters that this layer is the first to use."""
    forward_seconds: Mapping[str, AffineTime]
    backward_seconds: Mapping[str, AffineTime]

    def __post_init__(self) -> None:
        check_number("output_bytes_per_sample", self.output_bytes_per_sample)
        check_number("parameter_bytes", self.parameter_bytes)


@dataclass(frozen=True, kw_only=True)
class LinkProfile:
    """What the connection between two tiers carries, each way."""

    between: tuple[str, str]
    bandwidth_bytes_per_second: float
    latency_seconds: float = 0.0
    """One way."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "between", tuple(self.between))
        if len(self.between) != 2 or self.between[0] == self.between[1]:
            raise ValueError(f"a link joins two different tiers, got {self.between!r}")
        name = "-".join(self.between)
        check_number(
            f"bandwidth_bytes_per_second of {name}", self.bandwidth_bytes_per_second, positive=True
        )
        check_number(f"latency_seconds of {name}", self.latency_seconds)


@dataclass(frozen=True, kw_only=True)
class CodecProfile:
    """What packing tensors for a link saves and costs, per byte of the tensor before packing."""

    bytes_ratio: float
    """Bytes on the wire for each byte of the tensor."""
    encode_seconds_per_byte: Mapping[str, float] = field(default_factory=dict)
    """By tier; a tier that is not named packs in no time."""
    decode_seconds_per_byte: Mapping[str, float] = field(default_factory=dict)
    """By tier; a tier that is not named unpacks in no time."""
    accuracy_loss: float | None = None
    """Accuracy lost on a calibration batch, as a fraction; `None` if it was not measured."""

    def __post_init__(self) -> None:
        check_number("bytes_ratio", self.bytes_ratio, positive=True)
        for name in ("encode_seconds_per_byte", "decode_seconds_per_byte"):
            object.__setattr__(self, name, dict(getattr(self, name)))
            for tier, seconds in getattr(self, name).items():
                check_number(f"{name} of tier {tier}", seconds)
        if self.accuracy_loss is not None:
            check_number(
                "accuracy_loss", abs(self.accuracy_loss) if _is_number(self.accuracy_loss) else -1
            )


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Everything that the planner knows of a model and of the tiers that train it."""

    model: str
    input_bytes_per_sample: int
    target_bytes_per_sample: int
    data_tier: str
    tiers: Mapping[str, TierProfile]
    """In order of rank."""
    layers: tuple[LayerProfile, ...]
    links: tuple[LinkProfile, ...]
    codecs: Mapping[str, CodecProfile] = field(default_factory=dict)
    """By the codec's name; those that are not named have the planner's default figures."""
    dealing_seconds: AffineTime = field(
        default_factory=lambda: AffineTime(fixed=0.0, per_sample=0.0)
    )
    """What the data tier takes from one step to the next: to load and deal out a mini-batch, and to
    pack each sample that another tier gets. `overhead_seconds` of that tier includes the fixed
    part."""
    optimizer_state_bytes: int | None = None
    """What the optimizer keeps on the owner; `None` if unknown, the planner then takes twice the
    parameters (Adam)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tiers", dict(self.tiers))
        object.__setattr__(self, "codecs", dict(self.codecs))
        if self.optimizer_state_bytes is not None:
            check_number("optimizer_state_bytes", self.optimizer_state_bytes)
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "links", tuple(self.links))
        check_number("input_bytes_per_sample", self.input_bytes_per_sample)
        check_number("target_bytes_per_sample", self.target_bytes_per_sample)
        names = list(self.tiers)
        if not self.layers:
            raise ValueError("a profile needs at least one layer")
        if self.data_tier not in names:
            raise ValueError(f"the data tier {self.data_tier!r} is not among the tiers {names}")
        for layer in self.layers:
            for what, times in (
                ("forward", layer.forward_seconds),
                ("backward", layer.backward_seconds),
            ):
                missing = [name for name in names if name not in times]
                if missing:
                    raise ValueError(
                        f"layer {layer.name!r} has no {what} time for tier {missing[0]!r}"
                    )
        _ = self.topology  # refuses links to strangers and tiers that no link reaches

    @property
    def topology(self) -> Topology:
        """The tiers and links of this profile, without addresses or keys."""
        order = list(self.tiers)

        def by_rank(between: tuple[str, str]) -> tuple[str, str]:
            known = all(name in order for name in between)
            first, second = sorted(between, key=order.index) if known else between
            return first, second

        return Topology(
            tiers=tuple(Tier(name=name) for name in order),
            links=tuple(Link(between=by_rank(link.between)) for link in self.links),
        )

    def restricted_to(self, tiers: Collection[str]) -> Profile:
        """Returns the profile as if there were only some of the tiers, the data tier among them.

        Raises:
            ValueError: If the data tier is not, or no chain of links joins them.
        """
        return replace(
            self,
            tiers={name: tier for name, tier in self.tiers.items() if name in tiers},
            links=tuple(link for link in self.links if set(link.between) <= set(tiers)),
        )

    def link(self, first: str, second: str) -> LinkProfile | None:
        """Returns the direct link between two tiers, in either order, or `None`."""
        return next((link for link in self.links if {first, second} == set(link.between)), None)

    def bytes_per_second(self, source: str, target: str) -> float:
        """Returns what the route between two tiers carries: as much as its slowest link."""
        hops = [self.link(*hop) for hop in pairwise(self.topology.route(source, target))]
        return min(link.bandwidth_bytes_per_second for link in hops if link is not None)

    def to_json(self, path: str | Path) -> None:
        """Writes the profile to a file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def from_json(cls, path: str | Path) -> Profile:
        """Reads a profile file.

        Raises:
            ValueError: If the file is not a profile of this format, or a value in it is impossible.
        """
        return cls.from_dict(read_json(path, kind="profile"))

    def to_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "format": FORMAT,
            "model": self.model,
            "input_bytes_per_sample": self.input_bytes_per_sample,
            "target_bytes_per_sample": self.target_bytes_per_sample,
            "data_tier": self.data_tier,
            "tiers": {
                name: {
                    "optimizer_seconds": tier.optimizer_seconds,
                    "overhead_seconds": tier.overhead_seconds,
                    "transfer_seconds_per_byte": tier.transfer_seconds_per_byte,
                    "memory_bytes": tier.memory_bytes,
                    "loss_seconds": tier.loss_seconds.to_dict(),
                }
                for name, tier in self.tiers.items()
            },
            "layers": [
                {
                    "name": layer.name,
                    "output_bytes_per_sample": layer.output_bytes_per_sample,
                    "parameter_bytes": layer.parameter_bytes,
                    "forward_seconds": {
                        t: time.to_dict() for t, time in layer.forward_seconds.items()
                    },
                    "backward_seconds": {
                        t: time.to_dict() for t, time in layer.backward_seconds.items()
                    },
                }
                for layer in self.layers
            ],
            "links": [
                {
                    "between": list(link.between),
                    "bandwidth_bytes_per_second": link.bandwidth_bytes_per_second,
                    "latency_seconds": link.latency_seconds,
                }
                for link in self.links
            ],
        }
        if any((self.dealing_seconds.fixed, self.dealing_seconds.per_sample)):
            data["dealing_seconds"] = self.dealing_seconds.to_dict()
        if self.optimizer_state_bytes is not None:
            data["optimizer_state_bytes"] = self.optimizer_state_bytes
        if self.codecs:
            data["codecs"] = {name: asdict(codec) for name, codec in self.codecs.items()}
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Profile:
        check_format(data, FORMAT, kind="profile")
        try:
            return cls(
                model=str(data["model"]),
                input_bytes_per_sample=data["input_bytes_per_sample"],
                target_bytes_per_sample=data["target_bytes_per_sample"],
                data_tier=data["data_tier"],
                tiers={
                    name: TierProfile(
                        optimizer_seconds=tier.get("optimizer_seconds", 0.0),
                        overhead_seconds=tier.get("overhead_seconds", 0.0),
                        transfer_seconds_per_byte=tier.get("transfer_seconds_per_byte", 0.0),
                        memory_bytes=tier.get("memory_bytes"),
                        loss_seconds=_time(
                            tier.get("loss_seconds", {"fixed": 0.0, "per_sample": 0.0})
                        ),
                    )
                    for name, tier in data["tiers"].items()
                },
                layers=tuple(
                    LayerProfile(
                        name=str(layer["name"]),
                        output_bytes_per_sample=layer["output_bytes_per_sample"],
                        parameter_bytes=layer["parameter_bytes"],
                        forward_seconds={
                            t: _time(time) for t, time in layer["forward_seconds"].items()
                        },
                        backward_seconds={
                            t: _time(time) for t, time in layer["backward_seconds"].items()
                        },
                    )
                    for layer in data["layers"]
                ),
                links=tuple(
                    LinkProfile(
                        between=tuple(link["between"]),
                        bandwidth_bytes_per_second=link["bandwidth_bytes_per_second"],
                        latency_seconds=link.get("latency_seconds", 0.0),
                    )
                    for link in data["links"]
                ),
                codecs={
                    name: CodecProfile(**codec) for name, codec in data.get("codecs", {}).items()
                },
                dealing_seconds=_time(
                    data.get("dealing_seconds", {"fixed": 0.0, "per_sample": 0.0})
                ),
                optimizer_state_bytes=data.get("optimizer_state_bytes"),
            )
        except KeyError as error:
            raise ValueError(f"this is not a profile: it lacks the field {error}") from error
        except (TypeError, AttributeError) as error:
            raise ValueError(f"this is not a profile: {error}") from error


def _time(data: dict[str, Any]) -> AffineTime:
    return AffineTime(
        fixed=data["fixed"],
        per_sample=data["per_sample"],
        relative_spread=data.get("relative_spread"),
        sample_counts=tuple(data.get("sample_counts", ())),
    )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_number(name: str, value: Any, *, positive: bool = False) -> None:
    """Refuses what no measurement can give."""
    least = "above 0" if positive else "of at least 0"
    if not _is_number(value):
        raise ValueError(f"`{name}` must be a number {least}, got {value!r}")
    try:
        finite = math.isfinite(value)
    except OverflowError:  # a whole number beyond any float
        finite = False
    if not finite or value < 0 or (positive and value == 0):
        raise ValueError(
            f"`{name}` must be a finite number {least}, got {value!r}; measure it again"
        )
