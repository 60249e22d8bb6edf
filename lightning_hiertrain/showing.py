"""Whole mini-batches for hooks that read them on tiers that have none, or a part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_hiertrain.execution import DealtBatch, Feed
from lightning_hiertrain.partition.rows import batch_leaves
from lightning_hiertrain.transport.network import Network


class Showing:
    """One tier's part in it; all tiers call it in the same order.

    Args:
        network: The links of this tier.
        feed: Packs batches.
        data_tier: The tier that has the data.
        place: Moves a batch to this tier's accelerator.
    """

    def __init__(
        self, network: Network, feed: Feed, *, data_tier: str, place: Callable[[Any], Any]
    ) -> None:
        self._network = network
        self._feed = feed
        self._data_tier = data_tier
        self._place = place
        self.to_all = False
        """Whether callbacks read mini-batches around training steps, on every tier."""
        self.to_owner = False
        """Whether the module's hooks do so, on the owner."""
        self.evaluation_to_all = False
        """Whether callbacks read batches of validation, test or prediction, on every tier."""

    def show(self, batch: DealtBatch | None, index: int, owner: str) -> Any:
        """Returns the whole mini-batch on tiers where hooks read it, else `None`.

        Args:
            batch: On the data tier the mini-batch, elsewhere `None`.
            index: The mini-batch's number.
            owner: The owner.
        """
        tiers = set(self._network.topology.names) if self.to_all else set()
        if self.to_owner:
            tiers.add(owner)
        tiers.discard(self._data_tier)
        tag = f"{index}/whole batch"
        if batch is not None:
            leaves = batch_leaves(batch.content)
            for tier in tiers:
                message = self._feed.packed(batch.content, leaves, tier, "whole")
                self._network.send(tier, tag, message, control=None)
            return batch.content if tiers else None
        if self._network.tier not in tiers:
            return None
        message = self._network.receive(
            self._data_tier, tag, operation="receive a mini-batch for hooks"
        )
        return self._place(Feed.unpacked(message))
