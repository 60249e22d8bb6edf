"""Lower bounds for many boxes at once: a batch of small linear programmes, solved in NumPy.

For one box, with the shares allowed to be fractions, the least step time is the linear programme
(18) of docs/cost_model.md. It is solved by cutting planes: at the current shares the most violated
path enters the basis. Each basis also gives multipliers for the paths, and from any multipliers,
optimal or not, follows a bound that holds whatever the arithmetic did on the way (19). That bound
is what is returned.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lightning_hiertrain.planning.boxes import BACKWARD, BUSY, FORWARD, MEMORY, Boxes, Paths
from lightning_hiertrain.planning.instance import Bools, Floats, Ints

_TOLERANCE = 1e-10
_MAX_ITERATIONS = 60
_DEAD = 1e3
"""Value, in units of the incumbent, of every path at the vertex of a tier that takes no part."""


@dataclass(frozen=True, kw_only=True)
class Relaxed:
    """Bounds and where they are attained."""

    bound: Floats
    """`(boxes,)`: no schedule in the box takes less; infinite if none fits into memory."""
    weight: Floats
    """`(boxes, tiers)`: the shares beyond the least ones, as fractions of all that are to be dealt
    out."""


def relax(
    paths: Paths, boxes: Boxes, *, batch_size: int, scale: float, enough: float = np.inf
) -> Relaxed:
    """Bounds each box from below.

    Args:
        paths: The boxes' paths.
        boxes: The boxes.
        batch_size: Samples in the mini-batch.
        scale: A typical step time, to keep the numbers near 1.
        enough: A bound that suffices: a box that has reached it is not pursued further.
    """
    live = boxes.taking_part
    values, kind = _at_vertices(paths, boxes, batch_size=batch_size, scale=scale)
    timed = kind != MEMORY
    values = np.where(live[:, None, :] | ~timed[:, None], values, _DEAD)
    values = np.where(live[:, None, :] | timed[:, None], values, 0.0)
    programme = _Programme(values, kind, live)
    programme.run(enough / scale)
    bound = programme.proven_bound()
    return Relaxed(
        bound=np.where(programme.infeasible, np.inf, bound * scale), weight=programme.shares()
    )


def _at_vertices(
    paths: Paths, boxes: Boxes, *, batch_size: int, scale: float
) -> tuple[Floats, Ints]:
    """Each path's value where one tier gets all free samples; a side without paths gets a 0."""
    free = (batch_size - boxes.least.sum(axis=1))[:, None, None]
    values = paths.at(boxes.least)[:, :, None] + free * paths.slope
    parts = [np.where((paths.kind == MEMORY)[:, None], values, values / scale)]
    kinds = [paths.kind]
    count, _, num_tiers = values.shape
    for kind in (FORWARD, BACKWARD):
        if not (paths.kind == kind).any():
            parts.append(np.zeros((count, 1, num_tiers)))
            kinds.append(np.array([kind]))
    if (boxes.most < batch_size)[boxes.taking_part].any():  # a share's limit is like a memory limit
        over = (boxes.least - boxes.most)[:, :, None] + free * np.eye(num_tiers)
        parts.append(over / batch_size)
        kinds.append(np.full(num_tiers, MEMORY))
    return np.concatenate(parts, axis=1), np.concatenate(kinds)


class _Programme:
    """The batch of linear programmes.

    A basis has a row for each tier, then one for each of the two sums of multipliers.
    """

    def __init__(self, values: Floats, kind: Ints, live: Bools) -> None:
        self.values, self.live = values, live
        self.in_forward = np.isin(kind, (FORWARD, BUSY)).astype(float)
        self.in_backward = np.isin(kind, (BACKWARD, BUSY)).astype(float)
        self.count, self.num_paths, self.num_tiers = values.shape
        self.all = np.arange(self.count)
        self.infeasible = np.zeros(self.count, bool)
        self._start(kind)

    def _start(self, kind: Ints) -> None:
        """The first basis: a forward and a backward path, and all tiers' slack but the worst's."""
        size, count = self.num_tiers, self.count
        center = self.live / np.maximum(self.live.sum(axis=1, keepdims=True), 1)
        heights = np.einsum("npt,nt->np", self.values, center)
        first = np.where(kind == FORWARD, heights, -np.inf).argmax(axis=1)
        second = np.where(kind == BACKWARD, heights, -np.inf).argmax(axis=1)
        both = self.values[self.all, first] + self.values[self.all, second]
        tight = np.where(self.live, both, np.inf).argmin(axis=1)
        others = np.arange(size - 1)[None, :] + (np.arange(size - 1)[None, :] >= tight[:, None])
        self.basis = np.concatenate(
            [np.full((count, 1), -1), first[:, None], second[:, None], self.num_paths + others],
            axis=1,
        )
        matrix = np.zeros((count, size + 2, size + 2))
        matrix[:, :size, 0] = 1.0
        matrix[:, :size, 1], matrix[:, size, 1] = -self.values[self.all, first], 1.0
        matrix[:, :size, 2], matrix[:, size + 1, 2] = -self.values[self.all, second], 1.0
        matrix[self.all[:, None], others, np.arange(3, size + 2)] = 1.0
        self.inverse = np.linalg.inv(matrix)

    def run(self, enough: float) -> None:
        """Pivots until no path is violated, the bound is enough, or the iterations are used up."""
        rows = self.all
        for _ in range(_MAX_ITERATIONS):
            rows = rows[self._improve(rows, enough)]
            if not len(rows):
                return

    def _improve(self, rows: Ints, enough: float) -> Bools:
        """One pivot in each of these programmes; returns which of them go on."""
        size = self.num_tiers
        inverse = self.inverse[rows]
        prices = inverse[:, 0]
        gains = np.einsum("npt,nt->np", self.values[rows], prices[:, :size])
        gains -= (
            prices[:, size, None] * self.in_forward + prices[:, size + 1, None] * self.in_backward
        )
        gains = np.concatenate([gains, -prices[:, :size]], axis=1)
        entering = gains.argmax(axis=1)
        going = (gains[np.arange(len(rows)), entering] > _TOLERANCE) & (
            (inverse[:, 0, size] + inverse[:, 0, size + 1]) < enough
        )
        column = np.zeros((len(rows), size + 2))
        path = entering < self.num_paths
        chosen = entering[path]
        column[path, :size] = -self.values[rows[path], chosen]
        column[path, size], column[path, size + 1] = (
            self.in_forward[chosen],
            self.in_backward[chosen],
        )
        column[~path, entering[~path] - self.num_paths] = 1.0
        change = np.einsum("nij,nj->ni", inverse, column)
        levels = inverse[:, :, size] + inverse[:, :, size + 1]
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = np.where(change > 1e-11, np.maximum(levels, 0.0) / change, np.inf)
        ratios[:, 0] = np.inf  # the bound itself never leaves
        leaving = ratios.argmin(axis=1)
        steps = np.arange(len(rows))
        unbounded = going & ~np.isfinite(ratios[steps, leaving])
        self.infeasible[rows[unbounded]] = True
        going &= ~unbounded
        pivot = np.where(going, change[steps, leaving], 1.0)
        row = inverse[steps, leaving] / pivot[:, None]
        updated = inverse - change[:, :, None] * row[:, None, :]
        updated[steps, leaving] = row
        self.inverse[rows[going]] = updated[going]
        self.basis[rows[going], leaving[going]] = entering[going]
        return np.asarray(going)

    def proven_bound(self) -> Floats:
        """Equation (19): the bound that the multipliers give, worked out afresh from the paths."""
        levels = self.inverse[:, :, self.num_tiers] + self.inverse[:, :, self.num_tiers + 1]
        is_path = (self.basis >= 0) & (self.basis < self.num_paths)
        multipliers = np.where(is_path, np.maximum(levels, 0.0), 0.0)
        path = np.where(is_path, self.basis, 0)
        sums = [
            (multipliers * side[path] * is_path).sum(axis=1)
            for side in (self.in_forward, self.in_backward)
        ]
        mixed = np.einsum("nr,nrt->nt", multipliers, self.values[self.all[:, None], path])
        bound = np.where(self.live, mixed, np.inf).min(axis=1)
        exact = (np.abs(sums[0] - 1.0) < 1e-9) & (np.abs(sums[1] - 1.0) < 1e-9)
        return np.where(exact, bound - 1e-8 * np.abs(bound), -np.inf)

    def shares(self) -> Floats:
        """Where the last basis would put the free samples."""
        weight = np.maximum(self.inverse[:, 0, : self.num_tiers], 0.0) * self.live
        total = weight.sum(axis=1, keepdims=True)
        even = self.live / np.maximum(self.live.sum(axis=1, keepdims=True), 1)
        return np.asarray(np.where(total > 1e-9, weight / np.maximum(total, 1e-9), even))
