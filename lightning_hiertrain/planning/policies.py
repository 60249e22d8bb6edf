"""What each policy may choose from, as boxes of schedules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from lightning_hiertrain.errors import PlanningError
from lightning_hiertrain.planning.boxes import Boxes
from lightning_hiertrain.planning.instance import Instance

POLICIES = ("hiertrain", "all-device", "all-edge", "all-cloud", "jointdnn", "jalad")


@dataclass(frozen=True, kw_only=True)
class Roles:
    """One owner and its prefix workers; `empty_owner` if the owner takes no samples of its own."""

    owner: int
    workers: tuple[int, ...] = ()
    empty_owner: bool = False


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """Whether raw samples must stay on the data tier, and how many layers they pass there."""

    keep_inputs: bool = False
    least_depth: int = 1

    def allows(self, roles: Roles, data: int) -> bool:
        """Whether no tier but the data tier sees raw samples."""
        readers = {*roles.workers, *(() if roles.empty_owner else (roles.owner,))}
        return not self.keep_inputs or readers <= {data}


def policy_roles(policy: str, instance: Instance) -> list[Roles]:
    """Returns the roles that a policy may give.

    Raises:
        ValueError: If there is no such policy, or the policy needs a tier that is not there.
    """
    if policy == "hiertrain":
        return list(_all_roles(range(instance.num_tiers)))
    if policy.startswith("all-"):
        return [Roles(owner=_tier(instance, policy.removeprefix("all-"), policy))]
    if policy == "jointdnn":
        device, cloud = _tier(instance, "device", policy), _tier(instance, "cloud", policy)
        ends = (device, cloud) if device != cloud else (device,)
        alone = [Roles(owner=tier) for tier in ends]
        pairs = [(device, cloud), (cloud, device)] if device != cloud else []
        return alone + [Roles(owner=o, workers=(k,), empty_owner=True) for o, k in pairs]
    if policy == "jalad":
        edge, cloud = _tier(instance, "edge", policy), _tier(instance, "cloud", policy)
        return [Roles(owner=cloud, workers=(edge,), empty_owner=True)]
    raise ValueError(f"there is no policy {policy!r}; the policies are {list(POLICIES)}")


def _tier(instance: Instance, name: str, policy: str) -> int:
    """Finds the tier that a policy speaks of: by name, else by its place in the hierarchy."""
    names = instance.names
    places = {"device": instance.data, "cloud": len(names) - 1}
    if len(names) > 2:
        places["edge"] = len(names) - 2
    if name in names:
        return names.index(name)
    if name in places:
        return places[name]
    raise ValueError(f"the policy {policy!r} needs a tier {name!r}; the tiers are {list(names)}")


def _all_roles(tiers: Iterable[int]) -> Iterator[Roles]:
    tiers = tuple(tiers)
    for owner in tiers:
        others = [tier for tier in tiers if tier != owner]
        for count in range(len(others) + 1):
            for workers in combinations(others, count):
                yield Roles(owner=owner, workers=workers)
                if workers:
                    yield Roles(owner=owner, workers=workers, empty_owner=True)


def make_boxes(
    roles: Iterable[Roles],
    instance: Instance,
    *,
    policy: str,
    privacy: Privacy,
    chunk_counts: tuple[int, ...],
    codec_set: int,
) -> Boxes:
    """Returns one box for each of these roles and numbers of chunks, with every allowed cut.

    Raises:
        PlanningError: If the policy cannot keep raw samples on the data tier.
        ValueError: If the least depth is more than there are layers.
    """
    if not 1 <= privacy.least_depth <= instance.num_layers:
        raise ValueError(
            f"`least_depth` is {privacy.least_depth}, the model has layers 1 to "
            f"{instance.num_layers}; choose one of these"
        )
    allowed = [role for role in roles if privacy.allows(role, instance.data)]
    if not allowed:
        raise PlanningError(
            f"the policy {policy!r} sends raw samples away from the data tier "
            f"{instance.names[instance.data]!r}; choose another policy or leave "
            "`keep_inputs_on_data_tier` off"
        )
    rows = [
        (role, chunks) for role in allowed for chunks in (chunk_counts if role.workers else (1,))
    ]
    active = np.zeros((len(rows), instance.num_tiers), bool)
    for row, (role, _) in enumerate(rows):
        active[row, list(role.workers)] = True
    owner, empty = (
        np.array([getattr(role, n) for role, _ in rows]) for n in ("owner", "empty_owner")
    )
    chunks = np.array([chunks for _, chunks in rows])
    least = np.where(active, np.maximum(chunks, instance.least_samples)[:, None], 0)
    least[np.arange(len(rows)), owner] = np.where(empty, 0, instance.least_samples)
    tiers = np.arange(instance.num_tiers)
    depth = np.where(tiers == instance.data, privacy.least_depth, 1) if privacy.keep_inputs else 1
    boxes = Boxes(
        owner=owner,
        active=active,
        empty_owner=empty,
        chunks=chunks,
        least=least,
        most=np.where(least > 0, instance.batch_size, 0),
        low=np.where(active, depth, 0),
        high=np.where(active, instance.num_layers, 0),
        codec=np.where(active, codec_set, 0),
    )
    return boxes[least.sum(axis=1) <= instance.batch_size]
