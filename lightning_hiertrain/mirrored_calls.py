"""Running the user's code on one tier and mirroring what it did on the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_hiertrain.mirror import Mirror
from lightning_hiertrain.mirror.saves import save_all, saves_noted
from lightning_hiertrain.transport.network import Network


class MirroredCalls:
    """Calls that one tier makes and the others follow; all tiers come to them in the same order.

    Args:
        network: The links of this tier.
        mirror: Records and replays.
    """

    def __init__(self, network: Network, mirror: Mirror) -> None:
        self.is_user_code_alone = False
        """Whether code of the user's runs that the other tiers do not run: collectives are then
        local."""
        self.onlookers: frozenset[str] = frozenset()
        """Tiers that take no part in steps: what they are told may take a moment."""
        self._network = network
        self._mirror = mirror
        self.count = 0
        """How many tags there have been."""

    def run_on(
        self, leader: str, step: Callable[[], Any], weight: int | None, operation: str
    ) -> Any:
        """Runs a step or hook on one tier and replays it on the others.

        Args:
            leader: The tier.
            step: What to run.
            weight: The batch size by which Lightning weighs what is logged.
            operation: What the others wait for, in words that follow "to".

        Returns:
            The result, on all tiers.
        """
        if self._network.tier == leader:
            return self.lead(step, weight)
        return self.follow(operation, leader)

    def lead(
        self,
        step: Callable[[], Any],
        weight: int | None,
        *,
        own_samples: int | None = None,
        at_once: bool = True,
    ) -> Any:
        """Runs a step and tells the others what it did, at once or with what is sent next."""
        tag = self.tag("result")
        alone, self.is_user_code_alone = self.is_user_code_alone, True
        try:
            with (
                saves_noted(self._mirror.trainer) as saves,
                self._mirror.record(weight, own_samples) as recording,
            ):
                output = step()
                payload = recording.payload(output)
        finally:
            self.is_user_code_alone = alone
        self.tell(tag, {**payload, "saves": saves}, at_once=at_once or bool(saves))
        save_all(self._mirror.trainer, saves)
        return output

    def follow(self, operation: str, leader: str) -> Any:
        """Waits for what another tier's step did and does the same."""
        tag = self.tag("result")
        payload = self._network.receive(leader, tag, operation=operation)
        output = self._mirror.replay(payload)
        save_all(self._mirror.trainer, payload["saves"])
        return output

    def spread_attributes(self, leader: str) -> None:
        """Brings attributes of the module that were too large to travel after each step."""
        tag = self.tag("attributes")
        if self._network.tier == leader:
            self.tell(tag, self._mirror.large_changes())
        else:
            operation = "receive attributes of the module"
            self._mirror.adopt_attributes(self._network.receive(leader, tag, operation=operation))

    def tell(self, tag: str, value: Any, *, at_once: bool = True) -> None:
        """Sends a value to all other tiers, at once or with what is sent next."""
        others = [name for name in self._network.topology.names if name != self._network.tier]
        at_once = at_once and not self.onlookers.issuperset(others)
        self._network.send_to(others, tag, value, control=None, at_once=at_once)

    def tag(self, what: str) -> str:
        """Returns a tag that no other message has, the same on all tiers."""
        self.count += 1
        return f"{what}/{self.count}"
