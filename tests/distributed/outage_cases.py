"""Training over links that break again and again, drawn from a seed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.distributed.endless import TIERS, largest_difference, steps_done, train
from tests.distributed.forked import Forked, apart, forked
from tests.distributed.namespaces import ADDRESSES, Namespaces

LINKS = tuple(ADDRESSES)
KINDS = ("carrier", "silent")
START_SECONDS = 60.0
RECOVERY_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class Outage:
    """One link that carries nothing for a while."""

    link: tuple[str, str]
    kind: str
    seconds: float
    pause_seconds: float
    """After the recovery from the one before."""


@dataclass(frozen=True, kw_only=True)
class Struck:
    """What an outage did."""

    outage: Outage
    steps_before: int
    recovery_seconds: float
    """From the end of the outage to the end of the second step after it."""


def draw(count: int, seed: int, *, shortest: float, longest: float) -> list[Outage]:
    """Draws outages: links and kinds by turns, lengths and pauses at random."""
    chance = random.Random(seed)
    return [
        Outage(
            link=LINKS[number % 2],
            kind=KINDS[number // 2 % 2],
            seconds=chance.uniform(shortest, longest),
            pause_seconds=chance.uniform(0.0, 0.3),
        )
        for number in range(count)
    ]


def train_with_outages(
    topology: str,
    namespaces: dict[str, str],
    *,
    count: int,
    seed: int,
    shortest: float = 0.1,
    longest: float = 5.0,
    seconds_per_step: float = 0.03,
    say: Callable[[str], object] = lambda _: None,
) -> dict[str, Any]:
    """Trains in three networks through outages, then plainly on the same mini-batches.

    Returns:
        What each outage did, how the tiers ended, and how far their weights are from the plain
        ones.
    """
    hosts = Namespaces(namespaces)
    outages = draw(count, seed, shortest=shortest, longest=longest)
    with TemporaryDirectory() as name:
        folder = Path(name)

        def work(tier: str) -> dict[str, Any]:
            return train(folder, topology=topology, seconds_per_step=seconds_per_step)

        with forked(work, TIERS, layout="nodes", namespaces=namespaces) as tiers:
            _await_steps(folder, 3, tiers, START_SECONDS)
            struck = []
            for outage in outages:
                struck.append(_strike(hosts, outage, folder, tiers))
                say(f"{len(struck)}/{count} {outage} {struck[-1].recovery_seconds:.2f} s")
            (folder / "stop").touch()
            tiers.wait(30)
            ends = tiers.ends()
    values = [end.value for end in ends.values() if end.value is not None]
    steps = values[0]["steps"] if values else 0
    plain = apart(lambda: train(None, limit=steps)["weights"]) if steps else {}
    return {
        "struck": [asdict(each) for each in struck],
        "codes": {tier: end.code for tier, end in ends.items()},
        "outputs": {tier: end.output for tier, end in ends.items()},
        "steps": [value["steps"] for value in values],
        "differences": [largest_difference(value["weights"], plain) for value in values],
    }


def _strike(hosts: Namespaces, outage: Outage, folder: Path, tiers: Forked) -> Struck:
    time.sleep(outage.pause_seconds)
    before = steps_done(folder / "steps.txt")
    _set(hosts, outage, broken=True)
    try:
        time.sleep(outage.seconds)
    finally:
        _set(hosts, outage, broken=False)
    ended = time.monotonic()
    _await_steps(folder, steps_done(folder / "steps.txt") + 2, tiers, RECOVERY_SECONDS)
    return Struck(outage=outage, steps_before=before, recovery_seconds=time.monotonic() - ended)


def _set(hosts: Namespaces, outage: Outage, *, broken: bool) -> None:
    if outage.kind == "carrier":
        hosts.set_link(*outage.link, up=not broken)
    else:
        hosts.set_silent(*outage.link, silent=broken)


def _await_steps(folder: Path, count: int, tiers: Forked, timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    while steps_done(folder / "steps.txt") < count:
        if len(tiers.running()) < len(TIERS) or time.monotonic() > deadline:
            raise AssertionError(tiers.describe())
        time.sleep(0.02)
