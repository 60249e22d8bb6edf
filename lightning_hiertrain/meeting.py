"""How the tiers of a run find each other."""

from __future__ import annotations

import atexit
import hashlib
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from traceback import format_exception
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_hiertrain.errors import LinkError
from lightning_hiertrain.settings import Settings
from lightning_hiertrain.transport.collectives import Collectives
from lightning_hiertrain.transport.network import Network

TIER_VARIABLE = "HIERTRAIN_TIER"
"""Names the tier of a process where its rank does not."""

_PRECISIONS = (
    "the tiers compute in different precisions: {}; give every tier the same "
    "`Trainer(precision=...)`. For '16-mixed' Lightning takes 'bf16-mixed' where there is no GPU: "
    "pass that, or '32-true', on every tier"
)

_meetings = itertools.count()
_open: Network | None = None
"""The links of this process: of several runs in one script the latest one's."""


def open_links(settings: Settings, *, rank: int, is_one_machine: bool, main_port: int) -> Network:
    """Opens this tier's links and closes those of an earlier run of this process.

    Args:
        settings: Tiers, topology, keys and timeouts.
        rank: This process's global rank.
        is_one_machine: Whether all processes run on this machine.
        main_port: A port number that all processes of a run know and no other run on this machine
            has.

    Raises:
        MisconfigurationException: If the tiers cannot find each other.
        ValueError: If keys or addresses are missing or do not fit.
        LinkError: If an address to listen on cannot be had.
    """
    global _open
    tiers, topology, private_key = settings.tiers, settings.topology, settings.private_key
    named = os.environ.get(TIER_VARIABLE)
    if named is not None and named not in tiers:
        raise MisconfigurationException(
            f"{TIER_VARIABLE}={named!r} is not one of the tiers {tuple(tiers)}"
        )
    tier = named or tiers[rank]
    if topology is None:
        if not is_one_machine:
            raise MisconfigurationException(
                f"the {len(tiers)} tiers are on different machines and do not know each other's "
                "address: pass `HierTrainStrategy(topology='topology.json')` with addresses and "
                "the public keys that `hiertrain keys topology.json` makes"
            )
        network = Network.local(
            tier,
            tiers,
            run_id=f"{main_port}-{next(_meetings)}",
            timeout_seconds=settings.timeout_seconds,
            silence_seconds=settings.silence_seconds,
        )
    else:
        if private_key is None and settings.keys_folder is not None:
            beside = settings.keys_folder / f"{tier}.key"
            private_key = beside if beside.exists() else None
        network = Network.from_topology(
            tier,
            topology,
            private_key=private_key,
            meeting=next(_meetings),
            timeout_seconds=settings.timeout_seconds,
            silence_seconds=settings.silence_seconds,
        )
    close_links()
    network.start()
    _open = network
    return network


def close_links() -> None:
    """Closes this process's links after what was sent has arrived."""
    global _open
    network, _open = _open, None
    if network is not None:
        network.close()


# What a tier sends last must arrive although its script ends.
atexit.register(close_links)


def meet(network: Network, settings: Settings, rank: int, precision: str) -> tuple[str, ...]:
    """Waits until all tiers have answered, and makes sure that they mean the same run.

    Args:
        network: This tier's links.
        settings: What this tier was told; the others must have been told the same.
        rank: This process's global rank.
        precision: What the Trainer computes in on this tier.

    Returns:
        The tier of each rank.

    Raises:
        MisconfigurationException: If the tiers do not agree.
        LinkTimeoutError: If a tier did not answer; the message names it and its address.
    """
    try:
        network.wait_for_peers()
        told = {"rank": rank, "precision": precision, **_shared(settings)}
        return _agreed(settings.tiers, Collectives(network, settings.tiers).all_gather(told))
    except BaseException as error:
        tell(network, error)
        network.close()
        raise


def tell(network: Network, error: BaseException) -> None:
    """Tells the other tiers why this one ends."""
    if isinstance(error, LinkError) and error.peer != network.tier:
        network.abort(error.reason, culprit=error.peer)
    else:
        network.abort("".join(format_exception(error)).strip())


def _shared(settings: Settings) -> dict[str, Any]:
    """Returns what must be the same on all tiers; of long values a digest."""
    given = {"schedule": settings.schedule, "profile": settings.profile}
    names = (
        *("data_tier", "policy", "overlap", "keep_inputs_on_data_tier", "profile_steps"),
        "on_tier_lost",
    )
    return {
        **{f"`{name}`": getattr(settings, name) for name in names},
        **{
            f"the digest of `{name}`": None if data is None else _digest(data.to_dict())
            for name, data in given.items()
        },
    }


def _digest(data: Mapping[str, Any]) -> str:
    text = json.dumps(data, sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=4).hexdigest()


def _agreed(tiers: Sequence[str], answers: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    ranks = [answer["rank"] for answer in answers]
    if sorted(ranks) != list(range(len(tiers))):
        raise MisconfigurationException(
            f"the tiers {tuple(tiers)} have the ranks {ranks}; each needs a rank of its own: check "
            f"NODE_RANK and {TIER_VARIABLE} on each machine"
        )
    precisions = {tier: x["precision"] for tier, x in zip(tiers, answers, strict=True)}
    if len(set(precisions.values())) > 1:
        raise MisconfigurationException(_PRECISIONS.format(precisions))
    for name, value in answers[0].items():
        for tier, answer in zip(tiers, answers, strict=True):
            if name != "rank" and answer.get(name) != value:
                raise MisconfigurationException(
                    f"the tiers do not mean the same run: {name} is {value!r} on tier {tiers[0]!r} "
                    f"and {answer.get(name)!r} on tier {tier!r}; run the same script with the same "
                    "files on every tier"
                )
    return tuple(name for _, name in sorted(zip(ranks, tiers, strict=True)))
