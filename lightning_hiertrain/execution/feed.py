"""Dealing out mini-batches: each tier gets the rows that its part of the step reads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from lightning_hiertrain.errors import HierTrainError, LinkError
from lightning_hiertrain.partition.chain import LayerChain
from lightning_hiertrain.partition.rows import batch_leaves, num_samples, with_leaves
from lightning_hiertrain.partition.views import filled, fits, owner_leaves, prefix_leaves
from lightning_hiertrain.schedule import Schedule
from lightning_hiertrain.transport.lossless import Packer, content_bytes, unpack
from lightning_hiertrain.transport.network import Network
from lightning_hiertrain.transport.observing import Doing

log = logging.getLogger(__name__)

_CHANGED = (
    "a tier died in the first mini-batch, whose samples the step changes in place, so that they "
    "cannot be computed again (of later mini-batches there are copies); start anew"
)
_OTHER_STRUCTURE = (
    "a mini-batch has other tensors than the first one, or other numbers of rows in them, and "
    "cannot be divided; it would travel to the owner as a whole, which "
    "`keep_inputs_on_data_tier=True` forbids; let the dataloader yield batches of one structure"
)


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
    is_divided: bool = True
    """Whether it has the structure that was traced; if not, the owner takes all of it."""

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


Announcement = tuple[int, int, int | None, bool]
"""Index, samples and weight of a mini-batch, and whether it is divided."""


class Feed:
    """Deals mini-batches on the data tier and receives them on the others.

    Args:
        network: The links of this tier.
        data_tier: The tier that has the data.
        keeps_inputs: Whether raw samples stay there.
    """

    def __init__(self, network: Network, data_tier: str, *, keeps_inputs: bool = False) -> None:
        self._keeps_inputs = keeps_inputs
        self._network = network
        self._data_tier = data_tier
        self._packer = Packer()
        self._rates: Mapping[str, float] = {}
        self._kept: dict[int, _Kept] = {}
        """On the data tier, by index: the mini-batches since the last update, and the next one."""
        self._dealing = threading.Lock()
        self._copies = False
        """Whether steps change their batch in place, so that copies are kept."""

    def expect_rates(self, bytes_per_second: Mapping[str, float]) -> None:
        """Takes what the way to each tier was measured to carry, by which packing is chosen."""
        self._rates = dict(bytes_per_second)

    def rate(self, tier: str) -> float | None:
        """Returns the bytes per second that go to a tier, `None` if that is not known yet."""
        seen = self._network.bytes_per_second(tier)
        rates = [rate for rate in (seen, self._rates.get(tier)) if rate is not None]
        return max(rates, default=None)

    def deal(
        self,
        dealt: DealtBatch,
        index: int,
        schedule: Schedule,
        chain: LayerChain,
        *,
        ahead: bool = False,
    ) -> MiniBatch:
        """Sends every other tier its rows.

        Args:
            dealt: The whole mini-batch.
            index: A number that no other mini-batch of the run has.
            schedule: The schedule in force.
            chain: The model's chain of layers.
            ahead: Whether it is that of the next step: what this step needs travels first.

        Returns:
            The mini-batch as this tier's step sees it.
        """
        batch, weight = dealt.content, dealt.weight
        samples = num_samples(batch)
        is_divided = fits(batch, chain)
        if self._keeps_inputs and not is_divided:
            raise HierTrainError(_OTHER_STRUCTURE)
        rows = _rows(schedule, samples, chain, is_divided=is_divided)
        leaves = batch_leaves(batch)
        mini_batch = MiniBatch(
            index=index,
            schedule=schedule,
            num_samples=samples,
            rows=rows,
            weight=weight,
            batch=None,
            is_divided=is_divided,
        )
        with self._dealing:
            if self._copies:
                batch = with_leaves(batch, [leaf.clone() for leaf in leaves])
            kept = _Kept(mini_batch=mini_batch, batch=batch, chain=chain, versions=_versions(batch))
            if any(self._network.membership.can_spare(tier) for tier, _, _ in mini_batch.cuts):
                self._kept[index] = kept
            for tier in self._network.topology.names:
                if tier != self._data_tier:
                    self._send_rows(kept, tier, ahead=ahead)
        return self._with_own(
            mini_batch, dealt.content, self._seen(self._data_tier, mini_batch, chain, leaves), chain
        )

    def make_up_for(self, lost: str) -> None:
        """Sends the owner, from the data tier, the rows of a tier that has died.

        Args:
            lost: The tier. Its rows of later mini-batches go to the owner at once.
        """
        try:
            with self._dealing:
                for kept in self._kept.values():
                    if lost not in kept.made_up_for:
                        self._send_rows(kept, lost)
        except (LinkError, RuntimeError):  # the owner is lost too, or the run has ended
            log.debug("the rows of tier %s have not reached the owner", lost, exc_info=True)

    def rows_of(self, lost: str, mini_batch: MiniBatch, chain: LayerChain) -> Any:
        """Returns on the owner the batch as a prefix worker that has died would have seen it."""
        rows = mini_batch.rows[lost]
        if self._network.tier == self._data_tier:
            kept = self._kept[mini_batch.index]
            if kept.has_changed:
                raise HierTrainError(_CHANGED)
            batch, seen = kept.batch, self._seen(lost, mini_batch, chain, batch_leaves(kept.batch))
        else:
            message = self._network.receive(
                self._data_tier,
                f"{mini_batch.index}/batch of {lost}",
                operation=f"receive what tier {lost!r} had of mini-batch {mini_batch.index}",
            )
            if message is None:
                raise HierTrainError(_CHANGED)
            batch = message["batch"]
            seen = [None if leaf is None else unpack(leaf) for leaf in message["leaves"]]
        assert seen is not None
        copies = [None if leaf is None else leaf.clone() for leaf in seen]
        return with_leaves(batch, filled(chain, copies, _length(rows), batch_leaves(batch)))

    def forget(self, index: int) -> None:
        """Drops the mini-batches up to one whose update has been made."""
        with self._dealing:
            for old in [known for known in self._kept if known <= index]:
                self._copies |= self._kept.pop(old).has_changed

    def receive(
        self, announcement: Announcement, schedule: Schedule, chain: LayerChain
    ) -> MiniBatch:
        """Waits for this tier's rows of a mini-batch, if it has any.

        Args:
            announcement: What `Dealing` announced of the mini-batch.
            schedule: The schedule in force.
            chain: The model's chain of layers.
        """
        index, samples, weight, is_divided = announcement
        mini_batch = MiniBatch(
            index=index,
            schedule=schedule,
            num_samples=samples,
            rows=_rows(schedule, samples, chain, is_divided=is_divided),
            weight=weight,
            batch=None,
            is_divided=is_divided,
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

    @staticmethod
    def unpacked(message: Mapping[str, Any]) -> Any:
        """Returns the batch that `packed` made ready, or none if only that was sent."""
        batch = message["batch"]
        if "leaves" not in message:
            return batch
        return with_leaves(batch, [unpack(leaf) for leaf in message["leaves"]])

    def bytes_of_leaves(self, leaves: Sequence[Tensor], bytes_per_second: float) -> list[int]:
        """Returns how many bytes each tensor of a training batch takes on a way of that rate."""
        return [
            content_bytes(self._packer.pack(leaf, ("training", position), bytes_per_second))
            for position, leaf in enumerate(leaves)
        ]

    def _send_rows(self, kept: _Kept, tier: str, *, ahead: bool = False) -> None:
        """Sends a tier its rows, or the owner if the tier has died."""
        mini_batch, batch = kept.mini_batch, kept.batch
        seen = self._seen(tier, mini_batch, kept.chain, batch_leaves(batch))
        if seen is None:
            return
        target, tag = tier, f"{mini_batch.index}/batch"
        if self._network.membership.spares(tier):
            kept.made_up_for.add(tier)
            target, tag = mini_batch.schedule.owner, f"{tag} of {tier}"
        if target != self._data_tier:
            unusable = target != tier and kept.has_changed
            message = None if unusable else self.packed(batch, seen, target, "training")
            self._network.send(target, tag, message, control=None, ahead=ahead)

    def _with_own(
        self, mini_batch: MiniBatch, batch: Any, seen: list[Tensor | None] | None, chain: LayerChain
    ) -> MiniBatch:
        if seen is None:
            return mini_batch
        if not mini_batch.is_divided:
            return replace(mini_batch, batch=with_leaves(batch, [x for x in seen if x is not None]))
        own = _length(mini_batch.rows[self._network.tier])
        leaves = filled(chain, seen, own, batch_leaves(batch))
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


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """A whole mini-batch that may be needed again."""

    mini_batch: MiniBatch
    batch: Any
    chain: LayerChain
    versions: list[int]
    """Of its tensors, when it was dealt out."""
    made_up_for: set[str] = field(default_factory=set)
    """Tiers that have died and whose rows have gone to the owner."""

    @property
    def has_changed(self) -> bool:
        return _versions(self.batch) != self.versions


def _versions(batch: Any) -> list[int]:
    return [0 if leaf.is_inference() else leaf._version for leaf in batch_leaves(batch)]


def _rows(
    schedule: Schedule, samples: int, chain: LayerChain, *, is_divided: bool
) -> Mapping[str, slice]:
    if is_divided:
        depths = [schedule.shares[tier].num_layers for tier in schedule.prefix_workers]
        return schedule.rows(samples, least=chain.least_samples(max(depths, default=0)))
    nothing = slice(samples, samples)
    return {**dict.fromkeys(schedule.shares, nothing), schedule.owner: slice(0, samples)}


def _length(rows: slice) -> int:
    return int(rows.stop - rows.start)
