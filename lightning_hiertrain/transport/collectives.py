"""Barrier, broadcast and gather over a network's links, in place of a process group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_hiertrain.errors import PeerLostError
from lightning_hiertrain.transport.network import Network


class Collectives:
    """Operations that all tiers call together, in the same order.

    A tier that has died and that the run can spare takes part no more: there is no value of it.

    Args:
        network: The links, started.
        order: All tiers that take part, in the order of results.
        name: Keeps the messages of several of these on one network apart.
        collector: The tier through which all values go, which cannot be spared; the first one by
            default.
    """

    def __init__(
        self,
        network: Network,
        order: Sequence[str],
        *,
        name: str = "collective",
        collector: str | None = None,
    ) -> None:
        if network.tier not in order or len(set(order)) != len(order):
            raise ValueError(
                f"`order` must name every tier once, {network.tier!r} included; got {tuple(order)}"
            )
        self._network = network
        self._order = tuple(order)
        self._name = name
        self._collector = order[0] if collector is None else collector
        self._check(self._collector)
        self._count = 0

    def barrier(self, name: str | None = None, *, timeout_seconds: float | None = None) -> None:
        """Waits until all tiers have come here."""
        self._all_gather(name, f"barrier {name or ''}".strip(), timeout_seconds)

    def broadcast(self, value: Any, source: str, *, timeout_seconds: float | None = None) -> Any:
        """Returns the value of one tier on all tiers; the others' are ignored."""
        self._check(source)
        return self._broadcast(value, source, self._tag("broadcast"), "broadcast", timeout_seconds)

    def gather(
        self, value: Any, target: str, *, timeout_seconds: float | None = None
    ) -> list[Any] | None:
        """Returns the values of all tiers in order on one tier, `None` on the others."""
        found = self.gather_by_tier(value, target, timeout_seconds=timeout_seconds)
        return None if found is None else list(found.values())

    def gather_by_tier(
        self, value: Any, target: str, *, timeout_seconds: float | None = None
    ) -> dict[str, Any] | None:
        """Returns the values of all tiers by name on one tier, `None` on the others."""
        self._check(target)
        return self._gather(value, target, self._tag("gather"), "gather", timeout_seconds)

    def all_gather(self, value: Any, *, timeout_seconds: float | None = None) -> list[Any]:
        """Returns the values of all tiers, in order, on every tier."""
        return list(self._all_gather(value, "all_gather", timeout_seconds).values())

    def by_tier(self, value: Any, *, timeout_seconds: float | None = None) -> dict[str, Any]:
        """Returns the values of all tiers by name, in order, on every tier."""
        return self._all_gather(value, "all_gather", timeout_seconds)

    def any(self, value: bool, *, timeout_seconds: float | None = None) -> bool:
        """Tells whether it is true on one tier at least."""
        return True in self._all_gather(bool(value), "any", timeout_seconds).values()

    def all(self, value: bool, *, timeout_seconds: float | None = None) -> bool:
        """Tells whether it is true on all tiers."""
        return False not in self._all_gather(bool(value), "all", timeout_seconds).values()

    def _tag(self, operation: str) -> str:
        self._count += 1
        return f"{self._name}/{self._count}/{operation}"

    def _check(self, tier: str) -> None:
        if tier not in self._order:
            raise ValueError(f"tier {tier!r} takes no part; the tiers are {self._order}")

    def _all_gather(
        self, value: Any, operation: str, timeout_seconds: float | None
    ) -> dict[str, Any]:
        tag, first = self._tag(operation), self._collector
        gathered = self._gather(value, first, f"{tag}/up", operation, timeout_seconds)
        result = self._broadcast(gathered, first, f"{tag}/down", operation, timeout_seconds)
        assert isinstance(result, dict)
        return result

    def _gather(
        self, value: Any, target: str, tag: str, operation: str, timeout_seconds: float | None
    ) -> dict[str, Any] | None:
        if self._network.tier != target:
            self._network.send(target, tag, value, control=None)
            return None
        found = {}
        for tier in self._order:
            try:
                found[tier] = (
                    value
                    if tier == target
                    else self._receive(tier, tag, operation, timeout_seconds)
                )
            except PeerLostError:
                if not self._network.membership.spares(tier):
                    raise
        return found

    def _broadcast(
        self, value: Any, source: str, tag: str, operation: str, timeout_seconds: float | None
    ) -> Any:
        if self._network.tier != source:
            return self._receive(source, tag, operation, timeout_seconds)
        others = [tier for tier in self._order if tier != source]
        self._network.send_to(others, tag, value, control=None)
        return value

    def _receive(self, tier: str, tag: str, operation: str, timeout_seconds: float | None) -> Any:
        return self._network.receive(
            tier, tag, timeout_seconds=timeout_seconds, operation=operation
        )
