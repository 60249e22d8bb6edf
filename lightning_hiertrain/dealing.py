"""Mini-batches on their way to the tiers: announced, then dealt out, one ahead where possible."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning_hiertrain.execution import DealtBatch, Feed, MiniBatch
from lightning_hiertrain.execution.feed import Announcement
from lightning_hiertrain.mirrored_calls import MirroredCalls
from lightning_hiertrain.partition.chain import LayerChain
from lightning_hiertrain.partition.rows import batch_leaves, num_samples
from lightning_hiertrain.partition.views import fits
from lightning_hiertrain.schedule import Schedule
from lightning_hiertrain.transport.network import Network


class Dealing:
    """One tier's part in dealing out mini-batches; all tiers call it in the same order.

    Args:
        network: The links of this tier.
        calls: Names messages alike on all tiers.
        feed: Deals and receives rows.
        data_tier: The tier that has the data.
        place: Moves a batch to this tier's accelerator.
    """

    def __init__(
        self,
        network: Network,
        calls: MirroredCalls,
        feed: Feed,
        *,
        data_tier: str,
        place: Callable[[Any], Any],
    ) -> None:
        self._network = network
        self._calls = calls
        self._feed = feed
        self._data_tier = data_tier
        self._place = place
        self.count = 0
        """How many mini-batches the data tier has dealt out or begun to."""
        self._ahead: MiniBatch | None = None
        """The next mini-batch, whose samples have left already."""
        self._announced: Announcement = (0, 0, None, True)

    def announce(
        self,
        batch: DealtBatch | None,
        schedule: Schedule | None,
        chain: LayerChain,
        news: Any,
    ) -> Any:
        """Tells every tier of the next mini-batch, or waits to be told.

        Args:
            batch: On the data tier the mini-batch, elsewhere `None`.
            schedule: On the data tier the schedule that it will be dealt out by.
            chain: The model's chain of layers.
            news: On the data tier what else all tiers must know before it is.

        Returns:
            The news, on every tier.
        """
        tag = self._calls.tag("mini-batch")
        if batch is None:
            self._announced, news = self._network.receive(
                self._data_tier, tag, operation="receive the number of a mini-batch"
            )
            return news
        known = self._ahead
        if known is not None and batch.was_dealt and known.schedule == schedule:
            self._announced = (known.index, known.num_samples, batch.weight, known.is_divided)
        else:
            self._ahead = None
            self.count += 1
            samples, is_divided = num_samples(batch.content), fits(batch.content, chain)
            self._announced = (self.count, samples, batch.weight, is_divided)
        self._calls.tell(tag, (self._announced, news))
        return news

    def deal(
        self,
        batch: DealtBatch | None,
        schedule: Schedule,
        chain: LayerChain,
        next_batch: Callable[[], DealtBatch | None],
    ) -> MiniBatch:
        """Deals out the mini-batch that was announced, or receives this tier's rows of it.

        Args:
            batch: On the data tier the mini-batch, elsewhere `None`.
            schedule: The schedule in force.
            chain: The model's chain of layers.
            next_batch: Returns the one after it, on the data tier, if its samples may leave now.
        """
        if batch is None:
            mini_batch = self._feed.receive(self._announced, schedule, chain)
            return replace(mini_batch, batch=self._place(mini_batch.batch))
        ahead, self._ahead = self._ahead, None
        mini_batch = ahead or self._feed.deal(batch, self._announced[0], schedule, chain)
        following = next_batch()
        if following is not None:
            self.count += 1
            self._ahead = self._feed.deal(following, self.count, schedule, chain, ahead=True)
        return mini_batch

    def evaluate(
        self, batch: Any, weight: int | None, evaluator: str, *, to_all: bool
    ) -> tuple[Any, int | None]:
        """Brings a batch of validation, test or prediction to the tier that evaluates.

        Args:
            batch: On the data tier the batch.
            weight: On the data tier its size by Lightning's rules.
            evaluator: The tier that evaluates.
            to_all: Whether every tier gets the batch.

        Returns:
            The batch, on those tiers as it has arrived and on the data tier, and its size.
        """
        tag = self._calls.tag("evaluation")
        if self._network.tier == self._data_tier:
            for tier in self._network.topology.names:
                if tier == self._data_tier:
                    continue
                message: dict[str, Any] = {"batch": None, "weight": weight}
                if tier == evaluator or to_all:
                    message |= self._feed.packed(batch, batch_leaves(batch), tier, "evaluation")
                self._network.send(tier, tag, message, control=None)
            return batch, weight
        message = self._network.receive(
            self._data_tier, tag, operation="receive a batch of validation, test or prediction"
        )
        return self._feed.unpacked(message), message["weight"]
