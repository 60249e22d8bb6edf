"""Finds the few choices of roles, cuts and codecs that can be optimal: bound, discard, split.

Starts from one box for each owner and set of prefix workers, with every cut from 1 to N. A box
whose bound reaches the best step time known is discarded; the others are split in half at their
widest interval, down to single cuts.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace

import numpy as np

from lightning_hiertrain.planning.boxes import Boxes
from lightning_hiertrain.planning.instance import Bools, Floats, Ints
from lightning_hiertrain.planning.paths import PathTable
from lightning_hiertrain.planning.relaxation import relax

log = logging.getLogger(__name__)

_WIDTH = 4096
"""Boxes that are bounded at once."""
_TRIES = 48
"""Boxes of each round from which a schedule is made, to have a good one early."""
CLOSE = 5e-8
"""Relative distance below which two step times are the same; more than the bounds' allowance for
rounding."""
_SHARE_ROUNDS = 60
"""How often shares are split before what is left goes to SCIP."""


@dataclass(kw_only=True)
class Incumbent:
    """The best schedule known."""

    seconds: float = np.inf
    box: Boxes | None = None
    """One row, with single cuts and codecs."""
    shares: Ints | None = None

    def offer(self, seconds: Floats, boxes: Boxes, shares: Ints) -> None:
        """Takes the best of these schedules if it is better than the one known."""
        if len(seconds) and seconds.min() < self.seconds * (1 - 1e-12):
            best = int(seconds.argmin())
            self.seconds, self.box, self.shares = (
                float(seconds[best]),
                boxes[best : best + 1],
                shares[best],
            )


@dataclass(kw_only=True)
class Found:
    """What the search leaves."""

    leaves: Boxes
    """Single cuts and codecs, best bound first."""
    bounds: Floats
    open_bound: float
    """The least bound of the boxes that a time limit left unexplored; infinite if there are
    none."""
    num_boxes: int = 0


@dataclass(kw_only=True)
class Search:
    """Branch and bound over boxes of cuts."""

    table: PathTable
    codec_sets: list[tuple[int, ...]]
    scale: float
    deadline: float = np.inf
    incumbent: Incumbent = field(default_factory=Incumbent)

    def run(self, roots: Boxes) -> Found:
        """Explores these boxes until only single cuts and codecs are left that may be optimal."""
        todo, bounds = roots, np.zeros(len(roots))
        leaves: list[Boxes] = []
        leaf_bounds: list[Floats] = []
        seen = 0
        while len(todo):
            order = np.argsort(bounds, kind="stable")
            now, later = order[:_WIDTH], order[_WIDTH:]
            boxes, bound, weight = self.bounded(todo[now], bounds[now])
            seen += len(now)
            self.try_some(boxes, bound, weight)
            good = bound < self.incumbent.seconds * (1 - CLOSE)
            boxes, bound = boxes[good], bound[good]
            single = self.is_leaf(boxes)
            if single.any():
                leaves.append(boxes[single])
                leaf_bounds.append(bound[single])
            children, child_bounds = self.split(boxes[~single], bound[~single])
            rest = later[bounds[later] < self.incumbent.seconds * (1 - CLOSE)]
            todo = Boxes.join([todo[rest], children])
            bounds = np.concatenate([bounds[rest], child_bounds])
            if time.monotonic() > self.deadline:
                break
        found = Boxes.join(leaves) if leaves else roots[:0]
        found_bounds = np.concatenate(leaf_bounds) if leaves else np.zeros(0)
        kept = np.argsort(found_bounds, kind="stable")
        kept = kept[found_bounds[kept] < self.incumbent.seconds * (1 - CLOSE)]
        log.debug(
            "bounded %d sets of schedules, %d choices of roles and cuts are left", seen, len(kept)
        )
        return Found(
            leaves=found[kept],
            bounds=found_bounds[kept],
            open_bound=float(bounds.min()) if len(todo) else np.inf,
            num_boxes=seen,
        )

    def bounded(
        self, boxes: Boxes, known: Floats, *, exact: bool = False
    ) -> tuple[Boxes, Floats, Floats]:
        """Bounds boxes; a box is bounded at least by what is known of the one it came from."""
        terms = self.table.instance.num_layers if exact else 4
        relaxed = relax(
            self.table.paths(boxes, num_terms=terms),
            boxes,
            batch_size=self.table.instance.batch_size,
            scale=self.scale,
            enough=self.incumbent.seconds,
        )
        return boxes, np.maximum(relaxed.bound, known), relaxed.weight

    def split_shares(self, leaves: Boxes, bounds: Floats, *, few: int) -> tuple[Boxes, Floats]:
        """Bounds leaves with every path and splits shares until at most `few` may be optimal.

        Fractions in the relaxation leave many leaves just below the incumbent; cutting the most
        fractional share off on either side lifts them.
        """
        for _ in range(_SHARE_ROUNDS if len(leaves) else 0):
            leaves, bounds, weight = self.bounded(leaves, bounds, exact=True)
            self.try_some(leaves, bounds, weight)
            good = bounds < self.incumbent.seconds * (1 - CLOSE)
            leaves, bounds, weight = leaves[good], bounds[good], weight[good]
            if len(leaves) <= few or time.monotonic() > self.deadline:
                break
            free = self.table.instance.batch_size - leaves.least.sum(axis=1)
            shares = leaves.least + weight * free[:, None]
            distance = np.abs(shares - np.rint(shares))
            rows, tier = np.arange(len(leaves)), distance.argmax(axis=1)
            whole = distance[rows, tier] < 1e-7
            at = np.floor(shares[rows, tier]).astype(int)
            below, above = leaves[rows], leaves[rows]
            below.most[rows, tier] = np.minimum(below.most[rows, tier], at)
            above.least[rows, tier] = np.maximum(above.least[rows, tier], at + 1)
            possible = above.least.sum(axis=1) <= self.table.instance.batch_size
            possible &= (above.least <= above.most).all(axis=1) & ~whole
            below.most[whole] = leaves.most[whole]
            leaves = Boxes.join([below, above[possible]])
            bounds = np.concatenate([bounds, bounds[possible]])
        order = np.argsort(bounds, kind="stable")
        return leaves[order], bounds[order]

    def is_leaf(self, boxes: Boxes) -> Bools:
        sizes = np.array([len(chosen) for chosen in self.codec_sets])
        one_codec = (sizes[boxes.codec] == 1) | ~boxes.active
        return np.asarray((boxes.low == boxes.high).all(axis=1) & one_codec.all(axis=1))

    def split(self, boxes: Boxes, bounds: Floats) -> tuple[Boxes, Floats]:
        """Halves each box at its widest interval of cuts, or takes its codecs apart."""
        if not len(boxes):
            return boxes, bounds
        width = boxes.high - boxes.low
        widest = width.argmax(axis=1)
        by_cut = width.max(axis=1) > 0
        rows, tier = np.flatnonzero(by_cut), widest[by_cut]
        lower, upper = boxes[rows], boxes[rows]
        middle = (
            lower.low[np.arange(len(rows)), tier] + lower.high[np.arange(len(rows)), tier]
        ) // 2
        lower.high[np.arange(len(rows)), tier] = middle
        upper.low[np.arange(len(rows)), tier] = middle + 1
        parts, part_bounds = [lower, upper], [bounds[rows], bounds[rows]]
        for row in np.flatnonzero(~by_cut):
            sizes = [
                len(self.codec_sets[c]) if a else 1
                for c, a in zip(boxes.codec[row], boxes.active[row], strict=True)
            ]
            tier_index = int(np.argmax(sizes))
            members = self.codec_sets[boxes.codec[row, tier_index]]
            children = boxes[np.full(len(members), row)]
            children.codec[:, tier_index] = [self.codec_sets.index((member,)) for member in members]
            parts.append(children)
            part_bounds.append(np.full(len(members), bounds[row]))
        return Boxes.join(parts), np.concatenate(part_bounds)

    def try_some(self, boxes: Boxes, bounds: Floats, weight: Floats) -> None:
        """Makes schedules of the most promising boxes and offers them as incumbents."""
        order = np.argsort(bounds, kind="stable")[:_TRIES]
        order = order[np.isfinite(bounds[order]) | (bounds[order] < 0)]
        if len(order):
            chosen = boxes[order]
            self.evaluate(self.as_leaves(chosen), self.rounded(chosen, weight[order]))

    def as_leaves(self, boxes: Boxes) -> Boxes:
        """Picks in each box the cuts with the least to send, and the cheapest codecs."""
        low, high = boxes.low.copy(), boxes.high.copy()
        codec = boxes.codec.copy()
        output = self.table.instance.output
        for row, tier in zip(*np.nonzero(boxes.active), strict=True):
            options = output[low[row, tier] : high[row, tier] + 1]
            low[row, tier] = high[row, tier] = low[row, tier] + int(options.argmin())
            singles = [
                self.codec_sets.index((member,)) for member in self.codec_sets[codec[row, tier]]
            ]
            costs = self.table.way_up[singles, tier, boxes.owner[row]]
            codec[row, tier] = singles[int(costs.argmin())]
        return replace(boxes, low=low, high=high, codec=codec)

    def rounded(self, boxes: Boxes, weight: Floats) -> Ints:
        """Whole shares near these fractions, by largest remainder."""
        least = boxes.least
        free = self.table.instance.batch_size - least.sum(axis=1)
        exact = weight * free[:, None]
        whole = np.floor(exact + 1e-9).astype(int)
        missing = free - whole.sum(axis=1)
        rank = np.argsort(
            np.argsort(-(exact - whole), axis=1, kind="stable"), axis=1, kind="stable"
        )
        live = boxes.taking_part
        whole += ((rank < missing[:, None]) & live).astype(int)
        left = free - whole.sum(axis=1)
        whole[np.arange(len(boxes)), live.argmax(axis=1)] += left
        return np.asarray(least + whole)

    def evaluate(self, leaves: Boxes, shares: Ints) -> None:
        """Offers these schedules, and those that differ by one sample that changes tiers."""
        paths = self.table.paths(leaves, num_terms=self.table.instance.num_layers)
        least, live = leaves.least, leaves.taking_part
        self.incumbent.offer(paths.worst(shares), leaves, shares)
        size = shares.shape[1]
        for giver in range(size):
            for taker in range(size):
                moved = shares.copy()
                moved[:, giver] -= 1
                moved[:, taker] += 1
                fits = live[:, taker] & (moved >= least).all(axis=1)
                if giver != taker and fits.any():
                    seconds = np.where(fits, paths.worst(moved), np.inf)
                    self.incumbent.offer(seconds, leaves, moved)
