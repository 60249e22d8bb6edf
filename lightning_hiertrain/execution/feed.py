"""Dealing out mini-batches: each tier gets the rows that its part of the step reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from lightning_hiertrain.partition.chain import LayerChain
from lightning_hiertrain.partition.rows import batch_leaves, num_samples, with_leaves
from lightning_hiertrain.partition.views import filled, owner_leaves, prefix_leaves
from lightning_hiertrain.schedule import Schedule
from lightning_hiertrain.transport.lossless import Packer, content_bytes, unpack
from lightning_hiertrain.transport.network import Network
from lightning_hiertrain.transport.observing import Doing


@dataclass(frozen=True, kw_only=True)
class MiniBatch:
    """One mini-batch as one tier knows it."""

    index: int
    """A number that no other mini-batch of the run has; the same on every tier."""
    schedule: Schedule
    num_samples: int
    """Rows of the whole mini-batch."""
    rows: Mapping[str, slice]
    """Which of them each tier takes, in the owner's order."""
    weight: int | None
    """Lightning's own idea of the batch size, by which it weighs epoch means; `None` if it has
    none."""
    batch: Any
    """What this tier's step sees; `None` on a tier that takes no part."""

    @property
    def cuts(self) -> tuple[tuple[str, int, int], ...]:
        """Name, layers and rows of each prefix worker with rows here, shallowest first."""
        return tuple(
            (tier, self.schedule.shares[tier].num_layers, _length(self.rows[tier]))
            for tier in self.schedule.prefix_workers
            if _length(self.rows[tier])
        )

    @property
    def owner_rows(self) -> int:
        return _length(self.rows[self.schedule.owner])


@dataclass(frozen=True, kw_only=True)
class DealtBatch:
    """A whole mini-batch on the data tier."""

    content: Any
    weight: int | None
    """Its size by Lightning's rules, by which epoch means are weighed."""
    was_dealt: bool = False
    """Whether it is the one that the step before knew as the next."""


class Feed:
    """Deals mini-batches on the data tier and receives them on the others.

    Args:
        network: The links of this tier.
        data_tier: The tier that has the data.
    """

    def __init__(self, network: Network, data_tier: str) -> None:
        self._network = network
        self._data_tier = data_tier
        self._packer = Packer()
        self._rates: Mapping[str, float] = {}

    def expect_rates(self, bytes_per_second: Mapping[str, float]) -> None:
        """Takes what the way to each tier was measured to carry, by which packing is chosen."""
        self._rates = dict(bytes_per_second)

    def rate(self, tier: str) -> float | None:
        """Returns the bytes per second that go to a tier, `None` if that is not known yet."""
        seen = self._network.bytes_per_second(tier)
        rates = [rate for rate in (seen, self._rates.get(tier)) if rate is not None]
        return max(rates, default=None)

    def deal(
        self, dealt: DealtBatch, index: int, schedule: Schedule, chain: LayerChain
    ) -> MiniBatch:
        """Sends every other tier its rows.

        Args:
            dealt: The whole mini-batch.
            index: A number that no other mini-batch of the run has.
            schedule: The schedule in force.
            chain: The model's chain of layers.

        Returns:
            The mini-batch as this tier's step sees it.
        """
        batch, weight = dealt.content, dealt.weight
        samples = num_samples(batch)
        rows = schedule.rows(samples)
        leaves = batch_leaves(batch)
        mini_batch = MiniBatch(
            index=index,
            schedule=schedule,
            num_samples=samples,
            rows=rows,
            weight=weight,
            batch=None,
        )
        for tier in self._network.topology.names:
            if tier != self._data_tier:
                seen = self._seen(tier, mini_batch, chain, leaves)
                if seen is not None:
                    message = self.packed(batch, seen, tier, "training")
                    self._network.send(tier, f"{index}/batch", message, control=None)
        return self._with_own(
            mini_batch, batch, self._seen(self._data_tier, mini_batch, chain, leaves), chain
        )

    def announcement(self, mini_batch: MiniBatch) -> tuple[int, int, int | None]:
        """Returns what every tier is told of a mini-batch, for `receive`."""
        return mini_batch.index, mini_batch.num_samples, mini_batch.weight

    def receive(
        self, announcement: tuple[int, int, int | None], schedule: Schedule, chain: LayerChain
    ) -> MiniBatch:
        """Waits for this tier's rows of a mini-batch, if it has any."""
        index, samples, weight = announcement
        mini_batch = MiniBatch(
            index=index,
            schedule=schedule,
            num_samples=samples,
            rows=schedule.rows(samples),
            weight=weight,
            batch=None,
        )
        tier = self._network.tier
        if tier != schedule.owner and all(name != tier for name, _, _ in mini_batch.cuts):
            return mini_batch
        message = self._network.receive(
            self._data_tier, f"{index}/batch", operation=f"receive mini-batch {index}"
        )
        with Doing(self._network, "codec", "samples"):
            seen = [None if leaf is None else unpack(leaf) for leaf in message["leaves"]]
        return self._with_own(mini_batch, message["batch"], seen, chain)

    def packed(
        self, batch: Any, leaves: Sequence[Tensor | None], tier: str, purpose: str
    ) -> dict[str, Any]:
        """Returns a batch as it travels, without loss but in fewer bytes.

        Args:
            batch: The batch.
            leaves: What of its tensors shall travel, `None` where nothing of one.
            tier: Where to.
            purpose: Of the batch; batches of one purpose are alike.

        Returns:
            For a message: `batch`, whose tensors are empty, and `leaves`.
        """
        rate = self.rate(tier)
        with Doing(self._network, "codec", "samples"):
            return {
                "batch": with_leaves(batch, [leaf.new_empty(0) for leaf in batch_leaves(batch)]),
                "leaves": [
                    None if leaf is None else self._packer.pack(leaf, (purpose, position), rate)
                    for position, leaf in enumerate(leaves)
                ],
            }

    def bytes_of_leaves(self, leaves: Sequence[Tensor], bytes_per_second: float) -> list[int]:
        """Returns how many bytes each tensor of a training batch takes on a way of that rate."""
        return [
            content_bytes(self._packer.pack(leaf, ("training", position), bytes_per_second))
            for position, leaf in enumerate(leaves)
        ]

    def _with_own(
        self, mini_batch: MiniBatch, batch: Any, seen: list[Tensor | None] | None, chain: LayerChain
    ) -> MiniBatch:
        if seen is None:
            return mini_batch
        own = _length(mini_batch.rows[self._network.tier])
        leaves = filled(chain, seen, own, batch_leaves(batch)[0].device)
        return replace(mini_batch, batch=with_leaves(batch, leaves))

    def _seen(
        self, tier: str, mini_batch: MiniBatch, chain: LayerChain, leaves: Sequence[Tensor]
    ) -> list[Tensor | None] | None:
        cuts = mini_batch.cuts
        if tier == mini_batch.schedule.owner:
            return (
                owner_leaves(chain, leaves, cuts[0][1], mini_batch.owner_rows)
                if cuts
                else list(leaves)
            )
        depth = next((depth for name, depth, _ in cuts if name == tier), None)
        return None if depth is None else prefix_leaves(chain, leaves, depth, mini_batch.rows[tier])


def _length(rows: slice) -> int:
    return int(rows.stop - rows.start)
