"""Three hosts on one machine: network namespaces for device, edge and cloud.

    device --- 10.77.1.0/24 --- edge --- 10.77.2.0/24 --- cloud

There is no route between device and cloud, and nothing else is reachable from inside. Needs root
and `ip` of iproute2; `namespaces_available` tells why they cannot be made.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from lightning_hiertrain.topology import Link, Tier, Topology
from lightning_hiertrain.transport.keys import make_keys

TIERS = ("device", "edge", "cloud")
ADDRESSES = {
    ("device", "edge"): ("10.77.1.1", "10.77.1.2"),
    ("edge", "cloud"): ("10.77.2.1", "10.77.2.2"),
}
ETC = Path("/etc/netns")
COMMAND_SECONDS = 20.0


class Namespaces:
    """The three networks; made by `namespaces`.

    Args:
        names: Each tier's namespace.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = dict(names)

    def address(self, tier: str, *, seen_from: str) -> str:
        """Returns the address of a tier on its link with a neighbour."""
        for pair, addresses in ADDRESSES.items():
            if {tier, seen_from} == set(pair):
                return addresses[pair.index(tier)]
        raise ValueError(f"no link joins {tier!r} and {seen_from!r}")

    def make_topology(self, folder: Path) -> Topology:
        """Returns a topology of the three, whose private keys are then in the folder."""
        tiers = [Tier(name="device")]
        for lower, tier in (("device", "edge"), ("edge", "cloud")):
            address = f"{self.address(tier, seen_from=lower)}:5700"
            tiers.append(Tier(name=tier, address=address))
        links = tuple(Link(between=pair) for pair in ADDRESSES)
        return make_keys(Topology(tiers=tuple(tiers), links=links), folder)

    def command(self, tier: str, argv: Sequence[str]) -> list[str]:
        """Returns the command that runs another one inside a tier's network."""
        return ["ip", "netns", "exec", self.names[tier], *argv]

    def run(
        self, tier: str, argv: Sequence[str], *, timeout_seconds: float = COMMAND_SECONDS
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command inside a tier's network and returns how it ended."""
        return subprocess.run(
            self.command(tier, argv),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=timeout_seconds,
            check=False,
        )

    def set_link(self, first: str, second: str, *, up: bool) -> None:
        """Takes a link down on both sides, as a pulled cable does, or puts it back."""
        for tier, other in ((first, second), (second, first)):
            state = "up" if up else "down"
            _ip("-n", self.names[tier], "link", "set", f"to-{other}", state)

    def set_silent(self, first: str, second: str, *, silent: bool) -> None:
        """Lets the kernel drop all packets on a link, of which nobody is told, or no more.

        A limit of its rate is gone afterwards.
        """
        bucket = ["root", "tbf", "rate", "8bit", "burst", "1", "limit", "1"]
        for tier, other in ((first, second), (second, first)):
            argv = ["tc", "-n", self.names[tier], "qdisc", "replace" if silent else "delete"]
            _run_or_raise([*argv, "dev", f"to-{other}", *(bucket if silent else ["root"])])

    def limit_rate(self, first: str, second: str, *, bytes_per_second: float) -> None:
        """Limits a link in both directions, by a token bucket in the kernel."""
        bits = int(8 * bytes_per_second)
        for tier, other in ((first, second), (second, first)):
            argv = ["tc", "qdisc", "replace", "dev", f"to-{other}", "root", "tbf"]
            argv += ["rate", f"{bits}bit", "burst", "32kb", "latency", "400ms"]
            done = self.run(tier, argv)
            if done.returncode != 0:
                raise OSError(f"`{' '.join(argv)}` failed in {tier}: {done.stderr.strip()}")


@contextmanager
def namespaces() -> Iterator[Namespaces]:
    """Makes the three networks and removes them, whatever happens in between.

    Raises:
        OSError: If one cannot be made.
    """
    names = {tier: f"hiertrain-{os.getpid()}-{tier}" for tier in TIERS}
    with ExitStack() as stack:
        for tier, name in names.items():
            _ip("netns", "add", name)
            stack.callback(_remove, name)
            _ip("-n", name, "link", "set", "lo", "up")
            _write_names(tier, name)
        for (first, second), (first_address, second_address) in ADDRESSES.items():
            # Both ends are born inside, so that the machine's own network never sees them.
            _ip(
                *("link", "add", f"to-{second}", "netns", names[first], "type", "veth"),
                *("peer", "name", f"to-{first}", "netns", names[second]),
            )
            for tier, other, address in (
                (first, second, first_address),
                (second, first, second_address),
            ):
                _ip("-n", names[tier], "address", "add", f"{address}/24", "dev", f"to-{other}")
                _ip("-n", names[tier], "link", "set", f"to-{other}", "up")
        yield Namespaces(names)


def namespaces_available() -> str | None:
    """Returns why namespaces cannot be made here, or `None` if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need `ip` (iproute2)"
    try:
        with namespaces():
            return None
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"network namespaces cannot be made here: {error}"


def _write_names(tier: str, name: str) -> None:
    """Lets names be looked up without a name server; `ip netns exec` mounts the files over /etc."""
    folder = ETC / name
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"127.0.0.1 localhost {socket.gethostname()}", "::1 localhost"]
    for pair, addresses in ADDRESSES.items():
        if tier in pair:
            lines += [f"{address} {other}" for other, address in zip(pair, addresses, strict=True)]
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    (folder / "resolv.conf").write_text("")


def _remove(name: str) -> None:
    try:
        _kill_inhabitants(name)
        _ip("netns", "delete", name)
    finally:
        shutil.rmtree(ETC / name, ignore_errors=True)


def _kill_inhabitants(name: str) -> None:
    """Ends what still runs inside: a namespace lives on, unseen, as long as a process does."""
    pids = _run(["ip", "netns", "pids", name]).stdout.split()
    for pid in pids:
        try:
            os.kill(int(pid), 9)
        except ProcessLookupError:
            continue


def _ip(*arguments: str) -> None:
    _run_or_raise(["ip", *arguments])


def _run_or_raise(argv: list[str]) -> None:
    done = _run(argv)
    if done.returncode != 0:
        raise OSError(f"`{' '.join(argv)}` failed: {done.stderr.strip()}")


def _run(argv: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=COMMAND_SECONDS,
        check=False,
    )
