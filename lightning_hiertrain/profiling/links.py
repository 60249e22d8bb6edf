"""Measures what each link carries: latency from small messages, bandwidth from bulk transfers.

All tiers call `measure_links` at once. One link is measured after the other, so that measurements
do not share a cable; the tiers that are not at its ends wait.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from statistics import median
from time import perf_counter

import torch

from lightning_hiertrain.errors import PeerLostError
from lightning_hiertrain.profiles import LinkProfile
from lightning_hiertrain.topology import Link
from lightning_hiertrain.transport import Collectives, Network

log = logging.getLogger(__name__)

_MIN_ROUND_TRIPS = 20
_MAX_ROUND_TRIPS = 200
_WARM_UP_ROUND_TRIPS = 3
_FIRST_BYTES = 8 << 10
_MAX_BYTES = 64 << 20
_GROWTH = 4
"""How many times larger than the one before a transfer may be."""
_STABLE = 0.05
"""Relative distance of the last rates within which they count as one."""
_MIN_TRANSFERS = 3
_TRIES = 2


def measure_links(
    network: Network,
    *,
    seconds_per_link: float = 2.0,
    collector: str | None = None,
    again: Mapping[str, float] | None = None,
) -> tuple[LinkProfile, ...]:
    """Measures every link of the topology; all tiers call it together and get the same result.

    Args:
        network: The links, with all tiers present and nothing else to carry.
        seconds_per_link: About how long to measure a link. A tenth goes to the latency, of which
            there are 20 round trips at least, the rest to transfers in both directions, twice.
        collector: A tier that the run cannot spare; the first one by default.
        again: Only links that are named here, whose latency is known already; it is not measured.

    Returns:
        For each link the bandwidth of its slower direction, the better of two tries since whatever
        disturbs one makes it slower, and half the median round trip; none
        for links of tiers that have died and can be spared.

    Raises:
        ValueError: If `seconds_per_link` is not above 0.
        PeerLostError: If a tier is lost meanwhile.
        LinkTimeoutError: If it takes longer than the network's timeout.
    """
    if not seconds_per_link > 0:
        raise ValueError(f"`seconds_per_link` must be above 0, got {seconds_per_link!r}")
    names = network.topology.names
    collectives = Collectives(network, names, name="measure links", collector=collector)
    patience = network.timeout_seconds + 5 * seconds_per_link
    profiles = []
    for link in network.topology.links:
        if again is not None and link.name not in again:
            continue
        latency = None if again is None else again[link.name]
        collectives.barrier(f"before {link.name}", timeout_seconds=patience)
        low, _ = link.between
        profile = _shared(network, collectives, link, seconds_per_link, patience, latency)
        if profile is None:
            continue
        profiles.append(profile)
        if network.tier == low:
            log.info(
                "link %s: %.3g Mbit/s, %.3g ms",
                link.name,
                profile.bandwidth_bytes_per_second * 8e-6,
                profile.latency_seconds * 1e3,
            )
    return tuple(profiles)


def _shared(
    network: Network,
    collectives: Collectives,
    link: Link,
    seconds: float,
    patience: float,
    latency: float | None,
) -> LinkProfile | None:
    """Measures a link and returns the result on all tiers, `None` if one end died meanwhile."""
    low, _ = link.between
    others = [tier for tier in link.between if tier != network.tier]
    profile: LinkProfile | None = None
    if network.tier in link.between:
        try:
            profile = _measure(network, link, seconds, latency)
        except PeerLostError:
            if not any(network.membership.spares(tier) for tier in others):
                raise
    try:
        profile = collectives.broadcast(profile, low, timeout_seconds=patience)
    except PeerLostError:
        if not network.membership.spares(low):
            raise
        return None
    return profile


def _measure(network: Network, link: Link, seconds: float, latency: float | None) -> LinkProfile:
    """Measures a link from one of its ends."""
    low, high = link.between
    upwards, downwards = 0.0, 0.0
    known = None if latency is None else 2 * latency
    if network.tier == low:
        round_trip_seconds = _ping(network, high, 0.1 * seconds) if known is None else known
        for _ in range(_TRIES):
            upwards = max(upwards, _send_bulk(network, high, 0.2 * seconds, round_trip_seconds))
            downwards = max(downwards, _receive_bulk(network, high))
    else:
        round_trip_seconds = _echo(network, low) if known is None else known
        for _ in range(_TRIES):
            upwards = max(upwards, _receive_bulk(network, low))
            downwards = max(downwards, _send_bulk(network, low, 0.2 * seconds, round_trip_seconds))
    return LinkProfile(
        between=link.between,
        bandwidth_bytes_per_second=min(upwards, downwards),
        latency_seconds=round_trip_seconds / 2,
    )


def _ping(network: Network, peer: str, seconds: float) -> float:
    """Returns the median round trip of a small message, and tells the peer."""
    times: list[float] = []
    deadline = perf_counter() + seconds
    while len(times) < _WARM_UP_ROUND_TRIPS + _MIN_ROUND_TRIPS or (
        perf_counter() < deadline and len(times) < _MAX_ROUND_TRIPS
    ):
        begun = perf_counter()
        network.send(peer, "link ping", control=True)
        network.receive(peer, "link pong", operation="measure the latency")
        times.append(perf_counter() - begun)
    result = median(times[_WARM_UP_ROUND_TRIPS:])
    network.send(peer, "link ping", result, control=True)
    return result


def _echo(network: Network, peer: str) -> float:
    """Answers the peer's small messages and returns what it measured."""
    while True:
        result = network.receive(peer, "link ping", operation="measure the latency")
        if result is not None:
            return float(result)
        network.send(peer, "link pong", control=True)


def _send_bulk(network: Network, peer: str, seconds: float, round_trip_seconds: float) -> float:
    """Sends growing transfers until the rate is stable or the time is over; returns bytes/s.

    The first transfer is dropped: it meets the burst that shapers let pass and TCP's slow start.
    The others follow it without a pause.
    """
    rates: list[float] = []
    sent_bytes: list[int] = []
    taken: list[float] = []
    size = _FIRST_BYTES
    deadline = perf_counter() + seconds
    while True:
        block = torch.randint(0, 256, (size,), dtype=torch.uint8)
        begun = perf_counter()
        network.send(peer, "link bulk", block)
        network.flush(peer=peer)
        elapsed = perf_counter() - begun
        # What is acknowledged has arrived one way earlier, and the first byte took one way.
        carried = max(elapsed - round_trip_seconds, 0.1 * elapsed)
        sent_bytes.append(size)
        taken.append(carried)
        rates.append(size / carried)
        left = deadline - perf_counter()
        if len(rates) >= _MIN_TRANSFERS and (left <= 0 or _is_stable(rates, carried, seconds)):
            break
        # The rest of the time in two transfers, if they are not much larger than this one.
        fitting = int(max(left, 0.0) / 2 * rates[-1])
        size = max(_FIRST_BYTES, min(fitting, _GROWTH * size, _MAX_BYTES))
    network.send(peer, "link bulk", None)
    # Weighted by duration: the longest transfers say most.
    rate = sum(sent_bytes[1:]) / sum(taken[1:])
    network.send(peer, "link rate", rate, control=True)
    return rate


def _is_stable(rates: list[float], last_seconds: float, seconds: float) -> bool:
    """Tells whether long transfers agree."""
    recent = rates[-_MIN_TRANSFERS:]
    return last_seconds > 0.1 * seconds and max(recent) <= (1 + _STABLE) * min(recent)


def _receive_bulk(network: Network, peer: str) -> float:
    """Takes the peer's transfers and returns the rate that it measured."""
    while network.receive(peer, "link bulk", operation="measure the bandwidth") is not None:
        pass
    return float(network.receive(peer, "link rate", operation="measure the bandwidth"))
