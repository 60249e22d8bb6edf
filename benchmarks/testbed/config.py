"""What a testbed looks like, read from a TOML file; `default.toml` shows every key."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEFAULT = Path(__file__).with_name("default.toml")
LONGEST_NAME = 12
"""A network interface `to-NAME` may have 15 characters."""
LEAST_QUOTA_SECONDS = 1e-3
"""The kernel accepts no smaller quota within a period."""


@dataclass(frozen=True, kw_only=True)
class TierConfig:
    """One host."""

    name: str
    cores: float
    """CPU time per second of wall time, once a process has joined its quota."""
    threads: int = 1
    """What `OMP_NUM_THREADS` and the like are set to."""
    memory_bytes: int | None = None
    """Limit from the start of the process on; `None` for none."""


@dataclass(frozen=True, kw_only=True)
class LinkConfig:
    """One connection, alike in both directions."""

    between: tuple[str, str]
    bandwidth_bytes_per_second: float
    latency_seconds: float = 0.0
    """One way, added to what the machine itself needs."""
    queue_seconds: float = 0.1
    """How long a packet may wait for its turn before it is dropped."""

    @property
    def name(self) -> str:
        """`"device-edge"` for a link between device and edge."""
        return "-".join(self.between)


@dataclass(frozen=True, kw_only=True)
class TestbedConfig:
    """Hosts, lowest first, and the links between them."""

    __test__ = False  # pytest takes it for tests otherwise

    tiers: tuple[TierConfig, ...]
    links: tuple[LinkConfig, ...]
    quota_period_seconds: float = 0.01
    """Short, so that a slow tier is slow evenly and does not run in bursts."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(tier.name for tier in self.tiers)

    def link(self, name: str) -> LinkConfig:
        """Returns the link of that name, in either order of its ends.

        Raises:
            ValueError: If there is none.
        """
        for link in self.links:
            if set(link.between) == set(name.split("-")):
                return link
        raise ValueError(
            f"there is no link {name!r}; the links are {[link.name for link in self.links]}"
        )

    def neighbours(self, tier: str) -> tuple[str, ...]:
        """Returns the tiers at the other ends of a tier's links."""
        return tuple(
            other for link in self.links if tier in link.between for other in link.between
            if other != tier
        )  # fmt: skip

    def next_hops(self, tier: str) -> dict[str, str]:
        """Returns for every other tier the neighbour through which `tier` reaches it."""
        hops = {other: other for other in self.neighbours(tier)}
        frontier = list(hops)
        for reached in frontier:
            for other in self.neighbours(reached):
                if other != tier and other not in hops:
                    hops[other] = hops[reached]
                    frontier.append(other)
        return hops


def read_config(path: str | Path = DEFAULT) -> TestbedConfig:
    """Reads a testbed's description.

    Raises:
        ValueError: If the file is not TOML, lacks something or holds something that makes no sense.
        OSError: If it cannot be read.
    """
    try:
        return parse_config(tomllib.loads(Path(path).read_text()))
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError are such too
        raise ValueError(f"{path}: {error}") from error


def parse_config(data: Mapping[str, Any]) -> TestbedConfig:
    """Checks what a TOML file says.

    Raises:
        ValueError: If something is missing, unknown or impossible.
    """
    _check_keys("the file", data, required=("tiers", "links"), optional=("quota_period_ms",))
    for name in ("tiers", "links"):
        if not isinstance(data[name], list) or not all(isinstance(x, dict) for x in data[name]):
            raise ValueError(f"`{name}` must be tables, each headed [[{name}]]")
    period = _number("quota_period_ms", data.get("quota_period_ms", 10), least=1, most=1000)
    tiers = tuple(_tier(tier) for tier in data["tiers"])
    links = tuple(_link(link) for link in data["links"])
    config = TestbedConfig(tiers=tiers, links=links, quota_period_seconds=1e-3 * period)
    _check_graph(config)
    return config


def _tier(data: Mapping[str, Any]) -> TierConfig:
    _check_keys("a tier", data, required=("name", "cores"), optional=("threads", "memory_mib"))
    name = data["name"]
    if not isinstance(name, str) or not (name.isalnum() and name.isascii()):
        raise ValueError(f"the tier name {name!r} must be letters and digits")
    if len(name) > LONGEST_NAME:
        raise ValueError(
            f"the tier name {name!r} has {len(name)} characters; at most {LONGEST_NAME} fit into "
            "the name of a network interface"
        )
    threads = data.get("threads", 1)
    if not isinstance(threads, int) or isinstance(threads, bool) or threads < 1:
        raise ValueError(f"`threads` of {name!r} must be a whole number above 0, got {threads!r}")
    memory = data.get("memory_mib")
    if memory is not None:
        memory = int(2**20 * _number(f"memory_mib of {name!r}", memory, least=1))
    cores = _number(f"cores of {name!r}", data["cores"], least=0.01, most=1024)
    return TierConfig(name=name, cores=cores, threads=threads, memory_bytes=memory)


def _link(data: Mapping[str, Any]) -> LinkConfig:
    optional = ("latency_ms", "queue_ms")
    _check_keys("a link", data, required=("between", "bandwidth_mbit"), optional=optional)
    between = data["between"]
    if (
        not isinstance(between, list)
        or len(between) != 2
        or not all(isinstance(end, str) for end in between)
        or between[0] == between[1]
    ):
        raise ValueError(f"`between` must name two different tiers, got {between!r}")
    name = "-".join(between)
    bandwidth = _number(f"bandwidth_mbit of {name}", data["bandwidth_mbit"], least=0.01, most=1e5)
    latency = _number(f"latency_ms of {name}", data.get("latency_ms", 0), least=0, most=10_000)
    queue = _number(f"queue_ms of {name}", data.get("queue_ms", 100), least=1, most=10_000)
    return LinkConfig(
        between=(between[0], between[1]),
        bandwidth_bytes_per_second=1e6 / 8 * bandwidth,
        latency_seconds=1e-3 * latency,
        queue_seconds=1e-3 * queue,
    )


def _check_graph(config: TestbedConfig) -> None:
    names = config.names
    if len(names) < 2 or len(set(names)) != len(names):
        raise ValueError(f"two or more tiers with different names are needed, got {list(names)}")
    seen: set[frozenset[str]] = set()
    for link in config.links:
        for end in link.between:
            if end not in names:
                raise ValueError(
                    f"the link {link.name} names the tier {end!r}; the tiers are {list(names)}"
                )
        if names.index(link.between[0]) > names.index(link.between[1]):
            raise ValueError(
                f"the link {link.name} must name the lower tier first; from the lowest on they are "
                f"{list(names)}"
            )
        if frozenset(link.between) in seen:
            raise ValueError(f"the link {link.name} is described twice")
        seen.add(frozenset(link.between))
    reached = {names[0], *config.next_hops(names[0])}
    lost = [name for name in names if name not in reached]
    if lost:
        raise ValueError(f"no chain of links joins {names[0]!r} to {lost[0]!r}; add a link")


def _check_keys(
    what: str, data: Mapping[str, Any], *, required: tuple[str, ...], optional: tuple[str, ...]
) -> None:
    known = (*required, *optional)
    for key in data:
        if key not in known:
            raise ValueError(f"{what} has the key {key!r}, which means nothing; keys are {known}")
    for key in required:
        if key not in data:
            raise ValueError(f"{what} lacks the key {key!r}: {dict(data)!r}")


def _number(name: str, value: Any, *, least: float, most: float = math.inf) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not math.isfinite(value) or not least <= value <= most:
        limit = f" and at most {most:g}" if math.isfinite(most) else ""
        raise ValueError(f"`{name}` must be a number of at least {least:g}{limit}, got {value!r}")
    return float(value)
