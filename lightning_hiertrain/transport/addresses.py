"""Where a tier listens, whom it dials, and whether the topology lets it do so safely."""

from __future__ import annotations

import ipaddress
import socket

from lightning_hiertrain.topology import Link, Topology, split_address

_EVERYWHERE = ("*", "0.0.0.0", "::")


def links_of(topology: Topology, tier: str) -> tuple[tuple[Link, ...], tuple[Link, ...]]:
    """Returns the links that a tier dials and those on which it is dialled."""
    dialled = tuple(link for link in topology.links if link.between[0] == tier)
    listened = tuple(link for link in topology.links if link.between[1] == tier)
    return dialled, listened


def dial_address(topology: Topology, link: Link) -> tuple[str, int]:
    """Returns the host and port that the lower tier of a link dials.

    Raises:
        ValueError: If neither the link nor the higher tier has an address.
    """
    address = link.address or topology.tier(link.between[1]).address
    if address is None:
        raise ValueError(
            f"tier {link.between[0]!r} dials tier {link.between[1]!r}, which has no address; give "
            f"that tier, or the link {link.name!r}, an `address` 'host:port' in the topology"
        )
    return split_address(address)


def listen_addresses(topology: Topology, tier: str) -> tuple[tuple[str, int], ...]:
    """Returns the hosts and ports on which a tier listens; some may be a router's before it.

    Raises:
        ValueError: If somebody dials it and there is no address.
    """
    _, listened = links_of(topology, tier)
    if not listened:
        return ()
    own = topology.tier(tier).address
    candidates = [split_address(own)] if own is not None else []
    for link in listened:
        found = dial_address(topology, link)
        # Another port is one that a router or a tunnel maps to this tier's own.
        if found not in candidates and (own is None or found[1] == candidates[0][1]):
            candidates.append(found)
    return tuple(candidates)


def is_loopback(host: str) -> bool:
    """Tells whether only this machine can reach a host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_secure(topology: Topology, tier: str, *, has_private_key: bool) -> bool:
    """Tells whether a tier has keys; without them it may speak to this machine alone.

    Raises:
        ValueError: If keys are needed and missing.
    """
    neighbours = topology.neighbours(tier)
    missing = [name for name in (tier, *neighbours) if topology.tier(name).public_key is None]
    if has_private_key and not missing:
        return True
    dialled, _ = links_of(topology, tier)
    hosts = [host for host, _ in listen_addresses(topology, tier)]
    hosts += [dial_address(topology, link)[0] for link in dialled]
    outside = next((host for host in hosts if not is_loopback(host)), None)
    remedy = (
        "make keys for all tiers with `hiertrain keys`, and give every tier its own private key"
    )
    if has_private_key or len(missing) <= len(neighbours):
        what = (
            f"the topology lacks the public keys of {missing}"
            if missing
            else "it was given no private key"
        )
        raise ValueError(f"tier {tier!r} cannot open its links: {what}; {remedy}")
    if outside is not None:
        raise ValueError(
            f"tier {tier!r} would talk to {outside!r} without keys, and anybody there could join; "
            f"{remedy}"
        )
    return False


def resolve(host: str) -> str:
    """Returns the IP address of a host to listen on, `*` for all.

    Raises:
        OSError: If the name is unknown.
    """
    if host in _EVERYWHERE:
        return "*"
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
