"""The hosts' network: a namespace a tier, two interfaces a link, a token bucket at each.

    device  to-edge ======== to-device  edge  to-cloud ======== to-edge  cloud
            10.78.1.1  ...  10.78.1.2         10.78.2.1  ...  10.78.2.2

The ends of a link are a veth pair. Where latency is asked for and the kernel has no netem they are
two TUN interfaces with a relay between them that holds each packet back. A tier reaches those that
are not its neighbours through the ones between, whose kernels forward packets.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from benchmarks.testbed.commands import SECONDS, run
from benchmarks.testbed.config import LinkConfig, TestbedConfig

ETC = Path("/etc/netns")
RUN = Path("/run/netns")
RELAY = Path(__file__).with_name("relay.py")
MIN_BURST_BYTES = 16_384
TICKS_PER_SECOND = 250
"""A bucket must hold what passes in one tick of a slow kernel clock."""


class Network:
    """The hosts' network; made on entering, removed on leaving.

    Args:
        config: Tiers and links.
        prefix: What the namespaces' names begin with.
        forced_relay: Uses the relay for latency even where the kernel has netem.
    """

    def __init__(self, config: TestbedConfig, *, prefix: str, forced_relay: bool = False) -> None:
        self.config = config
        self.names = {tier: f"{prefix}-{tier}" for tier in config.names}
        self.rates = {link.name: link.bandwidth_bytes_per_second for link in config.links}
        """Bytes per second at the moment."""
        self.has_netem = False
        self._forced_relay = forced_relay
        self._stack = ExitStack()

    def __enter__(self) -> Network:
        """Makes everything.

        Raises:
            OSError: If something cannot be made; what was made before is removed.
        """
        with ExitStack() as stack:
            for tier, name in self.names.items():
                stack.callback(remove_namespace, name)
                run("ip", "netns", "add", name)
                run("ip", "-n", name, "link", "set", "lo", "up")
                self._write_names(tier)
            self.has_netem = not self._forced_relay and has_netem(next(iter(self.names.values())))
            for number, link in enumerate(self.config.links, start=1):
                self._join(number, link, stack)
            for tier in self.config.names:
                self._route(tier)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def address(self, tier: str, *, seen_from: str | None = None) -> str:
        """Returns a tier's address on its way to another, by default on its first link."""
        towards = seen_from and self.config.next_hops(tier)[seen_from]
        for number, link in enumerate(self.config.links, start=1):
            if tier in link.between and (towards is None or towards in link.between):
                return f"10.78.{number}.{1 + link.between.index(tier)}"
        raise ValueError(f"the tier {tier!r} has no link")

    def interface(self, tier: str) -> str:
        """Returns the interface to which the address of a tier's first link belongs."""
        return f"to-{self.config.neighbours(tier)[0]}"

    def command(self, tier: str, argv: Sequence[str]) -> list[str]:
        """Returns the command that runs another one on a host.

        `ip netns exec` would hide the cgroups, so the network is entered by itself and the files
        with the hosts' names are laid over those of the machine.
        """
        name = self.names[tier]
        script = (
            f"mount --bind {ETC / name / 'hosts'} /etc/hosts && "
            f"mount --bind {ETC / name / 'resolv.conf'} /etc/resolv.conf; "
            'exec "$@"'
        )
        enter = ["nsenter", f"--net={RUN / name}", "unshare", "--mount", "--"]
        return [*enter, "sh", "-c", script, "sh", *argv]

    def set_rate(self, name: str, bytes_per_second: float) -> None:
        """Changes what a link carries, in both directions, from now on.

        Raises:
            ValueError: If there is no such link or the rate is not above 0.
        """
        link = self.config.link(name)
        if not bytes_per_second > 0:
            raise ValueError(f"the rate of {name} must be above 0, got {bytes_per_second!r}")
        link = replace(link, bandwidth_bytes_per_second=bytes_per_second)
        for tier, other in (link.between, link.between[::-1]):
            for argv in shaping(f"to-{other}", link, netem=self._uses_netem(link), change=True):
                run("tc", "-n", self.names[tier], *argv)
        self.rates[link.name] = bytes_per_second

    def _uses_netem(self, link: LinkConfig) -> bool:
        return link.latency_seconds > 0 and self.has_netem

    def _join(self, number: int, link: LinkConfig, stack: ExitStack) -> None:
        low, high = link.between
        ends = ((low, f"to-{high}"), (high, f"to-{low}"))
        if link.latency_seconds > 0 and not self.has_netem:
            self._start_relay(link, ends, stack)
        else:
            # Both ends are born inside, so that the machine's own network never sees them.
            run(
                *("ip", "link", "add", ends[0][1], "netns", self.names[low], "type", "veth"),
                *("peer", "name", ends[1][1], "netns", self.names[high]),
            )
        for position, (tier, interface) in enumerate(ends, start=1):
            inside = ("ip", "-n", self.names[tier])
            run(*inside, "address", "add", f"10.78.{number}.{position}/24", "dev", interface)
            run(*inside, "link", "set", interface, "up")
            for argv in shaping(interface, link, netem=self._uses_netem(link)):
                run("tc", "-n", self.names[tier], *argv)

    def _start_relay(
        self, link: LinkConfig, ends: Sequence[tuple[str, str]], stack: ExitStack
    ) -> None:
        places = [f"{RUN / self.names[tier]}:{interface}" for tier, interface in ends]
        relay = subprocess.Popen(
            [sys.executable, "-I", "-S", str(RELAY), str(link.latency_seconds), *places],
            stdin=subprocess.PIPE,  # it ends when this process does and the pipe closes
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        stack.callback(_end, relay)
        assert relay.stdout is not None
        assert relay.stderr is not None
        ready, _, _ = select.select([relay.stdout], [], [], SECONDS)
        if not ready or relay.stdout.readline() != "ready\n":
            relay.kill()
            raise OSError(
                f"the relay that gives {link.name} its latency did not start within {SECONDS} s: "
                f"{relay.stderr.read().strip()}"
            )

    def _route(self, tier: str) -> None:
        # /proc/sys/net is that of the reader's network, so the switch is thrown from inside.
        forward = "echo 1 > /proc/sys/net/ipv4/ip_forward"
        run("nsenter", f"--net={RUN / self.names[tier]}", "sh", "-c", forward)
        hops = self.config.next_hops(tier)
        for number, link in enumerate(self.config.links, start=1):
            if tier not in link.between:
                near = next((end for end in link.between if end in hops.values()), link.between[0])
                gateway = self.address(hops[near], seen_from=tier)
                run(
                    *("ip", "-n", self.names[tier], "route", "add", f"10.78.{number}.0/24"),
                    *("via", gateway),
                )

    def _write_names(self, tier: str) -> None:
        """Lets names be looked up without a name server, which would stall for 10 s."""
        folder = ETC / self.names[tier]
        folder.mkdir(parents=True, exist_ok=True)
        lines = [f"127.0.0.1 localhost {socket.gethostname()}", "::1 localhost"]
        lines += [
            f"{self.address(other, seen_from=tier) if other != tier else self.address(tier)} "
            f"{other}"
            for other in self.config.names
        ]
        lines += [
            f"{kind}10.78.{number}.{position} {end}-on-{link.name}"
            for number, link in enumerate(self.config.links, start=1)
            for position, end in enumerate(link.between, start=1)
            for kind in ("", "::ffff:")  # as a socket for both versions of IP sees it
        ]
        (folder / "hosts").write_text("\n".join(lines) + "\n")
        (folder / "resolv.conf").write_text("")


def shaping(
    interface: str, link: LinkConfig, *, netem: bool, change: bool = False
) -> list[list[str]]:
    """Returns the arguments of `tc` that shape what leaves through an interface.

    Args:
        interface: Its name.
        link: Bandwidth, latency and queue.
        netem: Whether the kernel's own netem holds packets back.
        change: Only the bandwidth is new.
    """
    bits = round(8 * link.bandwidth_bytes_per_second)
    burst = max(MIN_BURST_BYTES, round(link.bandwidth_bytes_per_second / TICKS_PER_SECOND))
    bucket = ["tbf", "rate", f"{bits}bit", "burst", f"{burst}b"]
    bucket += ["latency", f"{1e3 * link.queue_seconds:g}ms"]
    verb = ["qdisc", "add", "dev", interface]
    # A new bucket in place of another: packets that already waited and are larger than a smaller
    # bucket would stop the queue for ever.
    remove = ["qdisc", "delete", "dev", interface]
    if not netem:
        commands = [[*remove, "root"]] if change else []
        return [*commands, [*verb, "root", "handle", "1:", *bucket]]
    delay = ["netem", "delay", f"{1e6 * link.latency_seconds:.0f}us", "limit", "100000"]
    commands = [[*remove, "parent", "1:1"] if change else [*verb, "root", "handle", "1:", *delay]]
    return [*commands, [*verb, "parent", "1:1", "handle", "10:", *bucket]]


def has_netem(namespace: str) -> bool:
    """Tells whether the kernel can hold packets back by itself."""
    argv = ("tc", "-n", namespace, "qdisc")
    if run(*argv, "add", "dev", "lo", "root", "netem", "delay", "1ms", check=False).returncode:
        return False
    run(*argv, "delete", "dev", "lo", "root", check=False)
    return True


def remove_namespace(name: str) -> None:
    """Removes a namespace, its files and whatever still runs inside; it need not be there."""
    for pid in run("ip", "netns", "pids", name, check=False).stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    if (RUN / name).exists():
        run("ip", "netns", "delete", name, check=False)
    shutil.rmtree(ETC / name, ignore_errors=True)


def namespaces_with(prefix: str) -> list[str]:
    """Returns the namespaces, and forgotten folders of such, whose names begin so."""
    found: Mapping[str, None] = {
        path.name: None
        for folder in (RUN, ETC)
        if folder.is_dir()
        for path in folder.iterdir()
        if path.name.startswith(prefix)
    }
    return list(found)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()
