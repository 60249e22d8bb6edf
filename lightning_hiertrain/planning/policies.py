"""What each policy may choose from, as boxes of schedules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from lightning_hiertrain.errors import PlanningError
from lightning_hiertrain.planning.instance import Instance
from lightning_hiertrain.planning.paths import Boxes

POLICIES = ("hiertrain", "all-device", "all-edge", "all-cloud", "jointdnn", "jalad")


@dataclass(frozen=True, kw_only=True)
class Roles:
    """One owner and its prefix workers; `empty_owner` if the owner takes no samples of its own."""

    owner: int
    workers: tuple[int, ...] = ()
    empty_owner: bool = False


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """Whether raw samples must stay on the data tier, and how many layers at least they pass there."""

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
    names = instance.names
    everyone = range(len(names))
    if policy == "hiertrain":
        return list(_all_roles(everyone))
    if policy.startswith("all-"):
        return [Roles(owner=_tier(names, policy.removeprefix("all-"), policy))]
    if policy == "jointdnn":
        device, cloud = _tier(names, "device", policy), _tier(names, "cloud", policy)
        ends = (device, cloud) if device != cloud else (device,)
        alone = [Roles(owner=tier) for tier in ends]
        pairs = [(device, cloud), (cloud, device)] if device != cloud else []
        return alone + [Roles(owner=o, workers=(k,), empty_owner=True) for o, k in pairs]
    if policy == "jalad":
        edge, cloud = _tier(names, "edge", policy), _tier(names, "cloud", policy)
        return [Roles(owner=cloud, workers=(edge,), empty_owner=True)]
    raise ValueError(f"there is no policy {policy!r}; the policies are {list(POLICIES)}")


def _tier(names: tuple[str, ...], name: str, policy: str) -> int:
    if name not in names:
        raise ValueError(f"the policy {policy!r} needs a tier {name!r}; the tiers are {list(names)}")
    return names.index(name)


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
    """Returns one box for each of these roles and numbers of chunks, with every cut that is allowed.

    Raises:
        PlanningError: If the policy cannot keep raw samples on the data tier.
        ValueError: If the least depth is more than there are layers.
    """
    if not 1 <= privacy.least_depth <= instance.num_layers:
        raise ValueError(
            f"`least_depth` is {privacy.least_depth}, the model has layers 1 to {instance.num_layers}; choose one of these"
        )
    allowed = [role for role in roles if privacy.allows(role, instance.data)]
    if not allowed:
        raise PlanningError(
            f"the policy {policy!r} sends raw samples away from the data tier {instance.names[instance.data]!r}; "
            "choose another policy or leave `keep_inputs_on_data_tier` off"
        )
    rows = [(role, chunks) for role in allowed for chunks in (chunk_counts if role.workers else (1,))]
    active = np.zeros((len(rows), instance.num_tiers), bool)
    for row, (role, _) in enumerate(rows):
        active[row, list(role.workers)] = True
    least = np.where(np.arange(instance.num_tiers) == instance.data, privacy.least_depth, 1)
    return Boxes(
        owner=np.array([role.owner for role, _ in rows]),
        active=active,
        empty_owner=np.array([role.empty_owner for role, _ in rows]),
        chunks=np.array([chunks for _, chunks in rows]),
        low=np.where(active, least if privacy.keep_inputs else 1, 0),
        high=np.where(active, instance.num_layers, 0),
        codec=np.where(active, codec_set, 0),
    )
