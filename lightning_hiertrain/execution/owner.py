"""The owner's part of a training step.

It takes in activations, runs the rest, gathers gradients and returns weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hiertrain.execution.feed import MiniBatch
from lightning_hiertrain.partition.chain import LayerChain
from lightning_hiertrain.partition.passage import Passage, Tap
from lightning_hiertrain.partition.rows import batch_leaves
from lightning_hiertrain.schedule import Schedule
from lightning_hiertrain.transport.network import Network


class Owner:
    """Runs the whole model on its own rows and the rest of it on everybody's.

    Args:
        network: The links of this tier.
        chain: The model's chain of layers.
        module: The user's module.
    """

    def __init__(self, network: Network, chain: LayerChain, module: nn.Module) -> None:
        self._network = network
        self._chain = chain
        self._parameters = dict(module.named_parameters())
        self._awaited: dict[str, int] = {}
        """Prefix workers that still wait for the gradient of their activations, and for which
        mini-batch."""

    def forward(self, mini_batch: MiniBatch, step: Callable[[Any], Any]) -> Any:
        """Runs the user's step on this tier's rows, joined at each cut by those that arrive there.

        Args:
            mini_batch: The mini-batch as the owner knows it.
            step: The user's step, called with the batch.

        Returns:
            What the step returned: the loss over the whole mini-batch.
        """
        cuts = mini_batch.cuts
        passage: AbstractContextManager[Any] = nullcontext()
        if cuts:
            taps: dict[int, Tap] = {}
            behind: dict[int, int] = {}
            rows = mini_batch.owner_rows
            for depth in sorted({depth for _, depth, _ in cuts}):
                workers = [name for name, cut, _ in cuts if cut == depth]
                taps[depth] = functools.partial(
                    self._join, workers, depth, mini_batch.index, alone=rows == 0
                )
                rows += sum(count for _, cut, count in cuts if cut == depth)
                behind[depth] = rows
            passage = Passage(
                self._chain,
                batch_leaves(mini_batch.batch),
                num_rows=mini_batch.owner_rows,
                taps=taps,
                rows_behind=behind,
            )
        with passage:
            output = step(mini_batch.batch)
        if isinstance(passage, Passage):
            passage.check_complete()
        return output

    def _join(
        self, workers: list[str], depth: int, index: int, own: Tensor, *, alone: bool
    ) -> Tensor:
        parts = [] if alone else [own]
        for worker in workers:
            message = self._network.receive(
                worker,
                f"{index}/activations",
                operation=f"receive the activations of layer {depth}",
            )
            received = message["activations"].to(own.device)
            if message["requires_grad"]:
                received.requires_grad_()
                received.register_hook(functools.partial(self._return_gradient, worker))
                self._awaited[worker] = index
            parts.append(received)
        return parts[0] if len(parts) == 1 else torch.cat(parts, self._chain[depth - 1].output.dim)

    def _return_gradient(self, worker: str, gradient: Tensor | None) -> None:
        index = self._awaited.pop(worker, None)
        if index is not None:
            message = None if gradient is None else gradient.detach()
            self._network.send(worker, f"{index}/activation_gradients", message)

    def finish_backward(self) -> None:
        """Releases prefix workers whose activations turned out not to matter for the loss."""
        for worker in list(self._awaited):
            self._return_gradient(worker, None)

    def add_gradients(self, index: int, schedule: Schedule) -> None:
        """Adds the prefix workers' gradients to its own.

        Args:
            index: The last mini-batch that the gradients are of.
            schedule: The schedule in force.
        """
        for worker in schedule.prefix_workers:
            gradients: Mapping[str, Tensor] = self._network.receive(
                worker, f"{index}/gradients", operation="receive gradients"
            )
            for name, gradient in gradients.items():
                parameter = self._parameters[name]
                gradient = gradient.to(parameter.device)
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad += gradient

    def return_weights(self, index: int, schedule: Schedule) -> None:
        """Sends each prefix worker the new weights of its layers."""
        for worker in schedule.prefix_workers:
            names = self._chain.parameters_through(schedule.shares[worker].num_layers)
            weights = {
                name: self._parameters[name].detach().clone()
                for name in names
                if self._parameters[name].requires_grad and self._parameters[name].grad is not None
            }
            self._network.send(worker, f"{index}/weights", weights)
