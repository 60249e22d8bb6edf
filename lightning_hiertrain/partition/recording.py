"""Watching one run of a step: every torch call, what it read, what came out, under which module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import TorchFunctionMode

from lightning_hiertrain.partition.calls import (
    RANDOM,
    Function,
    call_without_chance,
    function_name,
    returns_tensor,
    tensors_in,
    writes_first_argument,
)
from lightning_hiertrain.partition.chain import Kind

_ESCAPES = frozenset(("item", "tolist", "numpy", "__float__", "__int__", "__index__", "__array__"))
"""Calls by which a value leaves for Python, where its further use cannot be seen."""


@dataclass(kw_only=True)
class RecordedCall:
    """One call of a torch function."""

    name: str
    module: str
    kind: Kind
    outputs: tuple[Tensor, ...]
    single: bool
    """Whether the result is one tensor."""
    reads: frozenset[int]
    """Indices of the calls whose results went in."""
    leaves: frozenset[int]
    """Positions of the batch leaves that went in, directly or through raw calls."""
    reads_raw: bool
    parameters: frozenset[str]


@dataclass(kw_only=True)
class Recording:
    """What one run of a step did."""

    calls: list[RecordedCall] = field(default_factory=list)
    escaped: set[int] = field(default_factory=set)
    """Calls whose result left for Python or was returned: used to the very end."""
    escaped_leaves: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class _Value:
    """Where a tensor came from."""

    kind: Kind
    call: int | None = None
    leaves: frozenset[int] = frozenset()
    parameters: frozenset[str] = frozenset()


class _Recorder(TorchFunctionMode):
    def __init__(self, leaves: Sequence[Tensor], split: Sequence[int], module: nn.Module) -> None:
        super().__init__()
        self.recording = Recording()
        self.module_path: list[str] = [""]
        self._values: dict[int, _Value] = {}
        self._keep: list[Tensor] = list(leaves)  # an id is only good while its tensor lives
        for position in split:
            self._values[id(leaves[position])] = _Value(Kind.RAW, leaves=frozenset((position,)))
        for name, parameter in module.named_parameters():
            self._values[id(parameter)] = _Value(Kind.CONSTANT, parameters=frozenset((name,)))
        for buffer in module.buffers():
            self._values[id(buffer)] = _Value(Kind.CONSTANT)

    def __torch_function__(
        self,
        func: Function,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = function_name(func)
        inputs = [self._value_of(x) for x in tensors_in((args, dict(kwargs)))]
        result = call_without_chance(func, args, kwargs)
        if not returns_tensor(name, result):
            if name in _ESCAPES:
                self.mark_escaped(inputs)
            return result
        self._add(name, result, inputs, written=args[0] if writes_first_argument(func, result, args) else None)
        return result

    def mark_escaped(self, values: Sequence[_Value]) -> None:
        for value in values:
            if value.call is not None:
                self.recording.escaped.add(value.call)
            if value.kind is Kind.RAW:
                self.recording.escaped_leaves |= value.leaves

    def mark_used_at_the_end(self, result: Any) -> None:
        """Notes the tensors that the step hands out."""
        known = (x for x in tensors_in(result) if id(x) in self._values)
        self.mark_escaped([self._values[id(x)] for x in known])

    def _value_of(self, tensor: Tensor) -> _Value:
        if id(tensor) not in self._values:
            # Made where no torch function shows, for example by a custom `autograd.Function`: taken for a constant if
            # it has no history, else for the work of whatever came last. Numbers prove the cuts later.
            value = _Value(Kind.CONSTANT)
            if tensor.grad_fn is not None and self.recording.calls:
                last = len(self.recording.calls) - 1
                value = _Value(self.recording.calls[last].kind, call=last)
            self._keep.append(tensor)
            self._values[id(tensor)] = value
        return self._values[id(tensor)]

    def _add(
        self, name: str, result: Any, inputs: Sequence[_Value], written: Tensor | None
    ) -> None:
        parameters = frozenset[str]().union(*(value.parameters for value in inputs))
        leaves = frozenset[int]().union(*(value.leaves for value in inputs))
        kinds = {value.kind for value in inputs}
        if Kind.MAIN in kinds or (Kind.RAW in kinds and (parameters or name in RANDOM)):
            kind = Kind.MAIN
        else:
            kind = Kind.RAW if Kind.RAW in kinds else Kind.CONSTANT
        outputs = tuple(tensors_in(result)) or ((written,) if written is not None else ())
        index = len(self.recording.calls)
        self.recording.calls.append(
            RecordedCall(
                name=name,
                module=self.module_path[-1],
                kind=kind,
                outputs=outputs,
                single=isinstance(result, Tensor),
                reads=frozenset(value.call for value in inputs if value.call is not None),
                leaves=leaves if kind is not Kind.CONSTANT else frozenset(),
                reads_raw=kind is Kind.MAIN and Kind.RAW in kinds,
                parameters=parameters,
            )
        )
        value = _Value(
            kind,
            call=index,
            leaves=leaves if kind is Kind.RAW else frozenset(),
            parameters=parameters if kind is Kind.CONSTANT else frozenset(),
        )
        for tensor in (*outputs, *(() if written is None else (written,))):
            self._keep.append(tensor)
            self._values[id(tensor)] = value


def record(
    step: Callable[[Any], Any],
    batch: Any,
    leaves: Sequence[Tensor],
    split: Sequence[int],
    module: nn.Module,
) -> Recording:
    """Runs `step(batch)` and records its torch calls.

    Args:
        step: Called with the batch; every tensor in what it returns counts as used after the step.
        batch: The batch, whose tensors are `leaves`.
        leaves: The batch's tensors.
        split: Positions of the leaves with one row a sample.
        module: Where parameters and module names come from.
    """
    recorder = _Recorder(leaves, split, module)
    with _module_paths(module, recorder.module_path), torch.enable_grad(), recorder:
        result = step(batch)
    recorder.mark_used_at_the_end(result)
    return recorder.recording


@contextmanager
def _module_paths(module: nn.Module, path: list[str]) -> Iterator[None]:
    """Keeps, on top of `path`, the name of the module whose forward is running."""
    names = {id(child): name for name, child in module.named_modules()}

    def enter(child: nn.Module, _: Any) -> None:
        path.append(names.get(id(child), path[-1]))

    def leave(child: nn.Module, _: Any, __: Any) -> None:
        path.pop()

    handles = (register_module_forward_pre_hook(enter), register_module_forward_hook(leave))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
