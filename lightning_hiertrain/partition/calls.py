"""Looking into the calls of torch functions that a model makes: names, tensors inside arguments, randomness.

A `TorchFunctionMode` sees every torch function that Python code calls, before autograd does. That is what this package
builds on: no tracing compiler, no symbolic batch sizes, and functional code, residuals and control flow look alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]


def function_name(function: Function) -> str:
    """Returns the bare name of a torch function: `"conv2d"`, `"add_"`, or `"shape"` for an attribute."""
    name = getattr(function, "__name__", type(function).__name__)
    if name == "__get__":
        name = getattr(function.__self__, "__name__", name)  # type: ignore[attr-defined]
    return str(name)


def returns_tensor(name: str, result: Any) -> bool:
    """Tells whether a call counts: it returned tensors or wrote into one."""
    return isinstance(result, Tensor) or name == "__setitem__" or next(tensors_in(result), None) is not None


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors inside arguments or results, through lists, tuples and mappings, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)


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


def writes_first_argument(function: Function, result: Any, args: tuple[Any, ...]) -> bool:
    """Tells whether a call changed its first argument in place."""
    if not args or not isinstance(args[0], Tensor):
        return False
    name = function_name(function)
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or result is args[0]


RANDOM = frozenset(
    """dropout dropout_ feature_dropout alpha_dropout feature_alpha_dropout dropout1d dropout2d dropout3d rand randn
    rand_like randn_like randint randint_like randperm bernoulli bernoulli_ normal normal_ uniform_ multinomial
    exponential_ random_ gumbel_softmax rrelu poisson""".split()
)
"""Functions that draw random numbers (some only in training mode)."""

_NOISE = frozenset(("rand", "randn", "rand_like", "randn_like"))
# Where the `training` flag, or its like, stands among the positional arguments.
_TRAINING_POSITION = {
    "dropout": 2, "dropout1d": 2, "dropout2d": 2, "dropout3d": 2, "alpha_dropout": 2,
    "feature_alpha_dropout": 2, "rrelu": 3, "batch_norm": 5,
}  # fmt: skip


def call_without_chance(function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Calls a torch function with randomness and batch statistics switched off.

    Used where two runs are compared: dropout passes everything, batch normalisation uses its running statistics, noise
    is zero. Rows then depend on nothing but themselves, unless the model itself mixes them.
    """
    name = function_name(function)
    kwargs = dict(kwargs)
    if name in _TRAINING_POSITION:
        position = _TRAINING_POSITION[name]
        running_mean = kwargs.get("running_mean", args[1] if len(args) > 1 else None)
        if name != "batch_norm" or running_mean is not None:
            if len(args) > position:
                args = (*args[:position], False, *args[position + 1 :])
            else:
                kwargs["training"] = False
    elif name == "multi_head_attention_forward":
        kwargs["training"] = False
    elif name == "scaled_dot_product_attention":
        if len(args) > 4:
            args = (*args[:4], 0.0, *args[5:])
        elif "dropout_p" in kwargs:
            kwargs["dropout_p"] = 0.0
    elif name == "bernoulli_" and isinstance(args[0], Tensor):
        # Its mean, which stochastic depth divides by.
        chance = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        return args[0].copy_(chance) if isinstance(chance, Tensor) else args[0].fill_(chance)
    result = function(*args, **kwargs)
    if name in _NOISE and isinstance(result, Tensor):
        with torch.no_grad():
            result.zero_()
    return result
