"""The reductions that `self.log(reduce_fx=...)` takes, by name: functions do not travel."""

from __future__ import annotations

from typing import Any

import torch

_REDUCTIONS: dict[str, Any] = {
    **{f"torch.{name}": getattr(torch, name) for name in ("mean", "sum", "max", "min")},
    "builtins.sum": sum,
    "builtins.max": max,
    "builtins.min": min,
}


def reduction(name: str) -> Any:
    """Returns the reduction of that name; Lightning's own names stay as they are."""
    return _REDUCTIONS.get(name, name)


def reduction_name(reduce_fx: Any, logged: str) -> str:
    """Returns the name of a reduction.

    Args:
        reduce_fx: What `self.log` was given.
        logged: The name of the logged value, for the message.

    Raises:
        ValueError: If it is none of those that Lightning takes.
    """
    if isinstance(reduce_fx, str):
        return reduce_fx
    for known, function in _REDUCTIONS.items():
        if function is reduce_fx:
            return known
    raise ValueError(
        f"self.log({logged!r}, reduce_fx={reduce_fx!r}): the other tiers know only mean, sum, max "
        f"and min; log a torchmetrics.Metric for a reduction of your own"
    )
