"""How the tiers of a run find each other."""

from __future__ import annotations

import atexit
import itertools
import os

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_hiertrain.settings import Settings
from lightning_hiertrain.transport.collectives import Collectives
from lightning_hiertrain.transport.network import Network

TIER_VARIABLE = "HIERTRAIN_TIER"
"""Names the tier of a process where its rank does not."""

_meetings = itertools.count()


def connect(
    settings: Settings, *, rank: int, is_one_machine: bool, main_port: int
) -> tuple[Network, tuple[str, ...]]:
    """Opens this tier's links and waits until all tiers have answered.

    Args:
        settings: Tiers, topology, keys and timeouts.
        rank: This process's global rank.
        is_one_machine: Whether all processes run on this machine.
        main_port: A port number that all processes of a run know and no other run on this machine
            has.

    Returns:
        The network and the tier of each rank.

    Raises:
        MisconfigurationException: If the tiers cannot find each other, or do not agree on who is
            who.
        LinkTimeoutError: If a tier did not answer.
    """
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
                "address: pass "
                "`HierTrainStrategy(topology='topology.json')` with addresses and the public keys "
                "that "
                "`hiertrain keys topology.json` makes"
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
            timeout_seconds=settings.timeout_seconds,
            silence_seconds=settings.silence_seconds,
        )
    network.start()
    try:
        network.wait_for_peers(settings.timeout_seconds)
        answers = Collectives(network, tiers).all_gather((rank,))
    except BaseException:
        network.close()
        raise
    # The links outlast a stage; at the end of the process what is still queued must arrive.
    atexit.register(network.close)
    ranks = [answer[0] for answer in answers]
    if sorted(ranks) != list(range(len(tiers))):
        raise MisconfigurationException(
            f"the tiers {tuple(tiers)} have the ranks {ranks}; each needs a rank of its own: check "
            "NODE_RANK and "
            f"{TIER_VARIABLE} on each machine"
        )
    by_rank = sorted(zip(ranks, tiers, strict=True))
    return network, tuple(name for _, name in by_rank)
