"""Which tier has which weights, and bringing them up to date.

The owner alone has all of them after a step; a prefix worker has those of its layers. Every tier
keeps the same books, so that a transfer needs no negotiation: the owner sends what the books say is
missing, the other tier waits for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_hiertrain.execution.optimizers import with_own_kernels
from lightning_hiertrain.execution.unheld import Unheld
from lightning_hiertrain.partition.chain import LayerChain
from lightning_hiertrain.schedule import Schedule
from lightning_hiertrain.transport.collectives import Collectives
from lightning_hiertrain.transport.network import Network


class Stateful(Protocol):
    """What is needed of Lightning's precision plugin."""

    def state_dict(self) -> dict[str, Any]:
        """Returns its state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a state."""


class Replicas:
    """The books of one run.

    Args:
        network: The links of this tier.
        module: The user's module.
        owner: The tier that has all weights now; so has every other one at the start.
    """

    def __init__(self, network: Network, module: nn.Module, owner: str) -> None:
        self._network = network
        self._module = module
        self._stale: dict[str, set[str]] = {name: set() for name in network.topology.names}
        self._with_buffers = set(network.topology.names)
        """Tiers that have the newest buffers."""
        self._transfers = 0
        self._unheld = Unheld(module)
        self.owner = owner

    def stepped(self, schedule: Schedule, chain: LayerChain, trained: set[str]) -> None:
        """Notes an update: the owner has new weights, the prefix workers have theirs back.

        Args:
            schedule: The schedule of the step.
            chain: The model's chain of layers.
            trained: The parameters that are trained.
        """
        self.owner = schedule.owner
        self._with_buffers = {schedule.owner}
        for tier, stale in self._stale.items():
            if tier in schedule.prefix_workers:
                depth = schedule.shares[tier].num_layers
                stale |= trained.difference(chain.parameters_through(depth))
            elif tier != schedule.owner:
                stale |= trained

    def release(self) -> None:
        """Frees the memory of this tier's outdated weights until they are brought up to date."""
        self._unheld.release(self._stale[self._network.tier])

    def close(self) -> None:
        """Gives this tier's weights memory again, if a run has ended too early to bring them."""
        self._unheld.close()

    def changed_by_hand(self, names: Iterable[str]) -> None:
        """Notes that the user's code has changed weights on the owner."""
        names = set(names)
        for tier, stale in self._stale.items():
            if tier != self.owner:
                stale |= names

    def bring(
        self, target: str, names: Iterable[str] | None = None, *, with_buffers: bool = False
    ) -> None:
        """Brings weights of one tier up to date; all tiers call this together.

        Args:
            target: The tier.
            names: The parameters that it needs; `None` for all of them and the buffers.
            with_buffers: Whether it needs the buffers also if it needs certain parameters only.
        """
        with_buffers |= names is None
        missing = self._stale[target]
        wanted = missing if names is None else missing.intersection(names)
        has_all = not wanted and (not with_buffers or target in self._with_buffers)
        if target == self.owner or has_all:
            return
        self._transfers += 1
        tag = f"weights/{self._transfers}"
        if self._network.tier == self.owner:
            state = self._tensors(parameters=wanted, buffers=with_buffers)
            self._network.send(target, tag, {name: x.detach().clone() for name, x in state.items()})
        elif self._network.tier == target:
            received = self._network.receive(self.owner, tag, operation="receive weights")
            self._unheld.hold(received)
            state = self._tensors(parameters=wanted, buffers=with_buffers)
            with torch.no_grad():
                for name, value in received.items():
                    state[name].copy_(value)
        self._stale[target] = missing - set(wanted)
        if with_buffers:
            self._with_buffers.add(target)

    def move(self, value: Any, source: str, target: str) -> Any:
        """Moves a state from one tier to another; all tiers call this together.

        Returns:
            On `target` what `source` passed, elsewhere `None`.
        """
        self._transfers += 1
        tag = f"state/{self._transfers}"
        if source == target:
            return value if self._network.tier == target else None
        if self._network.tier == source:
            self._network.send(target, tag, value)
        if self._network.tier == target:
            return self._network.receive(source, tag, operation="receive a state")
        return None

    def trust_owner_only(self) -> None:
        """Notes that weights and buffers may be others than after the last update."""
        names = {name for name, _ in self._module.named_parameters()}
        for tier, stale in self._stale.items():
            if tier != self.owner:
                stale |= names
        self._with_buffers = {self.owner}

    def move_ownership(
        self, target: str, optimizers: Sequence[Optimizer], precision: Stateful
    ) -> None:
        """Makes another tier the owner, with the optimizers' state; all tiers call this together.

        Args:
            target: The new owner, which has the newest weights already.
            optimizers: The run's optimizers.
            precision: The precision plugin.
        """
        old, self.owner = self.owner, target
        if old == target:
            return
        state = None
        if self._network.tier == old:
            state = {
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                "precision": precision.state_dict(),
            }
        moved = self.move(state, old, target)
        if moved is not None:
            for optimizer, value in zip(optimizers, moved["optimizers"], strict=True):
                optimizer.load_state_dict(with_own_kernels(optimizer, value))
            if moved["precision"]:
                precision.load_state_dict(moved["precision"])
        elif self._network.tier == old:
            for optimizer in optimizers:
                optimizer.state.clear()

    def all_are_equal(self) -> None:
        """Notes that all tiers have the same weights, for example those of a checkpoint."""
        self._unheld.hold(self._stale[self._network.tier])
        for stale in self._stale.values():
            stale.clear()
        self._with_buffers = set(self._stale)

    def equalise(self, source: str, collectives: Collectives) -> None:
        """Gives all tiers one tier's weights and buffers; all tiers call this together.

        Only those that differ travel.

        Args:
            source: The tier.
            collectives: For exchanging the digests.
        """
        state = self._tensors(
            parameters={n for n, _ in self._module.named_parameters()}, buffers=True
        )
        own = {name: _digest(value) for name, value in state.items()}
        digests = collectives.by_tier(own)
        right = digests[source]
        self._transfers += 1
        tag = f"weights/{self._transfers}"
        for tier, theirs in digests.items():
            if set(theirs) != set(right):
                raise ValueError(
                    f"the model on tier {tier!r} has other parameters than on {source!r}: "
                    f"{sorted(set(theirs) ^ set(right))[:5]}; run the same script on every tier"
                )
            names = [name for name in right if theirs[name] != right[name]]
            if not names:
                continue
            if self._network.tier == source:
                self._network.send(
                    tier, tag, {name: state[name].detach().clone() for name in names}
                )
            elif self._network.tier == tier:
                received = self._network.receive(source, tag, operation="receive the first weights")
                with torch.no_grad():
                    for name, value in received.items():
                        state[name].copy_(value)

    def _tensors(self, *, parameters: set[str], buffers: bool) -> dict[str, torch.Tensor]:
        state = {name: p for name, p in self._module.named_parameters() if name in parameters}
        return {**state, **(dict(self._module.named_buffers()) if buffers else {})}


def _digest(tensor: torch.Tensor) -> str:
    """Returns a short word that differs when shape, type or any value does."""
    content = tensor.detach().cpu().contiguous()
    words = hashlib.blake2b(f"{content.dtype}{tuple(content.shape)}".encode(), digest_size=16)
    words.update(content.reshape(-1).view(torch.uint8).numpy().data)
    return words.hexdigest()
