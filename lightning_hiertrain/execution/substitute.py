"""What a prefix worker that died leaves undone in a step, done by the owner.

A step need not be repeated as a whole. What the owner has taken in stays; what it still waits for
it computes from the prefix worker's own rows:

    lost in front of          the owner
    the activations           runs the prefix on those rows; backward then reaches its own weights
    the gradients             runs the prefix once more and carries back the gradient at the cut,
                              for every mini-batch since the last update
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hiertrain.errors import TraceError
from lightning_hiertrain.execution.buffers import Buffers
from lightning_hiertrain.execution.chunks import chunks_of
from lightning_hiertrain.execution.feed import MiniBatch
from lightning_hiertrain.execution.running import chance_of, run_to_cut
from lightning_hiertrain.partition.chain import LayerChain

log = logging.getLogger(__name__)

_OTHER_NUMBERS = (
    "the layers that tier %r has left undone draw random numbers, which are others on a device of "
    "kind %r than on one of kind %r: in this step the gradient of its samples is one with other "
    "numbers (dropout masks) than their loss"
)

RowsOf = Callable[[str, MiniBatch], Any]
"""Returns the batch as a prefix worker would have seen it."""


@dataclass(frozen=True, kw_only=True)
class Passed:
    """A prefix worker's part in one mini-batch, as far as it has come."""

    mini_batch: MiniBatch
    step: Callable[[Any], Any]
    """The user's step."""
    seed: int
    """Of the worker's random numbers."""
    drawn_on: str | None
    """The kind of device that drew them, `None` if it has not come so far."""
    gradient: Tensor | None
    """At the cut; `None` if the activations do not matter for the loss."""


class Substitute:
    """Computes what prefix workers that have died do not.

    Args:
        chain: The model's chain of layers.
        module: The user's module, with the newest weights.
        buffers: Its buffers.
        rows_of: Brings the rows of a tier that died.
        without_trace: A context in which a step changes nothing in the user's objects.
    """

    def __init__(
        self,
        chain: LayerChain,
        module: nn.Module,
        buffers: Buffers,
        *,
        rows_of: RowsOf,
        without_trace: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._chain = chain
        self._parameters = dict(module.named_parameters())
        self._buffers = buffers
        self._rows_of = rows_of
        self._without_trace = without_trace
        self._passed: dict[str, list[Passed]] = {}
        """By prefix worker: whose gradients are to come."""
        self._gradients: dict[str, dict[str, Tensor]] = {}

    def note(self, worker: str, passed: Passed) -> None:
        """Remembers what a prefix worker still owes the gradients of."""
        self._passed.setdefault(worker, []).append(passed)

    def activations(self, worker: str, mini_batch: MiniBatch, step: Callable[[Any], Any]) -> Tensor:
        """Returns the activations of a prefix worker's rows at its cut, as it would have."""
        seed = torch.initial_seed()
        passed = Passed(mini_batch=mini_batch, step=step, seed=seed, drawn_on=None, gradient=None)
        return self._run(worker, passed)

    def gradients(self, worker: str, layer: int) -> dict[str, Tensor]:
        """Returns a prefix worker's gradients, since the last update, of a layer's parameters."""
        found = self._all_gradients(worker)
        return {name: found[name] for name in self._chain[layer - 1].parameters if name in found}

    def buffers(self, worker: str) -> dict[str, Tensor]:
        """Returns the buffers that a prefix worker would have changed since the last update."""
        self._all_gradients(worker)
        return self._buffers.changed_for(worker)

    def forget(self) -> None:
        """Notes that an update was made."""
        self._passed.clear()
        self._gradients.clear()

    def _all_gradients(self, worker: str) -> dict[str, Tensor]:
        if worker in self._gradients:
            return self._gradients[worker]
        total = self._gradients[worker] = {}
        for passed in self._passed.get(worker, ()):
            depth = passed.mini_batch.schedule.shares[worker].num_layers
            names = [
                name
                for name in self._chain.parameters_through(depth)
                if self._parameters[name].requires_grad
            ]
            with torch.enable_grad():
                output = self._run(worker, passed)
                if passed.gradient is None:
                    continue
                gradients = torch.autograd.grad(
                    output,
                    [self._parameters[name] for name in names],
                    passed.gradient,
                    allow_unused=True,
                )
            for name, gradient in zip(names, gradients, strict=True):
                if gradient is not None:
                    total[name] = total[name] + gradient if name in total else gradient
        return total

    def _run(self, worker: str, passed: Passed) -> Tensor:
        mini_batch = passed.mini_batch
        depth = mini_batch.schedule.shares[worker].num_layers
        draws = self._chain.draws_random_numbers(depth)
        batch = self._rows_of(worker, mini_batch)
        own = next((x.device.type for x in self._parameters.values()), passed.drawn_on)
        if draws and passed.drawn_on not in (None, own):
            log.warning(_OTHER_NUMBERS, worker, passed.drawn_on, own)
        pieces = []
        with self._in_place_of(worker):
            for number, rows in enumerate(chunks_of(mini_batch, worker, self._chain)):
                with chance_of(passed.seed, worker, mini_batch.index, number, draws=draws):
                    piece = run_to_cut(self._chain, depth, passed.step, batch, rows)
                if piece is None:
                    raise TraceError(f"`training_step` returned nothing on the rows of {worker!r}")
                pieces.append(piece)
        dim = self._chain[depth - 1].output.dim
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    @contextmanager
    def _in_place_of(self, worker: str) -> Iterator[None]:
        with self._without_trace(), self._buffers.lent_to(worker):
            yield
