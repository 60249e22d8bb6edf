"""Tensors that may be asked for their shape but not for their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hiertrain.errors import HierTrainError
from lightning_hiertrain.partition.calls import Function, function_name, tensors_in
from lightning_hiertrain.partition.rows import placeholder

ASKED = frozenset(
    [
        *("size", "shape", "dim", "ndim", "ndimension", "numel", "nelement", "__len__"),
        *("dtype", "device", "layout", "element_size", "itemsize", "nbytes", "is_cuda", "is_cpu"),
        *("is_floating_point", "is_complex", "is_sparse", "is_leaf", "requires_grad", "grad_fn"),
        *("__hash__", "__repr__", "stride", "is_contiguous", "is_meta", "is_mps", "is_nested"),
        *("names", "_version", "requires_grad_", "register_hook"),
    ]
)
"""Torch functions and attributes that tell nothing about a tensor's values."""


class Withheld(Tensor):
    """Stands where a batch has a tensor of which this tier has not all rows.

    Args:
        shape: The whole tensor's shape.
        dtype: Its type.
        device: Where it would be.
        reason: The error's text when its values are asked for.
    """

    reason: str

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        reason: str,
    ) -> Withheld:
        empty = placeholder(shape, dtype, device)
        made: Withheld = torch.Tensor._make_subclass(cls, empty)
        made.reason = reason
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        """Does nothing: it is made already."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Withheld(shape={tuple(self.shape)})"

    def __reduce_ex__(self, _: Any) -> Any:
        raise HierTrainError(self.reason)

    @classmethod
    def __torch_function__(
        cls,
        func: Function,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function_name(func) in ASKED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        read = next(x for x in tensors_in((args, dict(kwargs or {}))) if isinstance(x, Withheld))
        raise HierTrainError(read.reason)
