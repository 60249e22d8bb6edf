"""Running the user's code on one tier and mirroring what it did on the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_hiertrain.mirror import Mirror
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
        self._network = network
        self._mirror = mirror
        self._count = 0

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
        self, step: Callable[[], Any], weight: int | None, *, own_samples: int | None = None
    ) -> Any:
        """Runs a step and tells the others what it did."""
        tag = self.tag("result")
        alone, self.is_user_code_alone = self.is_user_code_alone, True
        try:
            with self._mirror.record(weight, own_samples) as recording:
                output = step()
                payload = recording.payload(output)
        finally:
            self.is_user_code_alone = alone
        self.tell(tag, payload)
        return output

    def follow(self, operation: str, leader: str) -> Any:
        """Waits for what another tier's step did and does the same."""
        tag = self.tag("result")
        return self._mirror.replay(self._network.receive(leader, tag, operation=operation))

    def tell(self, tag: str, value: Any) -> None:
        """Sends a value to all other tiers."""
        for tier in self._network.topology.names:
            if tier != self._network.tier:
                self._network.send(tier, tag, value, control=None)

    def tag(self, what: str) -> str:
        """Returns a tag that no other message has, the same on all tiers."""
        self._count += 1
        return f"{what}/{self._count}"
