"""The owner's part of a training step.

It takes in activations, runs the rest, gathers gradients and returns weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hiertrain.errors import PeerLostError, TraceError
from lightning_hiertrain.execution.buffers import Buffers
from lightning_hiertrain.execution.by_hand import WeightsByHand
from lightning_hiertrain.execution.chunks import chunks_of
from lightning_hiertrain.execution.feed import MiniBatch
from lightning_hiertrain.execution.substitute import Passed, RowsOf, Substitute
from lightning_hiertrain.execution.watching import OwnerWatch
from lightning_hiertrain.execution.weights import (
    buffers_tag,
    gradients_tag,
    layers_with_parameters,
    new_buffers_tag,
    weights_tag,
)
from lightning_hiertrain.partition.chain import LayerChain
from lightning_hiertrain.partition.passage import Passage, Tap
from lightning_hiertrain.partition.rows import batch_leaves
from lightning_hiertrain.schedule import Schedule
from lightning_hiertrain.transport.codecs import decode, encode, gradient_codec
from lightning_hiertrain.transport.network import Network
from lightning_hiertrain.transport.observing import Doing

_SKIPPED = (
    "`training_step` ran the model on tier {!r} and returned nothing ahead of it on tier {!r}: a "
    "step may be skipped by its number, but not by samples of which each tier sees its share; "
    "leave them out in the dataset, or return None behind the model"
)


class Owner:
    """Runs the whole model on its own rows and the rest of it on everybody's.

    Args:
        network: The links of this tier.
        chain: The model's chain of layers.
        module: The user's module.
        rows_of: Brings the rows of a tier that died.
        without_trace: A context in which a step changes nothing in the user's objects.
    """

    def __init__(
        self,
        network: Network,
        chain: LayerChain,
        module: nn.Module,
        *,
        rows_of: RowsOf,
        without_trace: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._network = network
        self._chain = chain
        self._parameters = dict(module.named_parameters())
        self._buffers = Buffers(module, chain)
        self._substitute = Substitute(
            chain, module, self._buffers, rows_of=rows_of, without_trace=without_trace
        )
        self.by_hand = WeightsByHand(self._parameters)
        """The weights that the user's code may change."""
        self._returned: dict[str, Tensor] = {}
        """The weights that prefix workers have received, as they were then."""
        self._awaited: dict[str, _Awaited] = {}
        """What prefix workers still wait for, by worker."""
        self._watch: OwnerWatch | None = None
        """Of the mini-batch at hand, if somebody looks on."""

    def forward(self, mini_batch: MiniBatch, step: Callable[[Any], Any]) -> Any:
        """Runs the user's step on this tier's rows, joined at each cut by those that arrive there.

        Args:
            mini_batch: The mini-batch as the owner knows it.
            step: The user's step, called with the batch.

        Returns:
            What the step returned: the loss over the whole mini-batch.
        """
        if mini_batch.schedule.prefix_workers:
            self._buffers.mark()
        self._buffers.count(mini_batch)
        cuts = mini_batch.cuts
        observer, self._watch = self._network.observer, None
        if observer is not None:
            depths = [depth for _, depth, _ in cuts]
            self._watch = OwnerWatch(observer, self._chain, depths, mini_batch.owner_rows)
        passage: AbstractContextManager[Any] = nullcontext()
        if cuts:
            taps: dict[int, Tap] = {}
            behind: dict[int, int] = {}
            rows = mini_batch.owner_rows
            for depth in sorted({depth for _, depth, _ in cuts}):
                workers = [name for name, cut, _ in cuts if cut == depth]
                taps[depth] = functools.partial(
                    self._join, workers, depth, mini_batch, step, alone=rows == 0
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
        watched = nullcontext() if self._watch is None else self._watch.mode
        with Doing(self._network, "forward"), passage, watched:
            if self._watch is not None:
                self._watch.forward_from(0)
            output = step(mini_batch.batch)
        if isinstance(passage, Passage):
            if output is None and not passage.reached_a_cut:
                self._check_skipped(mini_batch)
            else:
                passage.check_complete()
        return output

    def _check_skipped(self, mini_batch: MiniBatch) -> None:
        """Makes sure that the prefix workers have skipped the step, too."""
        for worker, depth, _ in mini_batch.cuts:
            try:
                messages = self._messages(worker, depth, mini_batch)
            except PeerLostError:
                if not self._network.membership.spares(worker):
                    raise
                continue
            if any(message is not None for message in messages):
                raise TraceError(_SKIPPED.format(worker, self._network.tier))

    def _join(
        self,
        workers: list[str],
        depth: int,
        mini_batch: MiniBatch,
        step: Callable[[Any], Any],
        own: Tensor,
        *,
        alone: bool,
    ) -> Tensor:
        parts = [] if alone else [own]
        with Doing(self._network, "codec", "activations"):
            parts += [
                self._received(worker, depth, mini_batch, step, own.device) for worker in workers
            ]
        if self._watch is not None:
            self._watch.forward_from(depth)
        return parts[0] if len(parts) == 1 else torch.cat(parts, self._chain[depth - 1].output.dim)

    def _received(
        self,
        worker: str,
        depth: int,
        mini_batch: MiniBatch,
        step: Callable[[Any], Any],
        device: torch.device,
    ) -> Tensor:
        """Takes in the activations of one prefix worker, whose gradient goes back by itself."""
        chunks = chunks_of(mini_batch, worker, self._chain)
        try:
            received = self._messages(worker, depth, mini_batch)
        except PeerLostError:
            if not self._network.membership.spares(worker):
                raise
            return self._substitute.activations(worker, mini_batch, step)
        messages = [message for message in received if message is not None]
        if len(messages) < len(received):
            raise TraceError(_SKIPPED.format(self._network.tier, worker))
        pieces = [decode(message["activations"]).to(device) for message in messages]
        shape = self._chain[depth - 1].output
        joined = pieces[0] if len(pieces) == 1 else torch.cat(pieces, shape.dim)
        passed = Passed(
            mini_batch=replace(mini_batch, batch=None),
            step=step,
            seed=messages[0]["seed"],
            drawn_on=messages[0]["device"],
            gradient=None,
        )
        if any(message["requires_grad"] for message in messages):
            sizes = [shape.per_sample * (chunk.stop - chunk.start) for chunk in chunks]
            self._awaited[worker] = _Awaited(
                passed=passed,
                depth=depth,
                codec=mini_batch.schedule.codecs.get(worker, "none"),
                dim=shape.dim,
                sizes=sizes,
            )
            joined.requires_grad_()
            joined.register_hook(functools.partial(self._return_gradient, worker))
        elif self._network.membership.can_spare(worker):
            self._substitute.note(worker, passed)
        return joined

    def _messages(
        self, worker: str, depth: int, mini_batch: MiniBatch
    ) -> list[Mapping[str, Any] | None]:
        return [
            self._network.receive(
                worker,
                f"{mini_batch.index}/activations/{number}",
                operation=f"receive the activations of layer {depth}",
            )
            for number in range(len(chunks_of(mini_batch, worker, self._chain)))
        ]

    def _return_gradient(self, worker: str, gradient: Tensor | None) -> None:
        awaited = self._awaited.pop(worker, None)
        if awaited is None:
            return
        pieces: Sequence[Tensor | None] = [None] * len(awaited.sizes)
        if gradient is not None:
            pieces = torch.split(gradient.detach(), awaited.sizes, awaited.dim)
        codec = gradient_codec(awaited.codec)
        with Doing(self._network, "codec", "activation gradients"):
            for number, piece in enumerate(pieces):
                packed = None if piece is None else encode(piece, codec, stochastic=True)
                tag = f"{awaited.passed.mini_batch.index}/activation_gradients/{number}"
                self._network.send(worker, tag, packed)
        if self._network.membership.can_spare(worker):
            kept = None if gradient is None else gradient.detach()
            self._substitute.note(worker, replace(awaited.passed, gradient=kept))
        if gradient is not None and self._watch is not None:
            self._watch.backward_from(awaited.depth)

    def in_backward(self) -> Doing:
        """Returns the context in which the loss is carried back."""
        seen = self._watch is not None and self._watch.saw_end
        return Doing(self._network, *(("loss", "backward") if seen else ("backward",)))

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
        for worker, layer in reversed(self._exchanged(schedule)):
            gradients = self._gradients_of(worker, layer, index)
            for name, gradient in gradients.items():
                parameter = self._parameters[name]
                gradient = gradient.to(parameter.device)
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    parameter.grad += gradient
        if self._buffers:
            self._buffers.merge(
                {worker: self._buffers_of(worker, index) for worker in schedule.prefix_workers}
            )
        self._substitute.forget()

    def _gradients_of(self, worker: str, layer: int, index: int) -> Mapping[str, Tensor]:
        operation = f"receive the gradients of layer {layer}"
        try:
            gradients: Mapping[str, Tensor] = self._network.receive(
                worker, gradients_tag(index, layer), operation=operation
            )
        except PeerLostError:
            if not self._network.membership.spares(worker):
                raise
            return self._substitute.gradients(worker, layer)
        return gradients

    def _buffers_of(self, worker: str, index: int) -> Mapping[str, Tensor]:
        try:
            buffers: Mapping[str, Tensor] = self._network.receive(
                worker, buffers_tag(index), operation="receive changed buffers"
            )
        except PeerLostError:
            if not self._network.membership.spares(worker):
                raise
            return self._substitute.buffers(worker)
        return buffers

    def return_weights(self, index: int, schedule: Schedule, by_hand: Collection[str]) -> None:
        """Sends each prefix worker the new weights of its layers, in the order of their use.

        Args:
            index: The last mini-batch of the update.
            schedule: The schedule in force.
            by_hand: Which weights the user's code has changed.
        """
        with self._network.together():
            self._return_weights(index, schedule, by_hand)

    def _return_weights(self, index: int, schedule: Schedule, by_hand: Collection[str]) -> None:
        for worker in schedule.prefix_workers if self._buffers else ():
            buffers = self._buffers.shared_with(worker)
            self._network.send(worker, new_buffers_tag(index), buffers)
        self._returned.clear()
        for worker, layer in self._exchanged(schedule):
            weights = {}
            for name in self._chain[layer - 1].parameters:
                parameter = self._parameters[name]
                is_new = name in by_hand or (parameter.requires_grad and parameter.grad is not None)
                if is_new and name not in self._returned:
                    self._returned[name] = parameter.detach().clone()
                if name in self._returned:
                    weights[name] = self._returned[name]
            self._network.send(worker, weights_tag(index, layer), weights)

    def edited(self) -> dict[str, Tensor]:
        """Returns those weights that have changed since prefix workers received them."""
        return {
            name: self._parameters[name].detach().clone()
            for name, value in self._returned.items()
            if not torch.equal(self._parameters[name], value)
        }

    def _exchanged(self, schedule: Schedule) -> list[tuple[str, int]]:
        """Returns which layers' parameters go between it and which prefix worker, by layer."""
        pairs = [
            (worker, layer)
            for worker in schedule.prefix_workers
            for layer in layers_with_parameters(self._chain, schedule.shares[worker].num_layers)
        ]
        return sorted(pairs, key=lambda pair: pair[1])


@dataclass(frozen=True, kw_only=True)
class _Awaited:
    """The gradient of a prefix worker's activations, until backward has it."""

    passed: Passed
    depth: int
    codec: str
    dim: int
    sizes: list[int]
    """Of the chunks in which the worker waits for it, along `dim`."""
