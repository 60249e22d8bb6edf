"""Proving cuts with numbers: a divided batch must give the loss and the gradients of the whole one.

One run puts a sample of its own behind every cut at once. Where that fails, the cuts are tried by
halves, and those that fail alone are dropped; so a captured batch size, mixed samples or a value
that slipped past the tracer cost cuts, never correctness. Chance and batch statistics are switched
off meanwhile, and the samples are made different from one another.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hiertrain.errors import TraceError
from lightning_hiertrain.partition.calls import numbers_in, tensors_in
from lightning_hiertrain.partition.chain import LayerChain, RowShape
from lightning_hiertrain.partition.chance import call_without_chance
from lightning_hiertrain.partition.isolation import NARROW, in_double, same_buffers
from lightning_hiertrain.partition.passage import CutReached, Passage, Tap
from lightning_hiertrain.partition.rows import (
    batch_leaves,
    repeat_rows,
    select_rows,
    with_leaves,
)
from lightning_hiertrain.partition.views import filled, owner_leaves, prefix_leaves

log = logging.getLogger(__name__)

_TOLERANCE = 1e-3
"""Relative; float32 rounding of a deep model stays below, a wrong row does not."""
_DOUBLE_TOLERANCE = 1e-6
"""The same in float64."""
_NOISE = 1e-3
"""Relative to the tolerance on the largest gradient: what a gradient that is 0 but for rounding (of
an attention key's bias) may differ by."""
_LARGE = 1 << 16
"""Entries above which gradients are compared by weighted sums."""
_LEVELS = {1: 0.9, 0: 0.1}
"""What random numbers become, by the owner's own rows."""

Step = Callable[[Any], Any]


@dataclass(frozen=True)
class _Outcome:
    """What a step returned, also plain numbers, and digests of its first tensor's gradients."""

    values: list[Tensor]
    gradients: list[Tensor | None]


def proven(
    chain: LayerChain, step: Step, module: nn.Module, batch: Any, split: Sequence[int]
) -> LayerChain:
    """Returns the chain with only those cuts that divide the batch without changing the result.

    What the owner sees of the batch depends on its first cut, so that the cuts are proven in groups
    with the same view, its deepest cut alone, so that the owner goes through all of the chain on
    its own rows or on placeholders, and each group together with all cuts behind it.
    """
    wholes: dict[Any, _Outcome] = {}

    @functools.cache
    def hold_turned(depths: tuple[int, ...], turn: int) -> bool:
        workers = dict.fromkeys(depths, 1 if len(depths) > 1 else 2)
        return all(
            _Check(chain, step, module, batch, split, own, turn, workers, wholes).holds()
            for own in (2, 0)
        )

    def hold(depths: Sequence[int]) -> bool:
        return hold_turned(tuple(depths), 0)

    def holds_alone(depth: int) -> bool:
        # Where the owner takes its own of all rows, samples may come in order (by length), and a
        # cut must not rest on which of them is the owner's.
        shared = any(
            chain.is_read_before(i, depth) and chain.is_read_behind(i, depth)
            for i in range(len(chain.leaf_shapes))
        )
        return all(hold_turned((depth,), turn) for turn in range(3 if shared else 1))

    def good(depths: Sequence[int]) -> list[int]:
        if not depths or hold(depths):
            return list(depths)
        if len(depths) == 1:
            return []
        half = len(depths) // 2
        return good(depths[:half]) + good(depths[half:])

    def view(depth: int) -> tuple[bool, ...]:
        return tuple(chain.is_read_behind(i, depth) for i in range(len(chain.leaf_shapes)))

    everything = range(1, len(chain) + 1)
    groups = [list(group) for _, group in itertools.groupby(everything, view)]
    depths: list[int] = []
    for group in reversed(groups):
        proved = good(group)
        while proved and not holds_alone(proved[-1]):
            log.debug("the cut after layer %s does not hold alone", proved.pop())
        together = proved + depths
        if proved and (not depths or hold(together)):
            depths = together
        elif proved:
            log.debug("cuts after layers %s do not go with those behind them", proved)
    return chain if len(depths) == len(everything) else _without_other_cuts(chain, depths)


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
    """One division of a small batch: `own` rows for the owner, some for a worker at each depth."""

    chain: LayerChain
    step: Step
    module: nn.Module
    batch: Any
    split: Sequence[int]
    own: int
    turn: int
    """How many rows the batch is turned by."""
    workers: Mapping[int, int]
    wholes: dict[Any, _Outcome]
    """Outcomes of whole batches, kept from one check to the next."""

    def holds(self) -> bool:
        total = self.own + sum(self.workers.values())
        rows = repeat_rows(self.batch, self.split, total)
        order = torch.arange(total).roll(-self.turn)
        rows = _distinct(select_rows(rows, self.split, order), self.split)
        try:
            if self._agree(rows, total, _TOLERANCE):
                return True
            # Rounding may turn a maximum or the sign of an activation over, and then a gradient
            # jumps. Not in float64, if the model can be run in it.
            with in_double(self.module):
                rows = with_leaves(rows, [_double(leaf) for leaf in batch_leaves(rows)])
                check = replace(self, chain=_in_double(self.chain))
                return check._agree(rows, total, _DOUBLE_TOLERANCE)
        except Exception as error:
            log.debug("cuts after layers %s: %s", list(self.workers), error)
            return False

    def _agree(self, rows: Any, total: int, tolerance: float) -> bool:
        # The divided one first: it is where a wrong cut raises an error.
        divided = self._outcome(lambda: self._divided(_fresh(rows), total))
        key = (total, self.own, self.turn, tolerance)
        if key not in self.wholes:
            self.wholes[key] = self._outcome(lambda: self._whole(_fresh(rows)))
        whole = self.wholes[key]
        sizes = [_size(x) for x in whole.gradients if x is not None]
        noise = tolerance * _NOISE * max(sizes, default=0.0)
        return _same(whole.values, divided.values, tolerance, 0.0) and _same(
            whole.gradients, divided.gradients, tolerance, noise
        )

    @property
    def _call(self) -> Callable[..., Any]:
        return functools.partial(call_without_chance, level=_LEVELS[bool(self.own)])

    def _whole(self, rows: Any) -> Any:
        leaves = batch_leaves(rows)
        with Passage(self.chain, leaves, num_rows=-1, taps={}, call=self._call):
            return self.step(rows)

    def _divided(self, rows: Any, total: int) -> Any:
        received = self._activations(_fresh(rows), total)
        counts, taps, behind = self.own, dict[int, Tap](), {}
        for depth, count in self.workers.items():
            dim = self.chain[depth - 1].output.dim
            taps[depth] = _joiner(received[depth], dim, first=counts == 0)
            counts += count
            behind[depth] = counts
        first = min(self.workers)
        seen = owner_leaves(self.chain, batch_leaves(rows), first, self.own)
        leaves = filled(self.chain, seen, self.own, batch_leaves(rows))
        passage = Passage(
            self.chain,
            leaves,
            num_rows=self.own,
            taps=taps,
            rows_behind=behind,
            call=self._call,
        )
        with passage:
            result = self.step(with_leaves(rows, leaves))
        passage.check_complete()
        return result

    def _activations(self, rows: Any, total: int) -> dict[int, Tensor]:
        """Runs the prefix on the workers' rows and takes from each cut those that leave there."""
        deepest = max(self.workers)
        part = slice(self.own, total)
        seen = prefix_leaves(self.chain, batch_leaves(rows), deepest, part)
        leaves = filled(self.chain, seen, total - self.own, batch_leaves(rows))
        starts = dict(
            zip(self.workers, itertools.accumulate(self.workers.values(), initial=0), strict=False)
        )
        taken: dict[int, Tensor] = {}

        def take(depth: int, output: Tensor) -> Tensor:
            shape = self.chain[depth - 1].output
            start, count = starts[depth], self.workers[depth]
            rows = output.narrow(shape.dim, start * shape.per_sample, count * shape.per_sample)
            # As a link delivers it: in memory of its own, in the order of its dimensions.
            taken[depth] = rows.clone(memory_format=torch.contiguous_format)
            if depth == deepest:
                raise CutReached(output)
            return output

        passage = Passage(
            self.chain,
            leaves,
            num_rows=total - self.own,
            taps={depth: functools.partial(take, depth) for depth in self.workers},
            call=self._call,
        )
        try:
            with passage:
                self.step(with_leaves(rows, leaves))
        except CutReached:
            return taken
        passage.check_complete()
        raise TraceError("a step was not left at its cut")

    def _outcome(self, run: Callable[[], Any]) -> _Outcome:
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        kept = [p.grad for p in parameters]
        gradients: list[Tensor | None] = [None] * len(parameters)

        def digest(index: int, parameter: Tensor) -> None:
            # One gradient at a time: the data tier may be short of memory.
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None
            known, added = gradients[index], _digest(gradient)
            gradients[index] = added if known is None else known + added

        handles = []
        for index, parameter in enumerate(parameters):
            parameter.grad = None
            hook = functools.partial(digest, index)
            handles.append(parameter.register_post_accumulate_grad_hook(hook))
        try:
            with same_buffers(self.module), torch.enable_grad():
                result = run()
                values = list(tensors_in(result))
                root = next((value for value in values if value.requires_grad), None)
                if root is not None:
                    # Through `backward`, which checkpointed segments need.
                    _weighted_sum(root).backward()
                numbers = [torch.tensor(x, dtype=torch.float64) for x in numbers_in(result)]
                return _Outcome([*(x.detach().clone() for x in values), *numbers], gradients)
        finally:
            for handle in handles:
                handle.remove()
            for parameter, gradient in zip(parameters, kept, strict=True):
                parameter.grad = gradient


def _digest(gradient: Tensor) -> Tensor:
    """Boils a large matrix down to weighted sums along both sides; linear in the gradient."""
    if gradient.dim() < 2 or gradient.numel() <= _LARGE or gradient.layout is not torch.strided:
        return gradient.to_dense().flatten().clone()
    matrix = gradient.flatten(1)
    return torch.cat((matrix @ _weights(matrix[0]), _weights(matrix[:, 0]) @ matrix))


def _weights(like: Tensor) -> Tensor:
    # On the CPU first: not every accelerator knows float64.
    return torch.arange(1, like.numel() + 1, dtype=torch.float64).cos().to(like)


def _weighted_sum(value: Tensor) -> Tensor:
    """Sums with different weights: the sum of a softmax would have no gradient."""
    if value.numel() == 1:
        return value.reshape(())
    flat = value.flatten()
    return (flat * _weights(flat)).sum().abs()


def _joiner(received: Tensor, dim: int, *, first: bool) -> Tap:
    return lambda own: received if first else torch.cat((own, received), dim)


def _fresh(rows: Any) -> Any:
    """Returns a copy, since a step may change its batch in place."""
    return with_leaves(rows, [leaf.clone() for leaf in batch_leaves(rows)])


def _distinct(rows: Any, split: Sequence[int]) -> Any:
    """Returns rows that differ, whatever the example was, and lie between it and 0."""
    leaves = batch_leaves(rows)
    generator = torch.Generator().manual_seed(len(leaves))
    for position in split:
        leaf = leaves[position]
        if not leaf.is_floating_point() and not leaf.is_complex():
            continue
        chance = torch.rand(leaf.shape, generator=generator).to(leaf)
        everything_alike = bool((leaf == leaf.flatten()[0]).all()) if leaf.numel() else True
        factor = chance[(slice(None),) + (slice(0, 1),) * (leaf.dim() - 1)]
        leaves[position] = chance if everything_alike else leaf * (1 - factor / 2)
    return with_leaves(rows, leaves)


def _same(
    whole: Sequence[Tensor | None],
    divided: Sequence[Tensor | None],
    tolerance: float,
    noise: float,
) -> bool:
    return len(whole) == len(divided) and all(
        _close(x, y, tolerance, noise) for x, y in zip(whole, divided, strict=True)
    )


def _close(x: Tensor | None, y: Tensor | None, tolerance: float, noise: float) -> bool:
    if x is None or y is None:
        other = y if x is None else x
        return other is None or not bool(torch.any(other))
    if x.shape != y.shape:
        return False
    if not _is_number(x):
        return bool(torch.equal(x, y))
    if not x.numel():
        return True
    # A metric that has seen nothing is infinite on both sides.
    infinite = ~x.isfinite() & ((x == y) | (x.isnan() & y.isnan()))
    x, y = x.masked_fill(infinite, 0), y.masked_fill(infinite, 0)
    scale = max(_size(x), _size(y))
    return _size(x - y) <= tolerance * scale + noise


def _double(leaf: Tensor) -> Tensor:
    return leaf.double() if leaf.dtype in NARROW else leaf


def _in_double(chain: LayerChain) -> LayerChain:
    def shape(known: RowShape | None) -> RowShape | None:
        if known is None or getattr(torch, known.dtype) not in NARROW:
            return known
        return replace(known, dtype="float64")

    return replace(
        chain,
        calls=tuple(
            replace(call, outputs=tuple(shape(output) for output in call.outputs))
            for call in chain.calls
        ),
        leaf_shapes=tuple(shape(known) for known in chain.leaf_shapes),
    )


def _is_number(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _size(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x.detach(), torch.inf)) if x.numel() else 0.0
