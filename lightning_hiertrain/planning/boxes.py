"""Sets of schedules (`Boxes`) and their costs as functions of the shares (`Paths`), as arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_hiertrain.planning.instance import Bools, Floats, Ints

FORWARD, BACKWARD, BUSY, MEMORY = range(4)
"""Kinds of paths: see `Paths.worst` for how they make up the step's time."""


@dataclass(frozen=True, kw_only=True)
class Boxes:
    """Sets of schedules, one a row.

    Arrays by prefix worker, of shape `(num_boxes, num_tiers)`, are 0 at the owner and idle tiers.
    """

    owner: Ints
    active: Bools
    """Prefix workers."""
    empty_owner: Bools
    """Whether the owner has no samples of its own."""
    chunks: Ints
    low: Ints
    high: Ints
    codec: Ints
    """Index into the table of codec sets."""
    least: Ints
    """Samples that each tier has at least: 1 where it takes part, on a prefix worker 1 a chunk."""
    most: Ints
    """Samples that each tier has at most; 0 where it takes no part."""

    def __len__(self) -> int:
        return len(self.owner)

    def __getitem__(self, rows: Ints | Bools | slice) -> Boxes:
        return Boxes(**{name: getattr(self, name)[rows] for name in self.__dataclass_fields__})

    @staticmethod
    def join(parts: list[Boxes]) -> Boxes:
        return Boxes(
            **{
                n: np.concatenate([getattr(part, n) for part in parts])
                for n in Boxes.__dataclass_fields__
            }
        )

    @property
    def taking_part(self) -> Bools:
        """Tiers with samples."""
        return self.least > 0


@dataclass(frozen=True, kw_only=True)
class Paths:
    """Affine functions of the shares.

    Shapes: `constant` is `(boxes, paths)`, `slope` `(boxes, paths, tiers)`, `kind` `(paths,)`.
    """

    constant: Floats
    slope: Floats
    kind: Ints

    def at(self, shares: Floats | Ints) -> Floats:
        """Their values at one vector of shares a box, `(boxes, paths)`."""
        return np.asarray(self.constant + np.einsum("npt,nt->np", self.slope, shares))

    def worst(self, shares: Floats | Ints) -> Floats:
        """The step's time by these paths, infinite where memory does not suffice."""
        values = self.at(shares)
        forward, backward, busy, memory = (values[:, self.kind == kind] for kind in range(4))
        step = np.maximum(_most(forward) + _most(backward), _most(busy))
        return np.where(_most(memory) > 1e-12, np.inf, step)


def _most(values: Floats) -> Floats:
    return np.asarray(values.max(axis=1)) if values.shape[1] else np.zeros(len(values))
