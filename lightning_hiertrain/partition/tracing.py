"""Finding the chain of layers in an unmodified model.

A cut may follow a call if, from there on, a single tensor carries the samples: nothing that was computed from them
earlier is used later, except what was made of the batch alone, without parameters (a normalised image that is also the
target), since every tier that has the batch can make that again. Two recordings with different numbers of samples tell
along which dimension the samples lie in each tensor. `proof` then checks every cut with numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_hiertrain.errors import TraceError
from lightning_hiertrain.partition.chain import Call, Kind, Layer, LayerChain, RowShape
from lightning_hiertrain.partition.proof import proven
from lightning_hiertrain.partition.recording import RecordedCall, Recording, record
from lightning_hiertrain.partition.rows import (
    batch_leaves,
    num_samples,
    repeat_rows,
    split_positions,
)

_COUNTS = (4, 8)
"""Sample counts of the two recordings."""


def trace_layers(module: nn.Module, *example_inputs: Any) -> LayerChain:
    """Finds the chain of layers in a module's forward and proves every cut with numbers.

    Args:
        module: Any module, used as it is: nothing in it is modified and no attribute changes but for what its own
            forward does.
        *example_inputs: What `module(...)` takes; tensors have the samples in their first dimension.

    Returns:
        The chain; `len(chain)` layers, a cut may follow any of them.

    Raises:
        TraceError: If the inputs cannot be split into samples or no cut was found.
    """
    return trace_step(lambda inputs: module(*inputs), module, example_inputs)


def trace_step(step: Callable[[Any], Any], module: nn.Module, batch: Any) -> LayerChain:
    """Finds the chain of layers in a step, for example a LightningModule's `training_step`.

    Args:
        step: Called with a batch; returns every tensor that is used afterwards (loss, logged values, outputs). It is run
            several times, so it must leave no trace: pass a step of a copy.
        module: The module whose parameters the step uses.
        batch: An example batch with the samples in the tensors' first dimension.

    Raises:
        TraceError: If the batch cannot be split into samples or no cut was found.
    """
    samples = num_samples(batch)
    split = split_positions(batch, samples)
    recordings = []
    for count in _COUNTS:
        rows = repeat_rows(batch, split, count)
        recordings.append((record(step, rows, batch_leaves(rows), split, module), batch_leaves(rows)))
    chain = _chain(*recordings[0], *recordings[1], split, module)
    chain = proven(chain, step, module, batch, split) if chain.layers else chain
    if not chain.layers:
        raise TraceError(
            f"no cut point was found in `{type(module).__name__}`: at no point of its step does a single tensor carry "
            "the samples with each row depending on its own sample alone; a step that calls the model several times, "
            "mixes the samples of a batch or returns inner activations cannot be divided between tiers"
        )
    return chain


def _chain(
    few: Recording,
    few_leaves: Sequence[Tensor],
    many: Recording,
    many_leaves: Sequence[Tensor],
    split: Sequence[int],
    module: nn.Module,
) -> LayerChain:
    end = len(few.calls)
    shapes = [
        tuple(row_shape(x, y) for x, y in zip(a.outputs, b.outputs, strict=False))
        for a, b in zip(few.calls, many.calls, strict=False)
    ]
    aligned = next(
        (i for i, (a, b) in enumerate(zip(few.calls, many.calls, strict=False)) if a.name != b.name),
        min(end, len(many.calls)),
    )
    last_use = _last_use(few)
    ends = _layer_ends(few.calls[:aligned], shapes, last_use)
    first_leaf, last_leaf = _leaf_uses(few, len(few_leaves))
    count = ends[-1] + 1 if ends else 0
    return LayerChain(
        layers=tuple(_layers(few.calls, shapes, ends, module)),
        calls=tuple(
            Call(
                name=call.name,
                kind=call.kind,
                outputs=shapes[i] if call.single else (),
                reads_raw=call.reads_raw,
            )
            for i, call in enumerate(few.calls[:count])
        ),
        leaf_shapes=tuple(
            row_shape(x, y) if i in split else None
            for i, (x, y) in enumerate(zip(few_leaves, many_leaves, strict=True))
        ),
        first_leaf_use=tuple(min(i, count) for i in first_leaf),
        last_leaf_use=tuple(min(i, count) for i in last_leaf),
    )


def row_shape(few: Tensor, many: Tensor) -> RowShape | None:
    """Compares a tensor for a few samples with the same for more; `None` unless one dimension alone has grown with them."""
    if few.dim() != many.dim():
        return None
    grown = [d for d in range(few.dim()) if few.size(d) != many.size(d)]
    if len(grown) != 1:
        return None
    (dim,) = grown
    per_sample, rest = divmod(few.size(dim), _COUNTS[0])
    if rest or per_sample * _COUNTS[1] != many.size(dim):
        return None
    return RowShape(
        shape=(*few.shape[:dim], 1, *few.shape[dim + 1 :]),
        dim=dim,
        per_sample=per_sample,
        dtype=str(few.dtype).removeprefix("torch."),
    )


def _last_use(recording: Recording) -> list[int]:
    """For each call, the index of the last call that reads its result."""
    last = [-1] * len(recording.calls)
    for index, call in enumerate(recording.calls):
        for source in call.reads:
            last[source] = index
    for index in recording.escaped:
        last[index] = len(recording.calls)
    return last


def _layer_ends(
    calls: Sequence[RecordedCall],
    shapes: Sequence[tuple[RowShape | None, ...]],
    last_use: Sequence[int],
) -> list[int]:
    """Returns the calls after which their single output alone carries the samples."""
    ends: list[int] = []
    carried_until = -1  # the last use of anything with samples that came before the call at hand
    for index, call in enumerate(calls):
        grows = any(shape is not None for shape in shapes[index])
        is_cut = (
            call.kind is Kind.MAIN
            and call.single
            and call.outputs[0].is_floating_point()
            and shapes[index][0] is not None
            and carried_until <= index < last_use[index]
        )
        if is_cut:
            ends.append(index)
        if call.kind is Kind.MAIN or (call.kind is Kind.CONSTANT and grows):
            carried_until = max(carried_until, last_use[index])
    return ends


def _leaf_uses(recording: Recording, num_leaves: int) -> tuple[list[int], list[int]]:
    """Returns for each leaf the first and the last main call that reads it or what was made of it.

    Leaves that a raw call combines must have the same rows wherever they are used: they count as one.
    """
    end = len(recording.calls)
    groups = [{leaf} for leaf in range(num_leaves)]
    for call in recording.calls:
        if call.kind is Kind.RAW:
            joined = set[int]().union(*(groups[leaf] for leaf in call.leaves))
            for leaf in joined:
                groups[leaf] = joined
    first, last = [end] * num_leaves, [-1] * num_leaves
    for index, call in enumerate(recording.calls):
        if call.kind is Kind.MAIN and call.reads_raw:
            for leaf in call.leaves:
                for member in groups[leaf]:
                    first[member] = min(first[member], index)
                    last[member] = max(last[member], index)
    for leaf in recording.escaped_leaves:
        for member in groups[leaf]:
            last[member] = end
    return first, last


def _layers(
    calls: Sequence[RecordedCall],
    shapes: Sequence[tuple[RowShape | None, ...]],
    ends: Sequence[int],
    module: nn.Module,
) -> list[Layer]:
    sizes = {name: p.numel() * p.element_size() for name, p in module.named_parameters()}
    containers = {name for name, child in module.named_modules() if any(True for _ in child.children())}
    used: Counter[str] = Counter()
    seen: set[str] = set()
    layers = []
    start = 0
    for end in ends:
        names = frozenset[str]().union(*(call.parameters for call in calls[start : end + 1])) - seen
        seen |= names
        parameters = tuple(name for name in sizes if name in names)
        output = shapes[end][0]
        assert output is not None
        name = _name(calls[end], containers)
        used[name] += 1
        layers.append(
            Layer(
                name=name if used[name] == 1 else f"{name}_{used[name]}",
                last_call=end,
                output=output,
                parameters=parameters,
                parameter_bytes=sum(sizes[name] for name in parameters),
                output_bytes_per_sample=output.bytes_per_sample,
            )
        )
        start = end + 1
    return layers


def _name(call: RecordedCall, containers: set[str]) -> str:
    if not call.module:
        return call.name
    return f"{call.module}.{call.name}" if call.module in containers else call.module
