"""Watching one run of a step: every torch call, what it read, what came out, under which module."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import TorchFunctionMode

from lightning_hiertrain.partition.calls import (
    Function,
    function_name,
    leaves_for_python,
    returns_tensor,
    tensors_in,
    unrolled,
    version_of,
    writes_first_argument,
)
from lightning_hiertrain.partition.chain import Kind
from lightning_hiertrain.partition.chance import BATCH_STATISTICS, RANDOM, call_without_chance
from lightning_hiertrain.partition.places import running_line


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
    chance: bool
    """Whether a constant call drew random numbers or read some."""
    changes_buffers: bool
    parameters: frozenset[str]
    place: str
    """The line that made it, for example `"train.py:31"`."""

    @property
    def named(self) -> str:
        """The function and the line, for messages."""
        return f"`{self.name}` ({self.place})" if self.place else f"`{self.name}`"


@dataclass(kw_only=True)
class Recording:
    """What one run of a step did."""

    calls: list[RecordedCall] = field(default_factory=list)
    escaped: dict[int, int] = field(default_factory=dict)
    """Calls whose result left for Python or outlives the step, so that it counts as used to the
    very end, and how many calls had been made by then."""
    escape_places: dict[int, str] = field(default_factory=dict)
    """The lines by which they left, of those that did so in mid-step."""
    escaped_leaves: dict[int, int] = field(default_factory=dict)
    """The same for leaves of the batch."""
    lengths: list[str] = field(default_factory=list)
    """The lines that took the length of a tensor with samples in it."""
    python_chance: int | None = None
    """How many calls had been made when Python or NumPy first drew a random number."""
    foreign: tuple[int, tuple[int, ...]] | None = None
    """How many calls had been made when a trained tensor was met that is no parameter of the
    module, and its shape."""


@dataclass(frozen=True)
class _Value:
    """Where a tensor came from."""

    kind: Kind
    calls: frozenset[int] = frozenset()
    leaves: frozenset[int] = frozenset()
    parameters: frozenset[str] = frozenset()
    chance: bool = False


class _Recorder(TorchFunctionMode):
    def __init__(self, leaves: Sequence[Tensor], split: Sequence[int], module: nn.Module) -> None:
        super().__init__()
        self.recording = Recording()
        self.module_path: list[str] = [""]
        self._values: dict[int, _Value] = {}
        self._keep: list[Tensor] = []  # an id is only good while its tensor lives
        self._by_storage: dict[int, list[int]] = {}
        self._foreign: dict[int, tuple[int, ...]] = {}
        """Shapes of trained tensors that are no parameters of the module, by id."""
        self._python_states = _python_states()
        self._buffers = {id(buffer): buffer for buffer in module.buffers()}
        self.changed_buffers: set[int] = set()
        """Those that a call was seen to write into."""
        for position in split:
            leaf = leaves[position]
            self._set(leaf, _Value(Kind.RAW, leaves=frozenset((position,))))
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if id(parameter) not in self._values:
                self._set(parameter, _Value(Kind.CONSTANT, parameters=frozenset((name,))))
        for buffer in module.buffers():
            self._set(buffer, _Value(Kind.CONSTANT))

    def __torch_function__(
        self,
        func: Function,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        self.watch_python_chance()
        func, iterated = unrolled(func)
        name = function_name(func)
        inputs = [self._value_of(x) for x in tensors_in((args, dict(kwargs)))]
        version = version_of(args)
        buffers = [x for x in tensors_in((args, dict(kwargs))) if id(x) in self._buffers]
        versions = [buffer._version for buffer in buffers]
        result = call_without_chance(func, args, kwargs)
        changes = versions != [buffer._version for buffer in buffers]
        if changes:
            self.changed_buffers.update(id(buffer) for buffer in buffers)
        if not returns_tensor(name, result):
            if name == "__len__" and inputs and inputs[0].kind is not Kind.CONSTANT:
                self.recording.lengths.append(running_line())
            if leaves_for_python(name):
                self.mark_escaped(inputs, running_line())
            return result
        self._watch_foreign(tensors_in((args, dict(kwargs))))
        written = args[0] if writes_first_argument(func, args, version) else None
        self._add(name, result, inputs, written, changes_buffers=changes)
        return iter(result) if iterated else result

    def _watch_foreign(self, tensors: Iterator[Tensor]) -> None:
        shapes = (self._foreign[id(x)] for x in tensors if id(x) in self._foreign)
        if self.recording.foreign is None and (shape := next(shapes, None)) is not None:
            self.recording.foreign = (len(self.recording.calls), shape)

    def watch_python_chance(self) -> None:
        """Notes that Python or NumPy drew a random number since the last call."""
        if self.recording.python_chance is None and self._python_states != _python_states():
            self.recording.python_chance = len(self.recording.calls)

    def mark_escaped(self, values: Sequence[_Value], place: str = "") -> None:
        now = len(self.recording.calls)
        for value in values:
            for call in value.calls:
                self.recording.escaped.setdefault(call, now)
                self.recording.escape_places.setdefault(call, place)
            if value.kind is Kind.RAW:
                for leaf in value.leaves:
                    self.recording.escaped_leaves.setdefault(leaf, now)

    def mark_used_at_the_end(self, result: Any) -> None:
        """Notes the tensors that the step hands out or leaves behind."""
        known = (x for x in tensors_in(result) if id(x) in self._values)
        self.mark_escaped([self._values[id(x)] for x in known])

    def _value_of(self, tensor: Tensor) -> _Value:
        if id(tensor) not in self._values:
            # Made where no torch function shows, for example by a custom `autograd.Function`: taken
            # for a constant if it has no history, else for the work of whatever came last. Numbers
            # prove the cuts later.
            value = _Value(Kind.CONSTANT)
            if tensor.is_leaf and tensor.requires_grad:
                self._foreign[id(tensor)] = tuple(tensor.shape)
            if tensor.grad_fn is not None and self.recording.calls:
                last = len(self.recording.calls) - 1
                value = _Value(self.recording.calls[last].kind, calls=frozenset((last,)))
            self._set(tensor, value)
        return self._values[id(tensor)]

    def _set(self, tensor: Tensor, value: _Value) -> None:
        if id(tensor) not in self._values:
            self._keep.append(tensor)
            storage = _storage_of(tensor)
            if storage is not None:
                self._by_storage.setdefault(storage, []).append(id(tensor))
        self._values[id(tensor)] = value

    def _add(
        self,
        name: str,
        result: Any,
        inputs: Sequence[_Value],
        written: Tensor | None,
        *,
        changes_buffers: bool,
    ) -> None:
        parameters = frozenset[str]().union(*(value.parameters for value in inputs))
        leaves = frozenset[int]().union(*(value.leaves for value in inputs))
        chance = name in RANDOM or any(value.chance for value in inputs)
        kinds = {value.kind for value in inputs}
        # Running statistics must take in each sample once, so the samples may not go there twice.
        counts = chance or name in BATCH_STATISTICS
        if Kind.MAIN in kinds or (Kind.RAW in kinds and (parameters or counts)):
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
                reads=frozenset[int]().union(*(value.calls for value in inputs)),
                leaves=leaves if kind is not Kind.CONSTANT else frozenset(),
                reads_raw=kind is Kind.MAIN and Kind.RAW in kinds,
                chance=chance and kind is Kind.CONSTANT,
                changes_buffers=changes_buffers,
                parameters=parameters,
                place=running_line(),
            )
        )
        value = _Value(
            kind,
            calls=frozenset((index,)),
            leaves=leaves if kind is Kind.RAW else frozenset(),
            parameters=parameters if kind is Kind.CONSTANT else frozenset(),
            chance=chance and kind is Kind.CONSTANT,
        )
        for tensor in outputs:
            self._set(tensor, value)
        if written is not None:
            self._overwrite(written, value)

    def _overwrite(self, written: Tensor, value: _Value) -> None:
        """Notes a write, also for the tensors that share the memory: they hold old and new."""
        self._set(written, value)
        for other in self._by_storage.get(_storage_of(written) or 0, ()):
            old = self._values[other]
            if other != id(written) and not (old.calls and old.calls >= value.calls):
                self._values[other] = _Value(
                    value.kind if value.kind is not Kind.CONSTANT else old.kind,
                    calls=old.calls | value.calls,
                    leaves=old.leaves | value.leaves,
                    parameters=old.parameters | value.parameters,
                    chance=old.chance or value.chance,
                )


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
        module: Where parameters and module names come from. Tensors of the step that it keeps as
            attributes or wrote into its buffers count as used after the step, too.
    """
    recorder = _Recorder(leaves, split, module)
    before = [(name, x, x.detach().clone()) for name, x in module.named_buffers()]
    with _module_paths(module, recorder.module_path), torch.enable_grad(), recorder:
        result = step(batch)
    recorder.watch_python_chance()
    recorder.mark_used_at_the_end(result)
    for child in module.modules():
        recorder.mark_used_at_the_end(list(vars(child).values()))
    after = dict(module.named_buffers())
    unseen = (x for x in before if id(x[1]) not in recorder.changed_buffers)
    if recorder.recording.calls and any(
        after.get(name) is not buffer or not torch.equal(buffer, value)
        for name, buffer, value in unseen
    ):
        recorder.recording.calls[0].changes_buffers = True  # through a view; who knows where
    return recorder.recording


def _python_states() -> tuple[Any, ...]:
    numpy: Any = np.random.get_state(legacy=False)
    state = numpy["state"]
    return random.getstate(), numpy["has_gauss"], state["pos"], int(state["key"][0])


def _storage_of(tensor: Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None  # sparse and other tensors without memory of their own


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
