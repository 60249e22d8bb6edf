"""Running a step along its chain: stopping at a cut, or taking in other tiers' samples there.

The step is the user's own, unmodified. A `Passage` is active while it runs, counts its torch calls
against the chain's and acts at the cuts. In front of the first cut a tier sees its own rows; behind
each cut there are more:

```
            layer 1 .. m_1      layer m_1+1 .. m_2      layer m_2+1 .. N, loss
rows        n_0                 n_1 = n_0 + b_1         n_2 = n_1 + b_2
```
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_hiertrain.errors import TraceError
from lightning_hiertrain.partition.calls import (
    Function,
    function_name,
    is_aside,
    map_tensors,
    returns_tensor,
    tensors_in,
    unrolled,
)
from lightning_hiertrain.partition.chain import Call, Kind, LayerChain, RowShape
from lightning_hiertrain.partition.counts import asked_by_torch, counted, put_right
from lightning_hiertrain.partition.rows import placeholder

Tap = Callable[[Tensor], Tensor]
"""Takes the output of a layer, returns what the step goes on with."""


class CutReached(BaseException):
    """Raised by a tap to leave the step at a cut.

    Not an `Exception`, so that the user's code does not catch it.
    """

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output


@dataclass(frozen=True)
class _Raw:
    """A tensor of the batch, or made of it alone."""

    tensor: Tensor  # kept, since its id is only good while it lives
    dim: int
    rows: int


def call_as_is(function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Calls a torch function."""
    return function(*args, **kwargs)


class Passage(TorchFunctionMode):
    """A context in which a step runs along its chain.

    Args:
        chain: The step's chain.
        leaves: The batch's tensors as the step sees them. A leaf that is also needed behind the
            first cut holds all rows; main calls get as many of the first rows as belong to them.
        num_rows: Rows in front of the first cut. With 0 of them main calls are not carried out:
            they return placeholders of one row, up to the first cut, where the tap's result
            replaces them.
        taps: What to do after a layer, by number of layers (1 = after the first).
        rows_behind: Rows behind a cut, by number of layers.
        call: How torch functions are called.
    """

    def __init__(
        self,
        chain: LayerChain,
        leaves: Sequence[Tensor],
        *,
        num_rows: int,
        taps: Mapping[int, Tap],
        rows_behind: Mapping[int, int] | None = None,
        call: Callable[[Function, tuple[Any, ...], Mapping[str, Any]], Any] = call_as_is,
    ) -> None:
        super().__init__()
        self._chain = chain
        self._taps = {chain[depth - 1].last_call: tap for depth, tap in taps.items()}
        self._rows_behind = {
            chain[depth - 1].last_call: rows for depth, rows in (rows_behind or {}).items()
        }
        self._last = max(self._taps, default=-1)
        self._num_rows = num_rows
        self._samples = max((*self._rows_behind.values(), num_rows))
        self._joined = self._samples > num_rows
        self._has_counted = False
        self._made: dict[int, Tensor] = {}
        """Results of calls that were not there when the model was traced, and read no batch."""
        self._call = call
        self._next = 0
        self._raw: dict[int, _Raw] = {
            id(leaf): _Raw(leaf, shape.dim, leaf.size(shape.dim))
            for leaf, shape in zip(leaves, chain.leaf_shapes, strict=True)
            if shape is not None
        }

    @property
    def reached_a_cut(self) -> bool:
        """Whether the step came as far as the first cut."""
        return self._next > min(self._taps, default=-1)

    def check_complete(self) -> None:
        """Refuses a step that ended in front of a cut.

        Raises:
            TraceError: If it did.
        """
        if self._next <= self._last:
            raise TraceError(
                f"the step ended after {self._next} torch calls, the cut lies behind call "
                f"{self._last}: expected `{self._chain.calls[self._next].name}`. {_SAME_PATH}"
            )

    def __torch_function__(
        self,
        func: Function,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if is_aside():
            return func(*args, **kwargs)
        func, iterated = unrolled(func)
        name = function_name(func)
        rows = self._rows_of(args, kwargs)
        if self._has_counted:
            at_hand = max(self._num_rows, 1) if rows is None else rows
            args, kwargs = put_right(args, at_hand), put_right(dict(kwargs), at_hand)
        if self._next > self._last:
            result = self._counted(name, args, kwargs, self._call(func, args, kwargs))
            return iter(result) if iterated else result
        expected = self._chain.calls[self._next]
        if name != expected.name and self._makes_constants(args, kwargs):
            result = self._call(func, args, kwargs)
            self._made.update((id(tensor), tensor) for tensor in tensors_in(result))
            return iter(result) if iterated else result
        if name != expected.name:
            result = self._call(func, args, kwargs)
            if returns_tensor(name, result):
                raise TraceError(
                    f"torch call {self._next} of the step is `{name}`, it was `{expected.name}` "
                    f"when the model was traced. {_SAME_PATH}"
                )
            return self._counted(name, args, kwargs, result)
        result = self._carry_out(expected, func, args, kwargs)
        if not returns_tensor(name, result):
            return self._counted(name, args, kwargs, result)
        index = self._next
        self._next += 1
        if index in self._taps:
            result = _changeable(self._taps[index](result))
            self._num_rows = self._rows_behind.get(index, self._num_rows)
        return iter(result) if iterated else result

    def _makes_constants(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Tells whether a call reads nothing: a model that makes a table when it first needs it."""
        return all(id(tensor) in self._made for tensor in tensors_in((args, dict(kwargs))))

    def _rows_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
        """Returns how many rows of the batch are among the arguments; `None` for none."""
        known = (self._raw.get(id(x)) for x in tensors_in((args, dict(kwargs))))
        return next((raw.rows for raw in known if raw is not None), None)

    def _counted(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> Any:
        """Answers a question for the size of a tensor of the batch."""
        if not self._joined or not args or id(args[0]) not in self._raw or asked_by_torch():
            return result
        raw = self._raw[id(args[0])]
        answer = counted(
            name,
            args,
            kwargs,
            result,
            dim=raw.dim,
            rows=raw.rows,
            samples=self._samples,
            behind=self._next > self._last,
        )
        self._has_counted = self._has_counted or answer is not result
        return answer

    def _carry_out(
        self, expected: Call, func: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        if expected.kind is Kind.MAIN:
            if self._num_rows == 0 and expected.name == "__setitem__":
                return None
            if self._num_rows == 0 and len(expected.outputs) == 1 and expected.outputs[0]:
                device = next(tensors_in((args, dict(kwargs)))).device
                return _one_row(expected.outputs[0], device)
            if expected.reads_raw:
                args, kwargs = map_tensors((args, dict(kwargs)), self._own_rows)
            return self._call(func, args, kwargs)
        result = self._call(func, args, kwargs)
        if expected.kind is Kind.RAW:
            self._note_raw(expected, result, args, kwargs)
        return result

    def _note_raw(
        self, expected: Call, result: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Notes how many rows lie in what was made of the batch."""
        rows = self._rows_of(args, kwargs)
        for tensor, shape in zip(tensors_in(result), expected.outputs, strict=False):
            if rows is not None and shape is not None:
                self._raw[id(tensor)] = _Raw(tensor, shape.dim, rows)

    def _own_rows(self, tensor: Tensor) -> Tensor:
        raw = self._raw.get(id(tensor))
        wanted = max(self._num_rows, 1)
        if raw is None or raw.rows <= wanted:
            return tensor
        # Not what the trace says: a sample may have more or fewer tokens in this batch.
        per_sample, rest = divmod(tensor.size(raw.dim), raw.rows)
        if rest:
            raise TraceError(
                f"a tensor of shape {tuple(tensor.shape)} made of {raw.rows} samples cannot be "
                f"divided between tiers along dimension {raw.dim}. {_SAME_PATH}"
            )
        return tensor.narrow(raw.dim, 0, per_sample * wanted)


def _changeable(output: Tensor) -> Tensor:
    """Copies what autograd would not let an in-place call behind the cut change."""
    return output.clone() if output.is_leaf and output.requires_grad else output


_SAME_PATH = (
    "The model must take the same path in every training step up to the last cut; "
    "branches that depend on the data or on the step cannot be divided between tiers"
)


def _one_row(shape: RowShape, device: torch.device) -> Tensor:
    return placeholder(shape.of(1), getattr(torch, shape.dtype), device)
