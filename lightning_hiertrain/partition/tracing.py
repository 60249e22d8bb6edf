"""Finding the chain of layers in an unmodified model.

A cut may follow a call if, from there on, a single tensor carries the samples: nothing that was
computed from them earlier is used later, except what was made of the batch alone, without
parameters (a normalised image that is also the target), since every tier that has the batch can
make that again. Two recordings with different numbers of samples tell along which dimension the
samples lie in each tensor. `proof` then checks every cut with numbers.

No cut is made where a tier would need more than its own rows or would have to guess:

- while a random number that was drawn apart from the samples is still to be used;
- behind the first use of a value made of several samples of the batch (a maximum length);
- behind a value of the chain that left for Python, was kept or returned;
- behind the first random number that Python or NumPy drew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hiertrain.errors import TraceError
from lightning_hiertrain.partition.chain import Call, Kind, Layer, LayerChain, RowShape
from lightning_hiertrain.partition.isolation import same_buffers, same_chance
from lightning_hiertrain.partition.obstacles import obstacle
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
        module: Any module, used as it is: nothing in it is modified and no attribute changes but
            for what its own forward does.
        *example_inputs: What `module(...)` takes, the samples in the tensors' first dimension.

    Returns:
        The chain; `len(chain)` layers, a cut may follow any of them.

    Raises:
        TraceError: If the inputs cannot be split into samples or no cut was found.
    """
    return trace_step(lambda inputs: module(*inputs), module, example_inputs)


def trace_step(step: Callable[[Any], Any], module: nn.Module, batch: Any) -> LayerChain:
    """Finds the chain of layers in a step, for example a LightningModule's `training_step`.

    Args:
        step: Called with a batch; returns every tensor that is used afterwards (loss, logged
            values, outputs). It is run several times, so it must leave no trace: pass a step of a
            copy. Random numbers and buffers are restored.
        module: The module whose parameters the step uses.
        batch: An example batch with the samples in the tensors' first dimension.

    Raises:
        TraceError: If the batch cannot be split into samples or no cut was found.
    """
    samples = num_samples(batch)
    split = split_positions(batch, samples)
    recorded = []
    with same_chance(), same_buffers(module), torch.enable_grad():
        # What a model makes once and keeps (a table of positions, lazy parameters) is made first.
        _run_first(step, batch, split)
        for count in _COUNTS:
            rows = repeat_rows(batch, split, count)
            leaves = batch_leaves(rows)
            recorded.append(_Run(record(step, rows, leaves, split, module), leaves))
        few, many = recorded
        found, limits = _chain(few, many, split, module)
        chain = proven(found, step, module, batch, split) if found.layers else found
    if not chain.layers:
        if not limits:
            calls = few.recording
            limits = [obstacle(calls, _shapes(few, many), _last_use(calls), refuted=found)]
        raise TraceError(
            f"no cut point was found in `{type(module).__name__}`: at no point of its step does a "
            "single tensor carry the samples with each row depending on its own sample alone; a "
            "step that calls the model several times, mixes the samples of a batch, depends on "
            "random numbers that all samples share or returns inner activations cannot be divided "
            f"between tiers{''.join(f'. {limit}' for limit in limits)}"
        )
    return chain


def _run_first(step: Callable[[Any], Any], batch: Any, split: Sequence[int]) -> None:
    """Runs the step on a few samples; an error that the whole batch has, too, is the step's own."""
    try:
        step(repeat_rows(batch, split, _COUNTS[0]))
    except Exception as error:
        step(batch)
        raise TraceError(
            f"the step works on the whole batch of {num_samples(batch)} samples, and on "
            f"{_COUNTS[0]} of them it ends with {type(error).__name__}: {error}. The batch cannot "
            "be split into samples: let the dataloader yield tensors of shape (num_samples, ...), "
            "the first one among them, and let the step not rely on a batch size"
        ) from error


@dataclass(frozen=True)
class _Run:
    recording: Recording
    leaves: Sequence[Tensor]


def _chain(
    few: _Run, many: _Run, split: Sequence[int], module: nn.Module
) -> tuple[LayerChain, list[str]]:
    """Returns the chain as far as the recordings tell, and what kept it short."""
    calls = few.recording.calls
    pairs = list(zip(calls, many.recording.calls, strict=False))
    shapes = _shapes(few, many)
    aligned = next((i for i, (a, b) in enumerate(pairs) if a.name != b.name), len(pairs))
    limit, reasons = _limit(few.recording, shapes)
    ends = _layer_ends(calls[: min(aligned, limit)], shapes, _last_use(few.recording))
    first_leaf, last_leaf = _leaf_uses(few.recording, len(few.leaves))
    count = ends[-1] + 1 if ends else 0
    chain = LayerChain(
        layers=tuple(_layers(calls, shapes, ends, module)),
        calls=tuple(
            Call(
                name=call.name,
                kind=call.kind,
                outputs=shapes[i] if call.single or call.kind is Kind.RAW else (),
                reads_raw=call.reads_raw,
                module=call.module,
                changes_buffers=call.changes_buffers,
            )
            for i, call in enumerate(calls[:count])
        ),
        leaf_shapes=tuple(
            row_shape(x, y) if i in split else None
            for i, (x, y) in enumerate(zip(few.leaves, many.leaves, strict=True))
        ),
        first_leaf_use=tuple(min(i, count) for i in first_leaf),
        last_leaf_use=tuple(min(i, count) for i in last_leaf),
    )
    return chain, reasons


def _shapes(few: _Run, many: _Run) -> list[tuple[RowShape | None, ...]]:
    """Returns the shapes of the outputs of each call that both runs made."""
    return [
        tuple(row_shape(x, y) for x, y in zip(a.outputs, b.outputs, strict=False))
        for a, b in zip(few.recording.calls, many.recording.calls, strict=False)
    ]


def _limit(
    recording: Recording, shapes: Sequence[tuple[RowShape | None, ...]]
) -> tuple[int, list[str]]:
    """Returns the call from which on no cut may follow, and why."""
    calls = recording.calls
    limit, reasons = len(calls), []
    if recording.python_chance is not None:
        limit = recording.python_chance
        reasons.append(
            "Python's or NumPy's random numbers are drawn in the step: draw them in the dataset, "
            "or use torch's, one for each sample"
        )
    if recording.foreign is not None and recording.foreign[0] < limit:
        limit, shape = recording.foreign
        reasons = [
            f"a trained tensor of shape {shape} is no parameter of the module: make it one, and do "
            "not keep functions that have the module in them (a lambda, what `torch.compile` made "
            "of a method) as attributes"
        ]
    mixed: dict[int, RecordedCall] = {}
    for index, (call, outputs) in enumerate(zip(calls, shapes, strict=False)):
        inherited = next((mixed[i] for i in call.reads if i in mixed), None)
        if call.kind is Kind.RAW:
            mixes = any(shape is None for shape in outputs) and call.name not in _OF_SHAPE_ALONE
            if inherited or mixes:
                mixed[index] = inherited or call
        used = index if call.kind is Kind.MAIN and inherited else recording.escaped.get(index)
        source = inherited if call.kind is Kind.MAIN else mixed.get(index)
        if source and used is not None and used < limit:
            limit = used
            reasons = [
                f"{source.named} makes a value of several samples of the batch, ahead of the "
                "model: make it in the dataset, one for each sample"
            ]
    return limit, reasons if limit < len(calls) else []


_OF_SHAPE_ALONE = frozenset(
    [
        *(
            "new_zeros",
            "new_ones",
            "new_full",
            "new_empty",
            "new_tensor",
            "zeros_like",
            "ones_like",
        ),
        *("empty_like", "full_like"),
    ]
)
"""Functions whose result depends on no value of their tensor."""


def row_shape(few: Tensor, many: Tensor) -> RowShape | None:
    """Compares a tensor for a few samples with the same for more.

    Returns:
        Its shape, or `None` unless one dimension alone has grown with the samples.
    """
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
        shared = call.kind is Kind.CONSTANT and (grows or call.chance)
        if call.kind is Kind.MAIN or shared:
            carried_until = max(carried_until, last_use[index])
    return ends


def _leaf_uses(recording: Recording, num_leaves: int) -> tuple[list[int], list[int]]:
    """Returns for each leaf the first and the last main call that reads it or what was made of it.

    Leaves that a raw call combines must have the same rows wherever they are used: they count as
    one. A leaf that left for Python is read from then on.
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
    for leaf, index in recording.escaped_leaves.items():
        for member in groups[leaf]:
            first[member] = min(first[member], index)
            last[member] = end
    return first, last


def _layers(
    calls: Sequence[RecordedCall],
    shapes: Sequence[tuple[RowShape | None, ...]],
    ends: Sequence[int],
    module: nn.Module,
) -> list[Layer]:
    sizes = {name: p.numel() * p.element_size() for name, p in module.named_parameters()}
    containers = {name for name, child in module.named_modules() if list(child.children())}
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
