"""A prefix worker's part of a training step: the first layers on its own rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hiertrain.execution.buffers import Buffers
from lightning_hiertrain.execution.chunks import chunks_of
from lightning_hiertrain.execution.feed import MiniBatch
from lightning_hiertrain.execution.running import chance_of, run_to_cut
from lightning_hiertrain.execution.weights import (
    AwaitedWeights,
    buffers_tag,
    gradients_tag,
    layers_with_parameters,
    new_buffers_tag,
)
from lightning_hiertrain.partition.chain import LayerChain
from lightning_hiertrain.schedule import Schedule
from lightning_hiertrain.transport.codecs import decode, encode
from lightning_hiertrain.transport.network import Network
from lightning_hiertrain.transport.observing import Doing

_SMALL_BYTES = 16 << 10


class PrefixWorker:
    """Runs the first layers, chunk by chunk, and leaves the step at its cut.

    Args:
        network: The links of this tier.
        chain: The model's chain of layers.
        module: The user's module.
        overlap: Whether gradients leave layer by layer during backward and new weights are waited
            for only where they are used; else both travel in one go.
    """

    def __init__(
        self, network: Network, chain: LayerChain, module: nn.Module, *, overlap: bool
    ) -> None:
        self._network = network
        self._chain = chain
        self._overlap = overlap
        self._parameters = dict(module.named_parameters())
        self._weights = AwaitedWeights(network, chain, self._parameters)
        self._buffers = Buffers(module, chain)
        self._awaited_buffers: tuple[str, str] | None = None
        """Owner and tag of buffers that have not been received yet."""
        self._seed = torch.initial_seed()
        self._chunks: list[Tensor] = []
        """Activations whose backward is to come."""
        self._departed: set[int] = set()
        """Layers whose gradients have left during this backward."""
        self._index = -1

    def forward(self, mini_batch: MiniBatch, step: Callable[[Any], Any]) -> None:
        """Runs the user's step up to the cut and sends the owner what crosses it."""
        tier, schedule = self._network.tier, mini_batch.schedule
        self._index = mini_batch.index
        codec = schedule.codecs.get(tier, "none")
        self._chunks.clear()
        self._receive_buffers()
        self._buffers.mark()
        depth = schedule.shares[tier].num_layers
        draws = self._chain.draws_random_numbers(depth)
        for number, rows in enumerate(chunks_of(mini_batch, tier, self._chain)):
            chance = chance_of(self._seed, tier, mini_batch.index, number, draws=draws)
            arriving = self._weights.arriving() if self._weights else None
            with chance, self._doing("forward", number):
                activations = run_to_cut(
                    self._chain, depth, step, mini_batch.batch, rows, within=arriving
                )
            message: dict[str, Any] | None = None
            if activations is not None:
                self._chunks.append(activations)
                with self._doing("codec", number):
                    message = {
                        "activations": encode(activations, codec),
                        "requires_grad": activations.requires_grad,
                        "seed": self._seed,
                        "device": activations.device.type,
                    }
            tag = f"{mini_batch.index}/activations/{number}"
            self._network.send(schedule.owner, tag, message)

    def _doing(self, what: str, chunk: int) -> Doing:
        return Doing(self._network, what, f"chunk {chunk + 1}")

    def backward(self, owner: str, *, sends: Schedule | None) -> None:
        """Carries the gradient of the activations, as it arrives, back through the prefix.

        Args:
            owner: The owner.
            sends: The schedule in force, if the gradients of the parameters are due with this
                mini-batch; they then leave as soon as they are complete.
        """
        chunks = list(enumerate(self._chunks))
        self._chunks = []
        for number, activations in chunks:
            if not activations.requires_grad:
                continue
            with self._doing("codec", number):
                packed = self._network.receive(
                    owner,
                    f"{self._index}/activation_gradients/{number}",
                    operation="receive the gradients of the activations",
                )
                if packed is None:
                    continue
                gradient = decode(packed).to(activations.device)
            is_last = number == len(chunks) - 1
            departs = is_last and self._overlap and sends is not None
            departing = self._departing(sends) if departs and sends else nullcontext()
            with departing, self._doing("backward", number):
                torch.autograd.backward(activations, gradient)

    def forget(self) -> None:
        """Drops activations whose backward will not come: the owner's step returned no loss."""
        self._chunks.clear()

    def send_gradients(self, index: int, schedule: Schedule) -> None:
        """Sends the owner those gradients of the prefix that have not left during backward.

        Args:
            index: The last mini-batch that they are of.
            schedule: The schedule in force.
        """
        for layer in reversed(self._layers(schedule)):
            if layer not in self._departed:
                self._send_layer(layer, index, schedule)
        self._departed.clear()
        if self._buffers:
            changed = self._buffers.changed()
            self._network.send(schedule.owner, buffers_tag(index), changed)

    @contextmanager
    def _departing(self, schedule: Schedule) -> Iterator[None]:
        """Sends the gradients of a layer as soon as backward has completed them."""
        handles = []
        for layer in self._layers(schedule):
            names = self._chain[layer - 1].parameters
            trained = {name for name in names if self._parameters[name].requires_grad}
            for name in trained:
                complete = functools.partial(self._complete, name, trained, layer, schedule)
                handles.append(self._parameters[name].register_post_accumulate_grad_hook(complete))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _complete(
        self, name: str, missing: set[str], layer: int, schedule: Schedule, _: Tensor
    ) -> None:
        missing.discard(name)
        if not missing:
            self._send_layer(layer, self._index, schedule)
            self._departed.add(layer)

    def _send_layer(self, layer: int, index: int, schedule: Schedule) -> None:
        gradients = {}
        for name in self._chain[layer - 1].parameters:
            parameter = self._parameters[name]
            if parameter.grad is not None:
                gradients[name], parameter.grad = parameter.grad.detach(), None
        # Small ones wait for what comes next: to send them takes longer than their way.
        is_large = sum(gradient.nbytes for gradient in gradients.values()) > _SMALL_BYTES
        tag = gradients_tag(index, layer)
        self._network.send(schedule.owner, tag, gradients, at_once=is_large)

    def _layers(self, schedule: Schedule) -> list[int]:
        depth = schedule.shares[self._network.tier].num_layers
        return layers_with_parameters(self._chain, depth)

    def expect_weights(self, index: int, schedule: Schedule) -> None:
        """Notes that the new weights of the prefix are on their way; waits unless overlapping."""
        depth = schedule.shares[self._network.tier].num_layers
        self._weights.expect(index, schedule.owner, depth)
        if self._buffers:
            self._awaited_buffers = (schedule.owner, new_buffers_tag(index))
        if not self._overlap:
            self.settle()

    def correct(self, edited: Mapping[str, Tensor]) -> None:
        """Takes over what the owner has made of the weights since it returned them.

        What has been made of them here meanwhile, by a hook that runs on every tier, is undone.

        Args:
            edited: What `Owner.edited` returned.
        """
        self.settle()
        with torch.no_grad():
            for name, value in {**self._weights.received, **edited}.items():
                if name in self._weights.received:
                    self._parameters[name].copy_(value)

    def settle(self) -> None:
        """Waits for weights that are on their way."""
        self._weights.settle()
        self._receive_buffers()

    def _receive_buffers(self) -> None:
        if self._awaited_buffers is not None:
            owner, tag = self._awaited_buffers
            self._awaited_buffers = None
            self._buffers.load(self._network.receive(owner, tag, operation="receive buffers"))
