"""Chance: which torch functions draw random numbers, and how to call them without."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_hiertrain.partition.calls import Function, function_name

RANDOM = frozenset(
    [
        *("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "native_dropout"),
        *("feature_dropout", "feature_dropout_", "alpha_dropout", "alpha_dropout_"),
        *("feature_alpha_dropout", "feature_alpha_dropout_", "rrelu", "rrelu_", "gumbel_softmax"),
        *("rand", "randn", "rand_like", "randn_like", "randint", "randint_like", "randperm"),
        *("bernoulli", "bernoulli_", "normal", "normal_", "uniform_", "log_normal_", "random_"),
        *("exponential_", "cauchy_", "geometric_", "multinomial", "poisson", "binomial"),
        *("_standard_gamma", "_sample_dirichlet", "fractional_max_pool2d"),
        *("fractional_max_pool3d",),
    ]
)
"""Functions that draw random numbers (some only in training mode)."""

BATCH_STATISTICS = frozenset(("batch_norm", "sync_batch_norm"))
"""Functions that normalise over the batch."""

# Where the `training` flag, or its like, stands among the positional arguments.
_TRAINING_POSITION = {
    "dropout": 2, "dropout1d": 2, "dropout2d": 2, "dropout3d": 2, "alpha_dropout": 2,
    "feature_alpha_dropout": 2, "feature_dropout": 2, "rrelu": 3, "batch_norm": 5,
}  # fmt: skip
_FILLED = frozenset(
    ("rand", "randn", "rand_like", "randn_like", "normal", "normal_", "uniform_", "exponential_")
)
_RECURRENT = frozenset(("lstm", "gru", "rnn_tanh", "rnn_relu"))
MAYBE_RANDOM = _RECURRENT | {"multi_head_attention_forward", "scaled_dot_product_attention"}
"""Functions with a dropout of their own."""


def call_without_chance(
    function: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any], level: float = 0.9
) -> Any:
    """Calls a torch function with randomness and batch statistics switched off.

    Used where runs are compared: dropout passes everything, batch normalisation uses its running
    statistics, noise is the same number everywhere, a permutation turns the order round. Rows then
    depend on nothing but themselves, unless the model itself mixes them.

    Args:
        function: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        level: What noise becomes. A draw is often compared with a chance: use several levels.
    """
    name = function_name(function)
    kwargs = dict(kwargs)
    if name in _TRAINING_POSITION:
        args, kwargs = _not_training(name, args, kwargs)
    elif name == "multi_head_attention_forward":
        kwargs["training"] = False
    elif name == "scaled_dot_product_attention":
        if len(args) > 4:
            args = (*args[:4], 0.0, *args[5:])
        elif "dropout_p" in kwargs:
            kwargs["dropout_p"] = 0.0
    elif name in _RECURRENT:
        args = _without_recurrent_dropout(args)
    elif name == "bernoulli" and len(args) == 1 and not kwargs:
        return args[0].clone()  # its mean
    elif name == "bernoulli_" and isinstance(args[0], Tensor):
        # Its mean, which stochastic depth divides by.
        chance = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        return args[0].copy_(chance) if isinstance(chance, Tensor) else args[0].fill_(chance)
    elif name == "gumbel_softmax":
        temperature = kwargs.get("tau", args[1] if len(args) > 1 else 1.0)
        dim = kwargs.get("dim", args[4] if len(args) > 4 else -1)
        return torch.softmax(args[0] / temperature, dim)
    result = function(*args, **kwargs)
    if isinstance(result, Tensor):
        with torch.no_grad():
            if name in _FILLED:
                result.fill_(level)
            elif name == "randperm":
                result.copy_(torch.arange(result.numel() - 1, -1, -1))
    return result


def _not_training(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    position = _TRAINING_POSITION[name]
    if name == "batch_norm":
        # `torch.batch_norm` has its weights where `functional.batch_norm` has its statistics; with
        # neither there is nothing but the statistics of the batch.
        statistics = kwargs.get("running_mean", args[1] if len(args) > 1 else None)
        if statistics is None:
            return args, kwargs
    if len(args) > position:
        return (*args[:position], False, *args[position + 1 :]), kwargs
    return args, {**kwargs, ("train" if "train" in kwargs else "training"): False}


def _without_recurrent_dropout(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments run `..., has_biases, num_layers, dropout, train, ...`, after tensors only."""
    flag = next((i for i, value in enumerate(args) if isinstance(value, bool)), None)
    if flag is None or len(args) < flag + 3:
        return args
    return (*args[: flag + 2], 0.0, *args[flag + 3 :])
