"""The planner's face: from a profile to the schedule that takes the least time."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from lightning_hiertrain.errors import PlanningError
from lightning_hiertrain.planning.codecs import NONE, allowed_codecs, quantisers_within
from lightning_hiertrain.planning.costs import predict
from lightning_hiertrain.planning.instance import make_instance
from lightning_hiertrain.planning.policies import POLICIES, Privacy
from lightning_hiertrain.planning.solver import Solver
from lightning_hiertrain.profiles import Profile
from lightning_hiertrain.schedule import Schedule, Share
from lightning_hiertrain.topology import Topology

__all__ = ["POLICIES", "lower_bound", "plan"]

log = logging.getLogger(__name__)


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
    least_samples: int = 1,
    time_limit_seconds: float | None = None,
) -> Schedule:
    """Chooses roles, cuts and shares so that one training step takes the least time.

    The result is optimal for the cost model of docs/cost_model.md: what cannot be optimal is
    discarded by a proven bound, and SCIP proves the rest.

    Args:
        profile: What was measured.
        batch_size: Samples in the mini-batch.
        policy: One of `POLICIES`, or `all-` and a tier's name.
        overlap: Whether transfers overlap with computation; must be as the step is carried out.
        topology: Which links there are; the profile's by default.
        compression: Whether activations and their gradients may be packed; or the names of the
            codecs to choose from. `jalad` packs in any case.
        accuracy_loss_limit: Codecs with a greater measured loss are not used.
        keep_inputs_on_data_tier: Forbids raw samples to leave the data tier; only activations (and
            targets) travel.
        least_depth: With `keep_inputs_on_data_tier`: the least number of layers that samples pass
            before they travel.
        chunk_counts: With `overlap`: numbers of parts into which prefix workers may split their
            rows.
        least_samples: Samples that a tier must take if it takes any; two where layers that several
            tiers may run normalise over the batch and get one value of a channel in each sample.
        time_limit_seconds: After this long the best schedule so far is returned, with its
            `optimality_gap`.

    Returns:
        The schedule, with `predicted_seconds` and `optimality_gap` set.

    Raises:
        ValueError: If an argument is impossible or does not fit the profile.
        PlanningError: If no schedule fits into memory, or the policy cannot keep raw samples on the
            data tier.
    """
    start = time.monotonic()
    counts = _checked_chunks(chunk_counts) if overlap else (1,)
    _check_batch(batch_size, len(profile.tiers))
    if not isinstance(least_samples, int) or not 1 <= least_samples <= batch_size:
        raise ValueError(
            f"`least_samples` is {least_samples!r} and the mini-batch has {batch_size} samples; it "
            "must be a whole number from 1 to that"
        )
    _check_times(profile)
    if policy == "jalad":
        codecs = (NONE, *quantisers_within(profile, accuracy_loss_limit))
        if len(codecs) == 1:
            raise PlanningError(
                "no quantiser of the policy 'jalad' keeps to the accuracy loss limit of "
                f"{accuracy_loss_limit}; raise it"
            )
    else:
        codecs = allowed_codecs(profile, compression, accuracy_loss_limit)
    instance = make_instance(
        profile,
        batch_size=batch_size,
        topology=topology,
        codecs=codecs,
        least_samples=least_samples,
    )
    solver = Solver(
        instance,
        policy=policy,
        privacy=Privacy(keep_inputs=keep_inputs_on_data_tier, least_depth=least_depth),
        objective="overlap" if overlap else "plain",
        chunk_counts=counts,
        deadline=np.inf if time_limit_seconds is None else start + time_limit_seconds,
    )
    gap = solver.run()
    schedule = _schedule(solver, policy, gap)
    seconds = predict(profile, schedule, overlap=overlap, topology=topology).step_seconds
    if gap > 0:
        log.warning(
            "the planner's time limit of %s s ended the search: the schedule takes %.6g s a step, "
            "and it is proven only that none takes less than %.6g s (a gap of %.2g %%); "
            "allow more time",
            time_limit_seconds,
            seconds,
            seconds * (1 - gap),
            100 * gap,
        )
    return replace(schedule, predicted_seconds=seconds)


def lower_bound(
    profile: Profile,
    *,
    batch_size: int = 128,
    topology: Topology | None = None,
    compression: bool | Iterable[str] = False,
    accuracy_loss_limit: float = 0.01,
) -> float:
    """Returns the seconds below which no schedule can go.

    It is the least, over all schedules, of the time for which the busiest tier or link is busy.

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
    _check_times(profile)
    codecs = allowed_codecs(profile, compression, accuracy_loss_limit)
    instance = make_instance(profile, batch_size=batch_size, topology=topology, codecs=codecs)
    solver = Solver(instance, policy="hiertrain", privacy=Privacy(), objective="busiest")
    solver.run()
    return solver.incumbent.seconds


def _check_times(profile: Profile) -> None:
    for tier in profile.tiers:
        times = [
            time
            for layer in profile.layers
            for time in (layer.forward_seconds[tier], layer.backward_seconds[tier])
        ]
        if not any(time.fixed or time.per_sample for time in times):
            raise ValueError(
                f"tier {tier!r} takes 0 s for each of the {len(profile.layers)} layers, which "
                "nothing can; profile it again"
            )


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


def _schedule(solver: Solver, policy: str, gap: float) -> Schedule:
    instance, box, shares = solver.instance, solver.incumbent.box, solver.incumbent.shares
    assert box is not None
    assert shares is not None
    owner = int(box.owner[0])
    cuts = np.where(np.arange(instance.num_tiers) == owner, instance.num_layers, box.low[0])
    codecs = {
        instance.names[t]: instance.codecs[solver.codec_sets[int(box.codec[0, t])][0]]
        for t in np.flatnonzero(box.active[0])
    }
    return Schedule(
        owner=instance.names[owner],
        shares={
            name: Share(num_layers=int(cuts[t]), num_samples=int(shares[t]))
            for t, name in enumerate(instance.names)
        },
        policy=policy,
        codecs={tier: codec for tier, codec in codecs.items() if codec != NONE},
        num_chunks=int(box.chunks[0]),
        optimality_gap=gap,
    )
