"""The batch as rows: which leaves have one row a sample, and how to take some of them.

Works on whatever a dataloader yields: tensors in tuples, dicts, dataclasses, nested. A leaf whose
first dimension has one entry a sample is split; every other leaf (a string, a number, a table of
weights) goes to all tiers as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_hiertrain.errors import TraceError


def batch_leaves(batch: Any) -> list[Tensor]:
    """Returns the tensors of a batch in a fixed order."""
    leaves: list[Tensor] = []
    apply_to_collection(batch, Tensor, leaves.append)
    return leaves


def with_leaves(batch: Any, leaves: Sequence[Tensor]) -> Any:
    """Returns the batch with its tensors replaced, in the order of `batch_leaves`."""
    remaining = iter(leaves)
    return apply_to_collection(batch, Tensor, lambda _: next(remaining))


def num_samples(batch: Any) -> int:
    """Returns how many samples a batch holds: the length of its first tensor that has a dimension.

    Raises:
        TraceError: If no tensor has a dimension to split.
    """
    for leaf in batch_leaves(batch):
        if leaf.dim():
            if not leaf.size(0):
                raise TraceError("the batch holds no samples; its first tensor is empty")
            return leaf.size(0)
    raise TraceError(
        f"a batch of type `{type(batch).__name__}` cannot be split into samples: no tensor with a "
        "first dimension was found in it (classes are looked into if they are tuples, lists, dicts "
        "or dataclasses); let the dataloader yield tensors of shape (num_samples, ...) in these"
    )


def split_positions(batch: Any, samples: int) -> tuple[int, ...]:
    """Returns the positions, among the leaves, of those with one row a sample."""
    return tuple(
        position
        for position, leaf in enumerate(batch_leaves(batch))
        if leaf.dim() and leaf.size(0) == samples
    )


def select_rows(batch: Any, positions: Sequence[int], rows: slice | Tensor) -> Any:
    """Returns the batch with those rows of the leaves at `positions`."""
    chosen = set(positions)
    return with_leaves(
        batch, [leaf[rows] if i in chosen else leaf for i, leaf in enumerate(batch_leaves(batch))]
    )


def repeat_rows(batch: Any, positions: Sequence[int], count: int) -> Any:
    """Returns a batch of `count` rows, those of `batch` over and over."""
    samples = num_samples(batch)
    return select_rows(batch, positions, torch.arange(count) % samples)


def placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Returns a tensor of zeros that takes no memory: one element, expanded."""
    return torch.zeros((), dtype=dtype, device=device).expand(tuple(shape))
