"""Optimizer states that come from a tier with another accelerator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

KERNELS = frozenset(("foreach", "fused", "capturable"))
"""Options by which an optimizer chooses its kernels. They do not change what it computes, and some
run on one kind of accelerator only: each tier keeps its own."""


def with_own_kernels(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state for `load_state_dict` that leaves the optimizer the kernels that it has.

    Args:
        optimizer: The optimizer.
        state: What `state_dict` returned on any tier.
    """
    if "param_groups" not in state:  # what Lightning puts in the place of no optimizer
        return dict(state)
    groups, own = state["param_groups"], optimizer.param_groups
    if len(groups) == len(own):  # if not, the optimizer has an error for it
        kept = [{key: group[key] for key in KERNELS & group.keys()} for group in own]
        groups = [{**group, **mine} for group, mine in zip(groups, kept, strict=True)]
    return {**state, "param_groups": groups}
