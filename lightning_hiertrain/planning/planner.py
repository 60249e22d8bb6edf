"""The planner's face: from a profile to the schedule that takes the least time."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

import numpy as np

from lightning_hiertrain.errors import PlanningError
from lightning_hiertrain.planning.codecs import NONE, allowed_codecs, quantisers_within
from lightning_hiertrain.planning.costs import predict
from lightning_hiertrain.planning.instance import Instance, make_instance
from lightning_hiertrain.planning.paths import Boxes, PathTable
from lightning_hiertrain.planning.policies import POLICIES, Privacy, make_boxes, policy_roles
from lightning_hiertrain.planning.programme import Slots, Solved, solve
from lightning_hiertrain.planning.search import Found, Incumbent, Search
from lightning_hiertrain.profiles import Profile
from lightning_hiertrain.schedule import Schedule, Share
from lightning_hiertrain.topology import Topology

__all__ = ["POLICIES", "lower_bound", "plan"]

log = logging.getLogger(__name__)

_SLOTS = 16
"""Choices of roles and cuts that SCIP gets at once."""


def plan(
    profile: Profile,
    *,
    batch_size: int = 128,
    policy: str = "hiertrain",
    overlap: bool = True,
    topology: Topology | None = None,
    compression: bool | Iterable[str] = False,
    accuracy_loss_limit: float = 0.01,
    keep_inputs_on_data_tier: bool = False,
    least_depth: int = 1,
    chunk_counts: Iterable[int] = (1, 4),
    time_limit_seconds: float | None = None,
) -> Schedule:
    """Chooses roles, cuts and shares so that one training step takes the least time.

    The result is optimal for the cost model of docs/cost_model.md: what cannot be optimal is discarded by a proven
    bound, and SCIP proves the rest.

    Args:
        profile: What was measured.
        batch_size: Samples in the mini-batch.
        policy: One of `POLICIES`, or `all-` and a tier's name.
        overlap: Whether transfers overlap with computation; must be as the step is carried out.
        topology: Which links there are; the profile's by default.
        compression: Whether activations and their gradients may be packed; or the names of the codecs to choose from.
            `jalad` packs in any case.
        accuracy_loss_limit: Codecs with a greater measured loss are not used.
        keep_inputs_on_data_tier: Forbids raw samples to leave the data tier; only activations (and targets) travel.
        least_depth: With `keep_inputs_on_data_tier`: the least number of layers that samples pass before they travel.
        chunk_counts: With `overlap`: numbers of parts into which prefix workers may split their rows.
        time_limit_seconds: After this long the best schedule so far is returned, with its `optimality_gap`.

    Returns:
        The schedule, with `predicted_seconds` and `optimality_gap` set.

    Raises:
        ValueError: If an argument is impossible or does not fit the profile.
        PlanningError: If no schedule fits into memory, or the policy cannot keep raw samples on the data tier.
    """
    start = time.monotonic()
    counts = _checked_chunks(chunk_counts) if overlap else (1,)
    _check_batch(batch_size, len(profile.tiers))
    if policy == "jalad":
        codecs = (NONE, *quantisers_within(profile, accuracy_loss_limit))
        if len(codecs) == 1:
            raise PlanningError(
                f"no quantiser of the policy 'jalad' keeps to the accuracy loss limit of {accuracy_loss_limit}; raise it"
            )
    else:
        codecs = allowed_codecs(profile, compression, accuracy_loss_limit)
    instance = make_instance(profile, batch_size=batch_size, topology=topology, codecs=codecs)
    solver = _Solver(
        instance,
        policy=policy,
        privacy=Privacy(keep_inputs=keep_inputs_on_data_tier, least_depth=least_depth),
        objective="overlap" if overlap else "plain",
        chunk_counts=counts,
        deadline=np.inf if time_limit_seconds is None else start + time_limit_seconds,
    )
    incumbent, gap = solver.run()
    schedule = _schedule(instance, incumbent, solver.codec_sets, policy, gap)
    predicted = predict(profile, schedule, overlap=overlap, topology=topology).step_seconds
    if gap > 0:
        log.warning(
            "the planner's time limit of %s s ended the search: the schedule takes %.6g s a step, at most %.2g %% more "
            "than the best one",
            time_limit_seconds,
            predicted,
            100 * gap,
        )
    return _schedule(instance, incumbent, solver.codec_sets, policy, gap, predicted)


def lower_bound(
    profile: Profile,
    *,
    batch_size: int = 128,
    topology: Topology | None = None,
    compression: bool | Iterable[str] = False,
    accuracy_loss_limit: float = 0.01,
) -> float:
    """Returns the seconds below which no schedule can go: the least, over all, of the busiest tier or link's time.

    Args:
        profile: What was measured.
        batch_size: Samples in the mini-batch.
        topology: Which links there are; the profile's by default.
        compression: As for `plan`.
        accuracy_loss_limit: As for `plan`.

    Raises:
        ValueError: If an argument is impossible or does not fit the profile.
        PlanningError: If no schedule fits into memory.
    """
    _check_batch(batch_size, len(profile.tiers))
    codecs = allowed_codecs(profile, compression, accuracy_loss_limit)
    instance = make_instance(profile, batch_size=batch_size, topology=topology, codecs=codecs)
    incumbent, _ = _Solver(instance, policy="hiertrain", privacy=Privacy(), objective="busiest").run()
    return incumbent.seconds


def _check_batch(batch_size: int, num_tiers: int) -> None:
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < num_tiers:
        raise ValueError(
            f"the mini-batch has {batch_size!r} samples and there are {num_tiers} tiers; "
            "it must be a whole number with at least one sample for each tier"
        )


def _checked_chunks(chunk_counts: Iterable[int]) -> tuple[int, ...]:
    counts = tuple(sorted(set(chunk_counts)))
    if not counts or any(not isinstance(count, int) or count < 1 for count in counts):
        raise ValueError(f"`chunk_counts` must be whole numbers of at least 1, got {counts!r}")
    return counts


class _Solver:
    """One planning problem: search, then SCIP on what the search leaves."""

    def __init__(
        self,
        instance: Instance,
        *,
        policy: str,
        privacy: Privacy,
        objective: str,
        chunk_counts: tuple[int, ...] = (1,),
        deadline: float = np.inf,
    ) -> None:
        self.instance = instance
        singles = [(index,) for index in range(len(instance.codecs))]
        choice = tuple(range(1 if policy == "jalad" else 0, len(instance.codecs)))
        self.codec_sets = singles if len(choice) == 1 else [*singles, choice]
        self.table = PathTable(instance, self.codec_sets, objective)
        self.roots = make_boxes(
            policy_roles(policy, instance),
            instance,
            policy=policy,
            privacy=privacy,
            chunk_counts=chunk_counts,
            codec_set=self.codec_sets.index(choice),
        )
        self.policy, self.deadline = policy, deadline
        self.search = Search(table=self.table, codec_sets=self.codec_sets, scale=self._scale(), deadline=deadline)

    def _scale(self) -> float:
        """The step time if every tier were the data tier: a time of the right size."""
        i = self.instance
        fixed = i.forward_fixed[:, -1] + i.backward_fixed[:, -1]
        seconds = fixed + i.batch_size * (i.forward_slope[:, -1] + i.backward_slope[:, -1]) + i.loss + i.optimizer
        return float(max(seconds[i.data], 1e-9))

    def run(self) -> tuple[Incumbent, float]:
        """Returns the best schedule and its relative gap."""
        found = self.search.run(self.roots)
        incumbent = self.search.incumbent
        if incumbent.box is None and not len(found.leaves):
            self._explain(found)
        bound = self._prove(found)
        gap = 0.0 if bound >= incumbent.seconds * (1 - 1e-6) else 1 - max(bound, 0.0) / incumbent.seconds
        return incumbent, gap

    def _prove(self, found: Found) -> float:
        """Lets SCIP decide between what the search left; returns what is proven."""
        incumbent, search = self.search.incumbent, self.search
        bound = found.open_bound
        leaves, bounds = self._with_exact_bounds(found)
        if incumbent.box is not None:
            leaves = Boxes.join([incumbent.box, leaves])
            bounds = np.concatenate([[-np.inf], bounds])
        while len(leaves):
            if time.monotonic() > self.deadline and incumbent.box is not None:
                return min(bound, float(bounds[np.isfinite(bounds)].min(initial=np.inf)))
            now = leaves[:_SLOTS]
            solved = self._solve(now)
            bound = min(bound, solved.bound)
            chosen = now[solved.slot : solved.slot + 1]
            search.evaluate(chosen, solved.shares[None])
            leaves, bounds = leaves[_SLOTS:], bounds[_SLOTS:]
            good = bounds < incumbent.seconds * (1 - 1e-9)
            leaves, bounds = leaves[good], bounds[good]
        return min(bound, incumbent.seconds)

    def _with_exact_bounds(self, found: Found) -> tuple[Boxes, np.ndarray]:
        """Bounds the leaves again with every path, and rounds the best of them."""
        leaves, bounds = found.leaves, found.bounds
        if len(leaves):
            leaves, bounds, weight = self.search.bounded(leaves, bounds, exact=True)
            self.search.try_some(leaves, bounds, weight)
            order = np.argsort(bounds, kind="stable")
            order = order[bounds[order] < self.search.incumbent.seconds * (1 - 1e-9)]
            leaves, bounds = leaves[order], bounds[order]
        return leaves, bounds

    def _solve(self, boxes: Boxes) -> Solved:
        left = self.deadline - time.monotonic()
        seconds = self.search.incumbent.seconds
        return solve(
            Slots(
                paths=self.table.paths(boxes, num_terms=self.instance.num_layers),
                least=boxes.least_shares,
                live=boxes.taking_part,
            ),
            batch_size=self.instance.batch_size,
            scale=seconds if 0 < seconds < np.inf else self.search.scale,
            time_limit_seconds=left if np.isfinite(left) else None,
        )

    def _explain(self, found: Found) -> None:
        """Says why there is no schedule."""
        if np.isfinite(found.open_bound):
            raise PlanningError(
                f"the time limit ended the search before the policy {self.policy!r} had a schedule; allow more time"
            )
        raise PlanningError(f"no schedule of the policy {self.policy!r} fits into memory")


def _schedule(
    instance: Instance,
    incumbent: Incumbent,
    codec_sets: list[tuple[int, ...]],
    policy: str,
    gap: float,
    predicted: float | None = None,
) -> Schedule:
    box, shares = incumbent.box, incumbent.shares
    assert box is not None
    assert shares is not None
    owner = int(box.owner[0])
    depth = [instance.num_layers if t == owner else int(box.low[0, t]) for t in range(instance.num_tiers)]
    codecs = {
        instance.names[t]: instance.codecs[codec_sets[int(box.codec[0, t])][0]]
        for t in np.flatnonzero(box.active[0])
    }
    return Schedule(
        owner=instance.names[owner],
        shares={
            name: Share(num_layers=depth[t], num_samples=int(shares[t])) for t, name in enumerate(instance.names)
        },
        policy=policy,
        predicted_seconds=predicted,
        codecs={tier: codec for tier, codec in codecs.items() if codec != NONE},
        num_chunks=int(box.chunks[0]),
        optimality_gap=gap,
    )
