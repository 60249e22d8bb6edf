"""One planning problem, from its roots to a proven optimum: search, then SCIP on the rest."""

from __future__ import annotations

import time

import numpy as np

from lightning_hiertrain.errors import PlanningError
from lightning_hiertrain.planning.boxes import Boxes
from lightning_hiertrain.planning.instance import Instance
from lightning_hiertrain.planning.paths import PathTable
from lightning_hiertrain.planning.policies import Privacy, make_boxes, policy_roles
from lightning_hiertrain.planning.programme import Slots, Solved, solve
from lightning_hiertrain.planning.search import CLOSE, Incumbent, Search

_SLOTS = 8
"""Choices of roles and cuts that SCIP gets at once."""
_FEW = 4
"""So many choices are left to SCIP without more ado."""
_PROVEN = 1e-6
"""Relative distance between a step time and its bound below which it counts as proven."""


class Solver:
    """Finds the best schedule of one policy.

    Args:
        instance: The problem's numbers.
        policy: Which schedules there are to choose from.
        privacy: Whether raw samples must stay on the data tier.
        objective: `"plain"`, `"overlap"`, `"busiest"`, or `"memory"` for the least shortage of
            memory.
        chunk_counts: Numbers of chunks to choose from.
        deadline: When to stop, on `time.monotonic`'s clock.
        prefetch: Whether the next mini-batch's samples take up memory too; by default with overlap.
    """

    def __init__(
        self,
        instance: Instance,
        *,
        policy: str,
        privacy: Privacy,
        objective: str,
        chunk_counts: tuple[int, ...] = (1,),
        deadline: float = np.inf,
        prefetch: bool | None = None,
    ) -> None:
        self.instance, self.policy, self.privacy, self.deadline = (
            instance,
            policy,
            privacy,
            deadline,
        )
        self.codec_sets: list[tuple[int, ...]] = [(index,) for index in range(len(instance.codecs))]
        choice = tuple(range(1 if policy == "jalad" else 0, len(instance.codecs)))
        if len(choice) > 1:
            self.codec_sets.append(choice)
        self.table = PathTable(
            instance,
            self.codec_sets,
            objective,
            prefetch=objective == "overlap" if prefetch is None else prefetch,
        )
        self.roots = make_boxes(
            policy_roles(policy, instance),
            instance,
            policy=policy,
            privacy=privacy,
            chunk_counts=chunk_counts,
            codec_set=self.codec_sets.index(choice),
        )
        self.objective = objective
        self.search = Search(
            table=self.table, codec_sets=self.codec_sets, scale=self._scale(), deadline=deadline
        )

    @property
    def incumbent(self) -> Incumbent:
        """The best schedule so far."""
        return self.search.incumbent

    def _scale(self) -> float:
        """A value of the right size: the data tier's time for all the work."""
        if self.objective == "memory":
            return 1.0
        i = self.instance
        fixed = i.forward_fixed[i.data, -1] + i.backward_fixed[i.data, -1]
        slope = i.forward_slope[i.data, -1] + i.backward_slope[i.data, -1]
        seconds = fixed + i.batch_size * slope + i.loss[i.data] + i.optimizer[i.data]
        return float(max(seconds, 1e-9))

    def run(self) -> float:
        """Finds `incumbent`; returns its relative distance to the proven bound, 0 if it is optimal.

        Raises:
            PlanningError: If no schedule fits into memory, or none was found in time.
        """
        found = self.search.run(self.roots)
        bound = found.open_bound
        leaves, bounds = self.search.split_shares(found.leaves, found.bounds, few=_FEW)
        bound = min(bound, self._prove(leaves, bounds))
        if self.incumbent.box is None:
            self._explain(np.isfinite(bound))
        if bound >= self.incumbent.seconds * (1 - _PROVEN):
            return 0.0
        return 1 - max(bound, 0.0) / self.incumbent.seconds

    def _prove(self, leaves: Boxes, bounds: np.ndarray) -> float:
        """Lets SCIP decide between what the search left; returns what is proven of it."""
        proven = np.inf
        if self.incumbent.box is not None:
            leaves = Boxes.join([self.incumbent.box, leaves])
            bounds = np.concatenate([[0.0], bounds])
        while len(leaves):
            if time.monotonic() > self.deadline and self.incumbent.box is not None:
                return min(proven, float(bounds[bounds > 0].min(initial=np.inf)))
            now = leaves[:_SLOTS]
            solved = self._solve(now)
            if solved is not None:
                proven = min(proven, solved.bound)
                self.search.evaluate(now[solved.slot : solved.slot + 1], solved.shares[None])
            leaves, bounds = leaves[_SLOTS:], bounds[_SLOTS:]
            good = bounds < self.incumbent.seconds * (1 - CLOSE)
            leaves, bounds = leaves[good], bounds[good]
        return min(proven, self.incumbent.seconds)

    def _solve(self, boxes: Boxes) -> Solved | None:
        left = self.deadline - time.monotonic()
        seconds = self.incumbent.seconds
        paths = self.table.paths(boxes, num_terms=self.instance.num_layers)
        return solve(
            Slots(paths=paths, boxes=boxes),
            batch_size=self.instance.batch_size,
            scale=seconds if 0 < seconds < np.inf else self.search.scale,
            time_limit_seconds=left if np.isfinite(left) else None,
        )

    def _explain(self, ran_out_of_time: bool) -> None:
        """Says why there is no schedule: which tier's memory is short, and by how much at best."""
        if ran_out_of_time or self.objective == "memory":
            raise PlanningError(
                f"the time limit ended the search before the policy {self.policy!r} had a "
                "schedule; allow more time"
            )
        closest = Solver(
            self.instance,
            policy=self.policy,
            privacy=self.privacy,
            objective="memory",
            prefetch=self.table.prefetch,
        )
        closest.run()
        best = closest.incumbent
        assert best.box is not None
        assert best.shares is not None
        excess = closest.table.paths(best.box).at(best.shares[None])[0]
        limited = np.flatnonzero(closest.table.has_limit)
        tier = limited[excess.argmax()]
        limit = self.instance.memory[tier]
        raise PlanningError(
            f"no schedule of the policy {self.policy!r} fits into memory: in the one that comes "
            f"closest tier {self.instance.names[tier]!r} needs {(1 + excess.max()) * limit:,.0f} "
            f"bytes and may use {limit:,.0f}, {excess.max() * limit:,.0f} too few; raise its "
            f"`memory_bytes` or take a mini-batch smaller than {self.instance.batch_size}"
        )
