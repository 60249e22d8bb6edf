"""A CPU quota and a memory limit for each tier, by cgroups of version 1 or 2.

A process starts under its memory limit and at full speed; it joins the quota itself, after its
imports. Version 1 keeps CPU and memory in two trees; in version 2 they are one, so that a tier's
group has two inside: `start`, and `quota`, where the CPU is limited.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.testbed.config import LEAST_QUOTA_SECONDS, TierConfig

PROCS = "cgroup.procs"
REMOVAL_SECONDS = 10.0
TESTBED_SHARES = 8
"""As how many processes a testbed counts when it and others of the machine want the CPU."""
V1_SHARES, V2_WEIGHT = 1024, 100
"""One process, in the units of `cpu.shares` and `cpu.weight`."""


@dataclass(frozen=True, kw_only=True)
class Controllers:
    """Where the machine's cgroups lie."""

    version: int
    cpu: Path
    memory: Path | None
    """`None` where memory cannot be limited."""


@dataclass(frozen=True, kw_only=True)
class Membership:
    """The files to which a tier's processes write their number."""

    at_start: tuple[Path, ...]
    after_imports: Path
    statistics: Path
    """`cpu.stat` of the group with the quota."""


def find_controllers(mounts: str | None = None) -> Controllers | None:
    """Finds the cgroup trees.

    Args:
        mounts: What `/proc/self/mounts` says, by default this machine's.

    Returns:
        Version 1 if the CPU is limited there, else version 2, or `None`.
    """
    if mounts is None:
        mounts = Path("/proc/self/mounts").read_text()
    first: dict[str, Path] = {}
    second: Path | None = None
    for line in mounts.splitlines():
        _, place, kind, options, *_ = line.split()
        if kind == "cgroup":
            for option in options.split(","):
                if option in ("cpu", "memory"):
                    first.setdefault(option, Path(place))
        elif kind == "cgroup2":
            second = second or Path(place)
    if "cpu" in first:
        return Controllers(version=1, cpu=first["cpu"], memory=first.get("memory"))
    if second is None or not (second / "cgroup.controllers").exists():
        return None
    offered = (second / "cgroup.controllers").read_text().split()
    if "cpu" not in offered:
        return None
    return Controllers(version=2, cpu=second, memory=second if "memory" in offered else None)


class Quotas:
    """The groups of one testbed; removed by `remove`.

    Args:
        controllers: Where cgroups lie.
        name: The testbed's name, of which a group is made.
        period_seconds: How long the kernel counts before it lets a tier run again.
    """

    def __init__(self, controllers: Controllers, *, name: str, period_seconds: float) -> None:
        self._controllers = controllers
        self._name = name
        self._period_seconds = period_seconds

    def add(self, tier: TierConfig) -> Membership:
        """Makes the groups of a tier.

        Raises:
            OSError: If the kernel refuses, for example because a container may not.
        """
        if tier.memory_bytes is not None and self._controllers.memory is None:
            raise OSError(
                f"tier {tier.name!r} asks for {tier.memory_bytes} bytes of memory and this machine "
                "has no memory controller; leave `memory_mib` out"
            )
        return self._add_v1(tier) if self._controllers.version == 1 else self._add_v2(tier)

    def remove(self) -> None:
        """Ends what runs in the groups and removes them.

        Raises:
            OSError: If one is still in use after 10 s.
        """
        for tree in _trees(self._controllers):
            remove_group(tree / self._name)

    def _add_v1(self, tier: TierConfig) -> Membership:
        cpu = self._controllers.cpu / self._name / tier.name
        cpu.mkdir(parents=True)
        # All groups together would count as one process against others of this machine.
        _write(cpu.parent / "cpu.shares", str(TESTBED_SHARES * V1_SHARES))
        quota, period = quota_and_period(tier.cores, self._period_seconds)
        _write(cpu / "cpu.cfs_period_us", str(period))
        _write(cpu / "cpu.cfs_quota_us", str(quota))
        at_start = []
        if tier.memory_bytes is not None:
            assert self._controllers.memory is not None
            memory = self._controllers.memory / self._name / tier.name
            memory.mkdir(parents=True)
            _write(memory / "memory.limit_in_bytes", str(tier.memory_bytes))
            at_start = [memory / PROCS]
        return Membership(
            at_start=tuple(at_start), after_imports=cpu / PROCS, statistics=cpu / "cpu.stat"
        )

    def _add_v2(self, tier: TierConfig) -> Membership:
        root = self._controllers.cpu
        wanted = "+cpu" if self._controllers.memory is None else "+cpu +memory"
        group = root / self._name / tier.name
        for name in ("start", "quota"):
            (group / name).mkdir(parents=True, exist_ok=True)
        for parent in (root, root / self._name, group):
            _write(parent / "cgroup.subtree_control", wanted)
        _write(root / self._name / "cpu.weight", str(TESTBED_SHARES * V2_WEIGHT))
        if tier.memory_bytes is not None:
            _write(group / "memory.max", str(tier.memory_bytes))
        quota, period = quota_and_period(tier.cores, self._period_seconds)
        _write(group / "quota" / "cpu.max", f"{quota} {period}")
        return Membership(
            at_start=(group / "start" / PROCS,),
            after_imports=group / "quota" / PROCS,
            statistics=group / "quota" / "cpu.stat",
        )


def quota_and_period(cores: float, period_seconds: float) -> tuple[int, int]:
    """Returns microseconds of quota and period; a small quota lengthens the period."""
    period_seconds = max(period_seconds, LEAST_QUOTA_SECONDS / cores)
    return round(1e6 * cores * period_seconds), round(1e6 * period_seconds)


def remove_group(group: Path) -> None:
    """Ends what runs in a group and those inside it, and removes them; it need not be there.

    Raises:
        OSError: If one is still in use after 10 s.
    """
    deadline = time.monotonic() + REMOVAL_SECONDS
    for each in _inside_first(group):
        while each.exists():
            for pid in (each / PROCS).read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            try:
                each.rmdir()
            except OSError:
                # A killed process leaves its group when its parent has noticed, which nothing
                # tells us of.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)


def groups_with(controllers: Controllers, prefix: str) -> list[Path]:
    """Returns the testbeds' groups in all trees."""
    return [path for tree in _trees(controllers) for path in tree.glob(f"{prefix}*")]


def _trees(controllers: Controllers) -> set[Path]:
    return {tree for tree in (controllers.cpu, controllers.memory) if tree is not None}


def _inside_first(group: Path) -> Iterator[Path]:
    if group.is_dir():
        for child in group.iterdir():
            if child.is_dir():
                yield from _inside_first(child)
        yield group


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise OSError(
            f"{text!r} cannot be written to {path}: {error.strerror}; inside a container the "
            "cgroups must be its own and writable"
        ) from error
