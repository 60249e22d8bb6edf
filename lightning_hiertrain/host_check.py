"""`hiertrain check`: whether this host can take part in a run, looked at before the run.

It is started on every host at once and does what a run does: it opens the links with the keys, and
over them compares versions and clocks and measures what each link carries. What is wrong is said
with its remedy, on each tier about all that it can see. Every wait has an end.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lightning_hiertrain.errors import LinkError
from lightning_hiertrain.profiling.links import measure_links
from lightning_hiertrain.reports import table
from lightning_hiertrain.timeline.clocks import compare_clocks
from lightning_hiertrain.topology import Topology
from lightning_hiertrain.transport import Collectives, Network
from lightning_hiertrain.transport.addresses import dial_address
from lightning_hiertrain.units import format_bandwidth, format_seconds

PACKAGES = ("lightning-hiertrain", "torch", "lightning")
"""What must have the same version on all tiers."""
_CLOCK_SECONDS = 1.0
"""How far clocks may be apart: logs and files of the tiers are compared by their times."""
_ANSWER_SECONDS = 10.0
_LOOK_SECONDS = 3.0


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    subject: str
    found: str
    remedy: str | None = None
    """What to do; `None` if it is as it should be."""


@dataclass(frozen=True, kw_only=True)
class HostCheck:
    """What was found."""

    tier: str
    findings: Sequence[Finding]

    @property
    def is_ready(self) -> bool:
        """Whether nothing has to be fixed."""
        return all(finding.remedy is None for finding in self.findings)

    def report(self) -> str:
        """Returns the findings as a table, and below it what to fix."""
        wrong = [finding for finding in self.findings if finding.remedy is not None]
        widest = max(len(each.found) for each in self.findings)
        text = table(
            (f"{'FIX' if each.remedy else 'ok '}  {each.subject}", each.found.ljust(widest))
            for each in self.findings
        )
        if not wrong:
            return f"{text}\n\ntier {self.tier} is ready"
        fixes = "\n".join(f"- {each.subject}: {each.remedy}" for each in wrong)
        return f"{text}\n\nto fix on or for tier {self.tier}:\n{fixes}"


def tier_of_host(path: str | Path, topology: Topology) -> str:
    """Returns the tier whose private key alone lies beside the topology file.

    Raises:
        ValueError: If there is none, or several.
    """
    found = [name for name in topology.names if Path(path).with_name(f"{name}.key").exists()]
    if len(found) != 1:
        what = f"the keys of {found} lie" if found else "no tier's key lies"
        raise ValueError(f"{what} beside {path}: say which tier this host is with `--tier`")
    return found[0]


def check_host(
    tier: str,
    topology: Topology,
    *,
    private_key: str | Path | None,
    timeout_seconds: float = 120.0,
    seconds_per_link: float = 2.0,
    say: Callable[[str], object] = lambda _: None,
) -> HostCheck:
    """Checks this host and, with those that are there, the links between them.

    Args:
        tier: The tier that this host is.
        topology: Tiers, links and public keys.
        private_key: File with this tier's private key, if there are keys.
        timeout_seconds: How long to wait for the other tiers' checks.
        seconds_per_link: How long to measure each link.
        say: Told, while it waits, what it waits for.
    """
    findings: list[Finding] = []
    check = HostCheck(tier=tier, findings=findings)
    try:
        network = Network.from_topology(
            tier, topology, private_key=private_key, timeout_seconds=timeout_seconds
        )
    except (ValueError, OSError) as error:
        findings.append(Finding(subject="keys", found="not usable", remedy=str(error)))
        return check
    kept = "none: all tiers are on this machine" if private_key is None else "own key fits"
    findings.append(Finding(subject="keys", found=kept))
    try:
        with network:
            if _check_others(network, findings, say):
                say("comparing clocks and measuring the links")
                findings += _compare_clocks(network)
                findings += _measure(network, seconds_per_link)
    except LinkError as error:
        subject = "own address" if error.peer == tier else f"tier {error.peer}"
        findings.append(Finding(subject=subject, found="ended the check", remedy=str(error)))
    return check


def _check_others(network: Network, findings: list[Finding], say: Callable[[str], object]) -> bool:
    """Meets the other tiers; returns whether all see each other and fit, the same on all."""
    others = [name for name in network.topology.names if name != network.tier]
    say(
        f"waiting at most {network.timeout_seconds:g} s for {', '.join(others)}: run "
        "`hiertrain check` there now"
    )
    with suppress(LinkError):
        network.wait_for_peers()
    missing = network.missing()
    findings += [_missing(network, name, why) for name, why in missing.items()]
    own = _versions()
    here = [name for name in others if name not in missing]
    for name in here:
        network.send(name, "check", {"versions": own, "missing": list(missing)}, control=True)
    fits = not missing
    for name in here:
        told = _told(network, name, findings)
        fits = fits and told is not None and not told["missing"]
        if told is not None:
            differing = _compare_versions(name, told["versions"], own)
            findings += differing
            fits = fits and all(finding.remedy is None for finding in differing)
    return fits


def _told(network: Network, name: str, findings: list[Finding]) -> dict[str, Any] | None:
    """Returns what another tier's check has sent."""
    # It may have begun later, and wait for the rest as long as this one did.
    patience = network.timeout_seconds + _ANSWER_SECONDS
    try:
        told = network.receive(name, "check", timeout_seconds=patience, operation="check")
    except (LinkError, ValueError) as error:
        remedy = f"run `hiertrain check` there, and no training: {error}"
        findings.append(
            Finding(subject=f"tier {name}", found="is there, but does not check", remedy=remedy)
        )
        return None
    findings.append(Finding(subject=f"tier {name}", found="reached, and its key fits"))
    return dict(told)


def _missing(network: Network, name: str, why: str) -> Finding:
    topology, tier = network.topology, network.tier
    link = topology.link(tier, name)
    if link is None:
        relay = topology.route(tier, name)[1]
        remedy = f"tier {relay} relays to it: see what `hiertrain check` says there"
    elif link.between[0] == name:
        host, port = dial_address(topology, link)
        remedy = (
            f"run `hiertrain check` there; if it runs, {name} must reach {host}:{port} and both "
            "must have the topology file with the same keys"
        )
    else:
        remedy = _look(*dial_address(topology, link))
    return Finding(subject=f"tier {name}", found=why, remedy=remedy)


def _look(host: str, port: int) -> str:
    """Says what keeps this host from reaching a port, as far as a plain connection tells."""
    where = f"{host}:{port}"
    try:
        with socket.create_connection((host, port), _LOOK_SECONDS):
            return (
                f"{where} answers, but not as that tier does: copy topology.json and the tiers' "
                "own keys to all hosts again, and see that nothing else listens there"
            )
    except socket.gaierror:
        return f"the name {host!r} is unknown here: correct the address in the topology"
    except ConnectionRefusedError:
        return f"nothing listens at {where}: run `hiertrain check` there, or correct the port"
    except OSError as error:
        return (
            f"{where} does not answer ({error}): correct the address, or open the port in the "
            "firewalls between"
        )


def _versions() -> dict[str, str]:
    # What follows a plus tells the kind of accelerator, in which tiers may differ.
    return {name: version(name).partition("+")[0] for name in PACKAGES}


def _compare_versions(name: str, theirs: dict[str, str], own: dict[str, str]) -> list[Finding]:
    findings = [
        Finding(
            subject=f"{package} on {name}",
            found=f"version {theirs.get(package)}, here {own[package]}",
            remedy=f"install the same version of {package} on all tiers",
        )
        for package in PACKAGES
        if theirs.get(package) != own[package]
    ]
    if findings:
        return findings
    shown = ", ".join(f"{package} {own[package]}" for package in PACKAGES)
    return [Finding(subject=f"versions on {name}", found=shown)]


def _compare_clocks(network: Network) -> list[Finding]:
    names = network.topology.names
    compared = compare_clocks(network, names[0], name="check", read=time.time)
    told = {
        name: (clock.ahead_seconds, clock.uncertainty_seconds) for name, clock in compared.items()
    }
    told = Collectives(network, names, name="check clocks").broadcast(told, names[0])
    findings = []
    for name in names[1:]:
        ahead, uncertainty = told[name]
        is_off = abs(ahead) > _CLOCK_SECONDS + uncertainty
        way = "ahead of" if ahead > 0 else "behind"
        findings.append(
            Finding(
                subject=f"clock of {name}",
                found=f"{format_seconds(abs(ahead))} {way} that of {names[0]}",
                remedy="set the clocks of both hosts, for example with NTP" if is_off else None,
            )
        )
    return findings


def _measure(network: Network, seconds_per_link: float) -> list[Finding]:
    return [
        Finding(
            subject=f"link {'-'.join(link.between)}",
            found=f"{format_bandwidth(link.bandwidth_bytes_per_second)}, "
            f"latency {format_seconds(link.latency_seconds)}",
        )
        for link in measure_links(network, seconds_per_link=seconds_per_link)
    ]
