"""How far the tiers' clocks are apart, found by ping-pong.

One tier asks each other one for its time. If the answer, t, was given somewhere between
asking at t0 and hearing at t1, the other clock is ahead by t - (t0 + t1) / 2, give or take
(t1 - t0) / 2. The exchange with the least round trip says it best.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from lightning_hiertrain.transport.network import Network

ROUNDS = 20


@dataclass(frozen=True, kw_only=True)
class Clock:
    """One tier's clock against that of the tier that asked."""

    ahead_seconds: float
    uncertainty_seconds: float
    """Half the least round trip."""


def compare_clocks(
    network: Network, asking: str, *, name: str, read: Callable[[], float] = perf_counter
) -> dict[str, Clock]:
    """Compares the clocks of all tiers; all call this together, and nothing else travels.

    Args:
        network: The links of this tier.
        asking: The tier whose clock the others are held against.
        name: Keeps several comparisons of one run apart.
        read: Reads the clock that is compared, in seconds.

    Returns:
        By tier, on the tier that asks; empty on the others.
    """
    tag, operation = f"clock/{name}", "compare clocks"
    if network.tier != asking:
        for _ in range(ROUNDS):
            network.receive(asking, tag, operation=operation)
            network.send(asking, tag, read(), control=True)
        return {}
    clocks = {asking: Clock(ahead_seconds=0.0, uncertainty_seconds=0.0)}
    for tier in network.topology.names:
        for _ in range(0 if tier == asking or network.membership.spares(tier) else ROUNDS):
            asked = read()
            network.send(tier, tag, control=True)
            told = float(network.receive(tier, tag, operation=operation))
            heard = read()
            clock = Clock(
                ahead_seconds=told - (asked + heard) / 2, uncertainty_seconds=(heard - asked) / 2
            )
            best = clocks.get(tier, clock)
            clocks[tier] = min(best, clock, key=lambda clock: clock.uncertainty_seconds)
    return clocks
