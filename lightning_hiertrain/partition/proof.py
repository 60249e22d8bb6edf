"""Proving cuts with numbers: a divided batch must give the loss and the gradients of the whole one.

One run puts a sample of its own behind every cut at once. Where that fails, the cuts are tried by halves, and those
that fail alone are dropped; so a captured batch size, mixed samples or a value that slipped past the tracer cost cuts, never
correctness. Chance and batch statistics are switched off meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hiertrain.errors import TraceError
from lightning_hiertrain.partition.calls import call_without_chance, tensors_in
from lightning_hiertrain.partition.chain import LayerChain
from lightning_hiertrain.partition.passage import CutReached, Passage, Tap
from lightning_hiertrain.partition.rows import batch_leaves, repeat_rows, with_leaves
from lightning_hiertrain.partition.views import filled, owner_leaves, prefix_leaves

log = logging.getLogger(__name__)

_TOLERANCE = 1e-3
"""Relative; float32 rounding of a deep model stays below, a wrong row does not."""

Step = Callable[[Any], Any]


@dataclass(frozen=True)
class _Outcome:
    """Sums over what a step returned, and the gradients of its first floating tensor."""

    values: list[Tensor]
    gradients: list[Tensor | None]


def proven(
    chain: LayerChain, step: Step, module: nn.Module, batch: Any, split: Sequence[int]
) -> LayerChain:
    """Returns the chain with only those cuts that divide the batch without changing the result."""
    def hold(depths: Sequence[int]) -> bool:
        workers = dict.fromkeys(depths, 1)
        return all(
            _Check(chain, step, module, batch, split, own, workers).holds() for own in (1, 0)
        )

    def good(depths: Sequence[int]) -> list[int]:
        if not depths or hold(depths):
            return list(depths)
        if len(depths) == 1:
            return []
        half = len(depths) // 2
        return good(depths[:half]) + good(depths[half:])

    everything = range(1, len(chain) + 1)
    depths = good(everything)
    if len(depths) == len(everything):
        return chain
    return _without_other_cuts(chain, depths if not depths or hold(depths) else [])


def _without_other_cuts(chain: LayerChain, depths: Sequence[int]) -> LayerChain:
    """Joins the layers between the cuts that remain."""
    layers, start = [], 0
    for depth in depths:
        joined = chain.layers[start:depth]
        layers.append(
            replace(
                chain[depth - 1],
                parameters=tuple(name for layer in joined for name in layer.parameters),
                parameter_bytes=sum(layer.parameter_bytes for layer in joined),
            )
        )
        start = depth
    count = layers[-1].last_call + 1 if layers else 0
    return replace(
        chain,
        layers=tuple(layers),
        calls=chain.calls[:count],
        first_leaf_use=tuple(min(i, count) for i in chain.first_leaf_use),
        last_leaf_use=tuple(min(i, count) for i in chain.last_leaf_use),
    )


@dataclass(frozen=True)
class _Check:
    """One division of a small batch: `own` rows for the owner, some for a prefix worker at each depth."""

    chain: LayerChain
    step: Step
    module: nn.Module
    batch: Any
    split: Sequence[int]
    own: int
    workers: Mapping[int, int]

    def holds(self) -> bool:
        total = self.own + sum(self.workers.values())
        rows = repeat_rows(self.batch, self.split, total)
        try:
            whole = self._outcome(lambda: self._whole(rows))
            divided = self._outcome(lambda: self._divided(rows, total))
        except Exception as error:
            log.debug("cuts after layers %s: %s", list(self.workers), error)
            return False
        return all(
            _close(x, y)
            for x, y in zip(
                (*whole.values, *whole.gradients),
                (*divided.values, *divided.gradients),
                strict=True,
            )
        )

    def _whole(self, rows: Any) -> Any:
        with Passage(self.chain, batch_leaves(rows), num_rows=-1, taps={}, call=call_without_chance):
            return self.step(rows)

    def _divided(self, rows: Any, total: int) -> Any:
        received = self._activations(rows, total)
        counts, taps, behind = self.own, dict[int, Tap](), {}
        for depth, count in self.workers.items():
            taps[depth] = _joiner(received[depth], self.chain[depth - 1].output.dim, first=counts == 0)
            counts += count
            behind[depth] = counts
        first = min(self.workers)
        seen = owner_leaves(self.chain, batch_leaves(rows), first, self.own)
        leaves = filled(self.chain, seen, self.own, batch_leaves(rows)[0].device)
        passage = Passage(
            self.chain,
            leaves,
            num_rows=self.own,
            taps=taps,
            rows_behind=behind,
            call=call_without_chance,
        )
        with passage:
            result = self.step(with_leaves(rows, leaves))
        passage.check_complete()
        return result

    def _activations(self, rows: Any, total: int) -> dict[int, Tensor]:
        """Runs the prefix on the workers' rows and takes from each cut those that leave the chain there."""
        deepest = max(self.workers)
        part = slice(self.own, total)
        seen = prefix_leaves(self.chain, batch_leaves(rows), deepest, part)
        leaves = filled(self.chain, seen, total - self.own, batch_leaves(rows)[0].device)
        taken: dict[int, Tensor] = {}
        start = 0
        bounds = {}
        for depth, count in self.workers.items():
            bounds[depth] = (start, count)
            start += count

        def tap(depth: int) -> Tap:
            def take(output: Tensor) -> Tensor:
                shape = self.chain[depth - 1].output
                first, count = bounds[depth]
                taken[depth] = output.narrow(shape.dim, first * shape.per_sample, count * shape.per_sample)
                if depth == deepest:
                    raise CutReached(output)
                # An in-place call behind the cut must not reach what was taken.
                taken[depth] = taken[depth].clone()
                return output

            return take

        passage = Passage(
            self.chain,
            leaves,
            num_rows=total - self.own,
            taps={depth: tap(depth) for depth in self.workers},
            call=call_without_chance,
        )
        try:
            with passage:
                self.step(with_leaves(rows, leaves))
        except CutReached:
            return taken
        passage.check_complete()
        raise TraceError("a step was not left at its cut")

    def _outcome(self, run: Callable[[], Any]) -> _Outcome:
        with torch.enable_grad():
            values = [x.double().sum() for x in tensors_in(run()) if x.is_floating_point()]
            parameters = [p for p in self.module.parameters() if p.requires_grad]
            gradients: list[Tensor | None] = [None] * len(parameters)
            roots = [value for value in values if value.requires_grad]
            if roots and parameters:
                found = torch.autograd.grad(roots[0], parameters, allow_unused=True)
                gradients = list(found)
        return _Outcome([value.detach() for value in values], gradients)


def _joiner(received: Tensor, dim: int, *, first: bool) -> Tap:
    return lambda own: received if first else torch.cat((own, received), dim)


def _close(x: Tensor | None, y: Tensor | None) -> bool:
    if x is None or y is None:
        return x is y or not torch.any(y if x is None else x)  # type: ignore[arg-type]
    scale = max(float(x.abs().max()), float(y.abs().max()), 1e-12)
    return x.shape == y.shape and float((x - y).abs().max()) <= _TOLERANCE * scale
