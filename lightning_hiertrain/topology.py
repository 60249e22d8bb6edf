"""Who takes part and who can reach whom: tiers, the links between them, addresses and public keys.

Pure data, read by every stage. A topology file is what the machines of a run share; private keys
are never part of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

FORMAT = 1
KEY_CHARACTERS = 40
"""Length of a CURVE public key in Z85, ZeroMQ's printable form."""


@dataclass(frozen=True, kw_only=True)
class Tier:
    """One machine of the hierarchy."""

    name: str
    """For example `"device"`, `"edge"` or `"cloud"`."""
    address: str | None = None
    """`host:port` at which the tier listens for those below it; `None` if nobody dials it."""
    public_key: str | None = None
    """CURVE public key, 40 printable characters; made by `hiertrain keys`."""

    def __post_init__(self) -> None:
        if not self.name or any(c in self.name for c in " \t\n/-,=") or not self.name.isprintable():
            raise ValueError(
                f"the tier name {self.name!r} must be a word without spaces, '/', '-', ',' or '='"
            )
        if self.address is not None:
            split_address(self.address)
        if self.public_key is not None and len(self.public_key) != KEY_CHARACTERS:
            raise ValueError(
                f"the public key of tier {self.name!r} has {len(self.public_key)} characters, a "
                "CURVE key has "
                f"{KEY_CHARACTERS}; make one with `hiertrain keys`"
            )


@dataclass(frozen=True, kw_only=True)
class Link:
    """A connection between two tiers that reach each other directly; the first dials the second."""

    between: tuple[str, str]
    """Names of the lower tier, which dials, and of the higher one, which listens."""
    address: str | None = None
    """`host:port` to dial over this link, if it differs from the higher tier's own `address` (NAT,
    several networks)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "between", tuple(self.between))
        if len(self.between) != 2 or self.between[0] == self.between[1]:
            raise ValueError(f"a link joins two different tiers, got {self.between!r}")
        if self.address is not None:
            split_address(self.address)

    @property
    def name(self) -> str:
        """`"device-edge"` for a link between device and edge."""
        return "-".join(self.between)

    def other(self, tier: str) -> str:
        """Returns the name of the tier at the other end."""
        return self.between[1] if tier == self.between[0] else self.between[0]


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The tiers in order of rank, lowest first, and the links between them."""

    tiers: tuple[Tier, ...]
    links: tuple[Link, ...]
    _routes: dict[tuple[str, str], tuple[str, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "tiers", tuple(self.tiers))
        object.__setattr__(self, "links", tuple(self.links))
        names = [tier.name for tier in self.tiers]
        if len(names) < 1:
            raise ValueError("a topology needs at least one tier")
        if len(set(names)) != len(names):
            raise ValueError(f"tier names must differ, got {names}")
        seen: set[frozenset[str]] = set()
        for link in self.links:
            for name in link.between:
                if name not in names:
                    raise ValueError(
                        f"link {link.name!r} names the tier {name!r}; the tiers are {names}"
                    )
            if names.index(link.between[0]) > names.index(link.between[1]):
                raise ValueError(
                    f"link {link.name!r} must name the lower tier first; the order of the tiers is "
                    f"{names}"
                )
            if frozenset(link.between) in seen:
                raise ValueError(f"link {link.name!r} is listed twice")
            seen.add(frozenset(link.between))
        for name in names[1:]:
            self.route(names[0], name)

    @classmethod
    def local(cls, names: Iterable[str]) -> Topology:
        """A full mesh without addresses or keys, as processes of one machine form it."""
        names = tuple(names)
        return cls(
            tiers=tuple(Tier(name=name) for name in names),
            links=tuple(Link(between=pair) for pair in combinations(names, 2)),
        )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(tier.name for tier in self.tiers)

    def tier(self, name: str) -> Tier:
        """Returns the tier of that name.

        Raises:
            ValueError: If there is none.
        """
        for tier in self.tiers:
            if tier.name == name:
                return tier
        raise ValueError(f"there is no tier {name!r}; the tiers are {list(self.names)}")

    def link(self, first: str, second: str) -> Link | None:
        """Returns the direct link between two tiers, in either order, or `None`."""
        return next((link for link in self.links if {first, second} == set(link.between)), None)

    def neighbours(self, name: str) -> tuple[str, ...]:
        """Returns the tiers that `name` reaches directly, in order of rank."""
        return tuple(other for other in self.names if other != name and self.link(name, other))

    def route(self, source: str, target: str) -> tuple[str, ...]:
        """Returns the tiers on the shortest way from `source` to `target`, both included.

        Raises:
            ValueError: If no chain of links joins them.
        """
        if (source, target) not in self._routes:
            self._routes[source, target] = self._shortest_route(source, target)
        return self._routes[source, target]

    def routed_links(self, source: str, target: str) -> tuple[Link, ...]:
        """Returns the links on the way from `source` to `target`."""
        hops = (self.link(a, b) for a, b in pairwise(self.route(source, target)))
        return tuple(link for link in hops if link is not None)

    def _shortest_route(self, source: str, target: str) -> tuple[str, ...]:
        frontier: list[tuple[str, ...]] = [(source,)]
        visited = {source}
        while frontier:
            path = frontier.pop(0)
            if path[-1] == target:
                return path
            for name in self.neighbours(path[-1]):
                if name not in visited:
                    visited.add(name)
                    frontier.append((*path, name))
        raise ValueError(
            f"no chain of links joins tier {source!r} to tier {target!r}; "
            f"the links are {[link.name for link in self.links]}"
        )

    def to_json(self, path: str | Path) -> None:
        """Writes the topology to a file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def from_json(cls, path: str | Path) -> Topology:
        """Reads a topology file.

        Raises:
            ValueError: If the file is not a topology of this format.
        """
        return cls.from_dict(read_json(path, kind="topology"))

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "tiers": [asdict(tier) for tier in self.tiers],
            "links": [{**asdict(link), "between": list(link.between)} for link in self.links],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Topology:
        check_format(data, FORMAT, kind="topology")
        try:
            return cls(
                tiers=tuple(Tier(**tier) for tier in data["tiers"]),
                links=tuple(Link(**link) for link in data["links"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this is not a topology: {error!r}") from error


def split_address(address: str) -> tuple[str, int]:
    """Splits `host:port`.

    Raises:
        ValueError: If there is no host or the port is not a number from 1 to 65535.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"the address {address!r} must be 'host:port' with a port from 1 to 65535")
    return host.strip("[]"), int(port)


def read_json(path: str | Path, *, kind: str) -> dict[str, Any]:
    """Reads one JSON object from a file.

    Raises:
        ValueError: If the file is not JSON or not an object.
    """
    try:
        data = json.loads(Path(path).read_text())
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not a {kind} file: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(
            f"{path} is not a {kind} file: it holds a {type(data).__name__}, not an object"
        )
    return data


def check_format(data: dict[str, Any], expected: int, *, kind: str) -> None:
    """Refuses data written in another format.

    Raises:
        ValueError: If the format number is missing or another one.
    """
    if not isinstance(data, dict) or data.get("format") != expected:
        found = data.get("format") if isinstance(data, dict) else None
        raise ValueError(
            f"this {kind} has format {found!r}, this version reads format {expected}; "
            f"make the {kind} again with the installed version"
        )
