"""Looking into the calls of torch functions that a model makes: names, tensors inside arguments.

A `TorchFunctionMode` sees every torch function that Python code calls, before autograd does. That
is what this package builds on: no tracing compiler, no symbolic batch sizes, and functional code,
residuals and control flow look alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]

_aside = ContextVar("aside", default=False)


@contextmanager
def aside() -> Iterator[None]:
    """A context whose torch calls are no part of the step, such as those of `self.log`."""
    token = _aside.set(True)
    try:
        yield
    finally:
        _aside.reset(token)


def is_aside() -> bool:
    """Tells whether the call at hand is no part of the step."""
    return _aside.get()


def function_name(function: Function) -> str:
    """Returns the bare name of a torch function or attribute: `"conv2d"`, `"add_"`, `"shape"`."""
    name = getattr(function, "__name__", type(function).__name__)
    if name == "__get__":
        name = getattr(function.__self__, "__name__", name)  # type: ignore[attr-defined]
    return str(name)


def unrolled(function: Function) -> tuple[Function, bool]:
    """Puts `unbind` for the start of an iteration over a tensor, whose items would not be seen.

    Returns:
        The function to call, and whether its result is to be iterated over.
    """
    return (torch.unbind, True) if function is Tensor.__iter__ else (function, False)


def returns_tensor(name: str, result: Any) -> bool:
    """Tells whether a call counts: it returned tensors or wrote into one."""
    return (
        isinstance(result, Tensor)
        or name == "__setitem__"
        or next(tensors_in(result), None) is not None
    )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors inside arguments or results, through lists, tuples and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)


def numbers_in(value: Any) -> Iterator[float]:
    """Yields the plain numbers inside what a step returned, in the same way."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield float(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from numbers_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from numbers_in(item)


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Rebuilds arguments or results with `function` applied to each tensor; other leaves stay."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple):
        items = [map_tensors(item, function) for item in value]
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return tuple(items) if type(value) is tuple else type(value)(items)
    if isinstance(value, list):
        return [map_tensors(item, function) for item in value]
    if isinstance(value, dict):
        return {key: map_tensors(item, function) for key, item in value.items()}
    return value


def version_of(args: tuple[Any, ...]) -> int | None:
    """Returns the version of a call's first argument, which a write to it raises."""
    if not args or not isinstance(args[0], Tensor) or args[0].is_inference():
        return None
    return args[0]._version


def writes_first_argument(function: Function, args: tuple[Any, ...], version: int | None) -> bool:
    """Tells whether a call changed its first argument in place, given its version before."""
    if not args or not isinstance(args[0], Tensor):
        return False
    name = function_name(function)
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or version_of(args) != version


_METADATA = frozenset(
    [
        *("shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "__len__", "stride"),
        *("device", "dtype", "layout", "type", "get_device", "element_size", "itemsize", "nbytes"),
        *("requires_grad", "is_leaf", "grad", "grad_fn", "retains_grad", "output_nr", "_version"),
        *("is_cuda", "is_cpu", "is_mps", "is_xpu", "is_xla", "is_meta", "is_sparse", "is_nested"),
        *("is_sparse_csr", "is_quantized", "is_mkldnn", "is_complex", "is_floating_point"),
        *("is_signed", "is_conj", "is_neg", "is_inference", "is_contiguous", "is_same_size"),
        *("is_pinned", "is_shared", "is_tensor", "storage_offset", "untyped_storage", "storage"),
        *("data_ptr", "names", "has_names", "name", "_is_view", "register_hook", "retain_grad"),
        *("register_post_accumulate_grad_hook", "_backward_hooks", "__hash__", "__repr__"),
        *("__format__", "__str__", "result_type", "can_cast", "promote_types", "dense_dim"),
        *("sparse_dim", "is_vulkan", "is_ipu", "is_maia", "is_mtia", "__dir__", "layout"),
    ]
)


def leaves_for_python(name: str) -> bool:
    """Tells whether a call that returned no tensor handed data to Python, as `item` does.

    What Python does with it cannot be seen. A shape or a type is no data.
    """
    return name not in _METADATA
