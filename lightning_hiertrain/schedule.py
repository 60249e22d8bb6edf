"""The plan: which tier runs how many layers on how many samples, and which of them owns the step.

Made by the planner (or by hand), broadcast, and carried out by the executor. Pure data.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning_hiertrain.profiles import check_number
from lightning_hiertrain.topology import check_format, read_json

FORMAT = 1
_WIDEST_BAR = 60
"""Characters in `Schedule.grid` for the layers; a longer chain is drawn to scale."""

_FIELDS = frozenset(
    [
        *("format", "owner", "shares", "policy", "predicted_seconds", "codecs", "num_chunks"),
        "optimality_gap",
    ]
)
"""Of a schedule file."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one tier does in a step: the first `num_layers` layers on `num_samples` samples."""

    num_layers: int
    num_samples: int

    def __post_init__(self) -> None:
        for name, value in (("num_layers", self.num_layers), ("num_samples", self.num_samples)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"`{name}` must be a whole number of at least 0, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Roles, cuts and shares of one training step.

    The owner's `num_layers` is the whole chain; a prefix worker with no samples has no layers. The
    rows of a mini-batch are dealt out in a fixed order, the owner's first, then the prefix workers'
    by depth, so that the owner can append the activations that arrive at a cut below its own.
    """

    owner: str
    """The tier that runs the whole model, the loss and the optimizer."""
    shares: Mapping[str, Share]
    """Each tier's share, in order of rank. Tiers that are not named take no part."""
    policy: str | None = None
    """The policy that made the schedule."""
    predicted_seconds: float | None = None
    """The planner's prediction for one step."""
    codecs: Mapping[str, str] = field(default_factory=dict)
    """By prefix worker: how activations and their gradients are packed on the way.

    A prefix worker that is not named sends them as they are, as does one whose codec is `"none"`.
    """
    num_chunks: int = 1
    """Parts into which each prefix worker splits its rows, so that it computes one while another
    travels."""
    optimality_gap: float | None = None
    """Relative distance to the proven bound where a time limit ended the planner early; 0 where it
    proved the optimum."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shares", dict(self.shares))
        object.__setattr__(self, "codecs", dict(self.codecs))
        if self.owner not in self.shares:
            raise ValueError(
                f"the owner {self.owner!r} has no share; shares are given for {list(self.shares)}"
            )
        if self.num_layers < 1 or self.batch_size < 1:
            raise ValueError(
                "the owner must run at least one layer and the mini-batch hold at least one "
                f"sample, got {self.num_layers} layers and {self.batch_size} samples"
            )
        for tier, share in self.shares.items():
            if share.num_layers > self.num_layers:
                raise ValueError(
                    f"tier {tier!r} runs {share.num_layers} layers and the owner {self.owner!r} "
                    f"only {self.num_layers}; the owner runs the whole chain"
                )
            if tier != self.owner and (share.num_layers == 0) != (share.num_samples == 0):
                raise ValueError(
                    f"tier {tier!r} has {share.num_layers} layers and {share.num_samples} samples; "
                    "a prefix worker has both or neither"
                )
        if (
            not isinstance(self.num_chunks, int)
            or isinstance(self.num_chunks, bool)
            or self.num_chunks < 1
        ):
            raise ValueError(
                f"`num_chunks` must be a whole number of at least 1, got {self.num_chunks!r}"
            )
        for tier, codec in self.codecs.items():
            if tier not in self.shares or tier == self.owner or not isinstance(codec, str):
                raise ValueError(
                    f"the codec {codec!r} is given for {tier!r}; codecs are words, for tiers "
                    f"other than the owner, among {list(self.shares)}"
                )
        for name in ("predicted_seconds", "optimality_gap"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name))
        if self.policy is not None and not isinstance(self.policy, str):
            raise ValueError(f"`policy` must be a word or nothing, got {self.policy!r}")

    @property
    def num_layers(self) -> int:
        """Layers in the whole chain."""
        return self.shares[self.owner].num_layers

    @property
    def batch_size(self) -> int:
        """Samples in the mini-batch that the schedule was made for."""
        return sum(share.num_samples for share in self.shares.values())

    @cached_property
    def prefix_workers(self) -> tuple[str, ...]:
        """The tiers with samples other than the owner, shallowest first, ties in order of rank."""
        workers = [
            tier for tier, share in self.shares.items() if tier != self.owner and share.num_samples
        ]
        return tuple(sorted(workers, key=lambda tier: self.shares[tier].num_layers))

    def without(self, tiers: Collection[str]) -> Schedule:
        """Returns the schedule by which the owner does what these tiers did, themselves left out.

        Raises:
            ValueError: If the owner is one of them.
        """
        if self.owner in tiers:
            raise ValueError(f"there is no schedule without its owner {self.owner!r}; plan anew")
        shares = {tier: share for tier, share in self.shares.items() if tier not in tiers}
        samples = sum(share.num_samples for t, share in self.shares.items() if t in tiers)
        own = shares[self.owner]
        shares[self.owner] = replace(own, num_samples=own.num_samples + samples)
        return replace(
            self,
            shares=shares,
            codecs={tier: codec for tier, codec in self.codecs.items() if tier not in tiers},
            predicted_seconds=None,
            optimality_gap=None,
        )

    def rows(self, num_samples: int, *, least: int = 1) -> dict[str, slice]:
        """Deals out the rows of a mini-batch, which may be smaller, in proportion to the shares.

        Every tier computes the same answer: whole parts first, then the largest remainders, ties in
        row order; then tiers with too few rows, the fewest first, give them to the one with most.

        Args:
            num_samples: Rows in the mini-batch at hand.
            least: Rows that a tier takes at least, if any.

        Returns:
            For the owner and each prefix worker the rows that it takes; some may be empty.
        """
        order = (self.owner, *self.prefix_workers)
        exact = [self.shares[tier].num_samples * num_samples for tier in order]
        counts = [value // self.batch_size for value in exact]
        by_remainder = sorted(range(len(order)), key=lambda i: -(exact[i] % self.batch_size))
        for i in by_remainder[: num_samples - sum(counts)]:
            counts[i] += 1
        while few := [i for i, count in enumerate(counts) if 0 < count < min(least, num_samples)]:
            giver = min(few, key=counts.__getitem__)
            taker = max((i for i in range(len(order)) if i != giver), key=counts.__getitem__)
            counts[taker], counts[giver] = counts[taker] + counts[giver], 0
        rows, start = {}, 0
        for tier, count in zip(order, counts, strict=True):
            rows[tier] = slice(start, start + count)
            start += count
        return rows

    def grid(self) -> str:
        """Draws the schedule, one line a tier; `#` marks the layers that a tier runs."""
        width = max(len(tier) for tier in self.shares)
        bar_width = min(self.num_layers, _WIDEST_BAR)
        lines = [f"{'tier':<{width}}  role    samples  layers"]
        for tier, share in self.shares.items():
            role = "owner" if tier == self.owner else "prefix" if share.num_samples else "idle"
            depth = share.num_layers
            filled = round(depth * bar_width / self.num_layers)
            bar = "#" * filled + "." * (bar_width - filled)
            lines.append(
                f"{tier:<{width}}  {role:<6}  {share.num_samples:>7}  "
                f"{bar} {depth}/{self.num_layers}"
            )
        return "\n".join(lines)

    def to_json(self, path: str | Path) -> None:
        """Writes the schedule to a file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def from_json(cls, path: str | Path) -> Schedule:
        """Reads a schedule file.

        Raises:
            ValueError: If the file is not a schedule of this format.
        """
        return cls.from_dict(read_json(path, kind="schedule"))

    def to_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "format": FORMAT,
            "owner": self.owner,
            "shares": {
                tier: {"num_layers": share.num_layers, "num_samples": share.num_samples}
                for tier, share in self.shares.items()
            },
            "policy": self.policy,
            "predicted_seconds": self.predicted_seconds,
        }
        if self.codecs:
            data["codecs"] = dict(self.codecs)
        if self.num_chunks != 1:
            data["num_chunks"] = self.num_chunks
        if self.optimality_gap is not None:
            data["optimality_gap"] = self.optimality_gap
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Schedule:
        check_format(data, FORMAT, kind="schedule")
        unknown = sorted(data.keys() - _FIELDS)
        if unknown:
            raise ValueError(f"a schedule has no field {unknown[0]!r}; it has {sorted(_FIELDS)}")
        try:
            return cls(
                owner=data["owner"],
                shares={tier: Share(**share) for tier, share in data["shares"].items()},
                policy=data.get("policy"),
                predicted_seconds=data.get("predicted_seconds"),
                codecs=data.get("codecs", {}),
                num_chunks=data.get("num_chunks", 1),
                optimality_gap=data.get("optimality_gap"),
            )
        except KeyError as error:
            raise ValueError(f"this is not a schedule: it lacks the field {error}") from error
        except (TypeError, AttributeError) as error:
            raise ValueError(f"this is not a schedule: {error}") from error
