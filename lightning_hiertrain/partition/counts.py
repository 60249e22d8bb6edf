"""Batch sizes that code notes down: `n = x.shape[0]`, used behind a cut, where there are more rows.

Where the batch's own tensors are asked for their size, the number that comes out is the whole
mini-batch's, as it would be on one machine, and remembers that it counts rows. When a torch
function gets such a number, it is put right to the rows that are there at that point. (`len` cannot
return such a number: in front of the last cut it is that of the rows at hand.)
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch

_OWN = "lightning_hiertrain."
_TORCH_MODULES = "torch.nn.modules."


class RowCount(int):
    """A number of rows, `per_row` for each sample; as a plain number, that of the mini-batch."""

    per_row: int

    def __new__(cls, per_row: int, samples: int) -> RowCount:
        count = super().__new__(cls, per_row * samples)
        count.per_row = per_row
        return count

    def __mul__(self, other: Any) -> Any:
        product = int(self) * other
        if type(other) is not int or not self.per_row:
            return product
        return RowCount(self.per_row * other, int(self) // self.per_row)

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Any:
        if type(other) is not int or not other or not self.per_row or self.per_row % other:
            return int(self) // other
        return RowCount(self.per_row // other, int(self) // self.per_row)

    def __deepcopy__(self, _: Any) -> int:
        return int(self)

    def __reduce__(self) -> Any:
        return int, (int(self),)


def asked_by_torch() -> bool:
    """Whether one of torch's own modules asks, which compares the size with those of tensors."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _module_of(frame).startswith(_OWN):
        frame = frame.f_back
    return frame is not None and _module_of(frame).startswith(_TORCH_MODULES)


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def put_right(value: Any, rows: int) -> Any:
    """Rebuilds arguments with what counts rows put right to `rows` samples."""
    if isinstance(value, RowCount):
        return value.per_row * rows
    if isinstance(value, (tuple, list)):
        items = [put_right(item, rows) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping) and type(value) is dict:
        return {key: put_right(item, rows) for key, item in value.items()}
    return value


def counted(
    name: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    result: Any,
    *,
    dim: int,
    rows: int,
    samples: int,
    behind: bool,
) -> Any:
    """Returns what a question for a tensor's size is answered with.

    Args:
        name: The function that was called.
        args: Its arguments, the tensor first.
        kwargs: Its keyword arguments.
        result: Its own answer.
        dim: The tensor's dimension along which samples lie.
        rows: How many samples lie there.
        samples: How many there are in the mini-batch.
        behind: Whether the last cut has been passed.
    """
    if name == "__len__":
        return result // rows * samples if behind and dim == 0 else result
    if name in ("numel", "nelement"):
        return RowCount(result // rows, samples)
    if name not in ("shape", "size"):
        return result
    if isinstance(result, torch.Size):
        count = RowCount(result[dim] // rows, samples)
        return torch.Size((*result[:dim], count, *result[dim + 1 :]))
    asked = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if isinstance(asked, int) and asked % args[0].dim() == dim:
        return RowCount(result // rows, samples)
    return result
