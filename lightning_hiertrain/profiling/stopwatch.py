"""Timing one repetition of a step, layer by layer.

```
forward    start |layer 1| tap 1 |layer 2| tap 2 ... tap N | loss, metrics | end
backward   end |layer 1| gradient 1 |layer 2| ... gradient N | loss | start      (right to left)
```
A tap sees a layer's output when the layer is through; a hook on that output sees its gradient when
everything behind the cut is through. Frozen layers take no time backward. Where an in-place call on
a view has cut a hook off, the layers on both sides share the time between their neighbours.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from lightning_hiertrain.accelerators import synchronise
from lightning_hiertrain.partition import LayerChain, Passage
from lightning_hiertrain.partition.calls import tensors_in
from lightning_hiertrain.partition.rows import batch_leaves


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """Seconds of one run of the step, in parts that add up to the whole."""

    forward: tuple[float, ...]
    """By layer."""
    backward: tuple[float, ...]
    """By layer."""
    loss: float
    """Forward and backward of what follows the chain."""

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return sum(self.forward) + sum(self.backward) + self.loss


def time_step(
    chain: LayerChain,
    step: Callable[[Any], Any],
    batch: Any,
    num_samples: int,
    device: torch.device,
) -> Repetition:
    """Runs the step forward and backward on a batch and notes when each layer is through.

    Args:
        chain: The step's chain.
        step: Returns the loss as its first tensor that requires a gradient.
        batch: Its rows are the step's own to change.
        num_samples: Rows in the batch.
        device: Where the layers run; it is waited for before the clock is read.
    """
    count = len(chain)
    forward: list[float] = []
    gradients: list[float | None] = [None] * count
    needs_gradient = [False] * count

    def now() -> float:
        synchronise(device)
        return perf_counter()

    def note_gradient(layer: int, _: Tensor) -> None:
        gradients[layer] = now()

    def tap(layer: int, output: Tensor) -> Tensor:
        forward.append(now())
        if output.requires_grad:
            # The hook belongs to the value as it is now, whatever changes it in place later.
            needs_gradient[layer] = True
            output.register_hook(partial(note_gradient, layer))
        return output

    passage = Passage(
        chain,
        batch_leaves(batch),
        num_rows=num_samples,
        taps={depth: partial(tap, depth - 1) for depth in range(1, count + 1)},
    )
    collecting = gc.isenabled()
    gc.disable()
    try:
        start = now()
        with torch.enable_grad():
            with passage:
                result = step(batch)
            passage.check_complete()
            middle = now()
            loss = next((x for x in tensors_in(result) if x.requires_grad), None)
            if loss is not None:
                loss.backward()
            end = now()
    finally:
        if collecting:
            gc.enable()
    reached = _in_order(_fill([end, *_without_frozen(gradients, needs_gradient, end), middle]))
    return Repetition(
        forward=tuple(b - a for a, b in zip([start, *forward], forward, strict=False)),
        backward=tuple(reached[i] - reached[i + 1] for i in range(count)),
        loss=middle - forward[-1] + reached[count] - middle,
    )


def _without_frozen(
    gradients: list[float | None], needs_gradient: list[bool], end: float
) -> list[float | None]:
    """Puts the end of the backward where no gradient is needed: layers up to there take no time."""
    return [time if needed else end for time, needed in zip(gradients, needs_gradient, strict=True)]


def _in_order(times: list[float]) -> list[float]:
    """Lets no layer be through before the layer behind it.

    A layer that hands on its input (dropout of 0, a `to` that changes nothing) shares its gradient
    with the layer before, whose hook was there first.
    """
    return list(accumulate(reversed(times), max))[::-1]


def _fill(times: list[float | None]) -> list[float]:
    """Puts even steps where a time is missing; the first and the last are there."""
    known = [i for i, time in enumerate(times) if time is not None]
    filled: list[float] = []
    for left, right in pairwise(known):
        first, last = times[left], times[right]
        assert first is not None
        assert last is not None
        filled += [first + (last - first) * i / (right - left) for i in range(right - left)]
    last = times[-1]
    assert last is not None
    return [*filled, last]
