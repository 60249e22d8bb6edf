"""A prefix worker's part of a training step: the first layers on its own rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hiertrain.execution.feed import MiniBatch
from lightning_hiertrain.partition.chain import LayerChain
from lightning_hiertrain.partition.passage import CutReached, Passage
from lightning_hiertrain.partition.rows import batch_leaves
from lightning_hiertrain.schedule import Schedule
from lightning_hiertrain.transport.network import Network


class PrefixWorker:
    """Runs the first layers and leaves the step at its cut.

    Args:
        network: The links of this tier.
        chain: The model's chain of layers.
        module: The user's module.
    """

    def __init__(self, network: Network, chain: LayerChain, module: nn.Module) -> None:
        self._network = network
        self._chain = chain
        self._parameters = dict(module.named_parameters())
        self._activations: Tensor | None = None
        self._index = -1

    def forward(self, mini_batch: MiniBatch, step: Callable[[Any], Any]) -> None:
        """Runs the user's step up to the cut and sends the owner what crosses it."""
        tier, schedule = self._network.tier, mini_batch.schedule
        depth = schedule.shares[tier].num_layers
        passage = Passage(
            self._chain,
            batch_leaves(mini_batch.batch),
            num_rows=mini_batch.rows[tier].stop - mini_batch.rows[tier].start,
            taps={depth: _leave},
        )
        try:
            with passage:
                step(mini_batch.batch)
        except CutReached as cut:
            self._activations, self._index = cut.output, mini_batch.index
        else:
            passage.check_complete()
        assert self._activations is not None
        message = {
            "activations": self._activations.detach(),
            "requires_grad": self._activations.requires_grad,
        }
        self._network.send(schedule.owner, f"{mini_batch.index}/activations", message)

    def backward(self, owner: str) -> None:
        """Waits for the gradient of the activations and carries it back through the prefix."""
        activations, self._activations = self._activations, None
        if activations is None or not activations.requires_grad:
            return
        gradient = self._network.receive(
            owner,
            f"{self._index}/activation_gradients",
            operation="receive the gradients of the activations",
        )
        if gradient is not None:
            torch.autograd.backward(activations, gradient.to(activations.device))

    def forget(self) -> None:
        """Drops activations whose backward will not come: the owner's step returned no loss."""
        self._activations = None

    def send_gradients(self, index: int, schedule: Schedule) -> None:
        """Sends the owner the gradients of the prefix and gives them up."""
        names = self._chain.parameters_through(schedule.shares[self._network.tier].num_layers)
        gradients = {}
        for name in names:
            parameter = self._parameters[name]
            if parameter.grad is not None:
                gradients[name], parameter.grad = parameter.grad.detach(), None
        self._network.send(schedule.owner, f"{index}/gradients", gradients)

    def receive_weights(self, index: int, owner: str) -> None:
        """Waits for the new weights of the prefix."""
        weights = self._network.receive(owner, f"{index}/weights", operation="receive new weights")
        with torch.no_grad():
            for name, weight in weights.items():
                self._parameters[name].copy_(weight)


def _leave(output: Tensor) -> Tensor:
    raise CutReached(output)
