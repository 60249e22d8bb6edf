"""What a tier's step sees of the batch: its own rows, all, or nothing where it does not look."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hiertrain.partition.chain import LayerChain
from lightning_hiertrain.partition.rows import batch_leaves, num_samples


def fits(batch: Any, chain: LayerChain) -> bool:
    """Tells whether a batch has the structure of the one that the chain was traced with.

    One loader of several may have ended, or a batch hold a list of tensors, one for each sample.
    """
    leaves, samples = batch_leaves(batch), num_samples(batch)
    return len(leaves) == len(chain.leaf_shapes) and all(
        shape is None or (leaf.dim() > 0 and leaf.size(0) == samples)
        for leaf, shape in zip(leaves, chain.leaf_shapes, strict=True)
    )


def owner_leaves(
    chain: LayerChain, leaves: Sequence[Tensor], first_cut: int, num_rows: int
) -> list[Tensor | None]:
    """Returns the leaves as the owner's step sees them: own rows, or all if needed behind the cut.

    Args:
        chain: The step's chain.
        leaves: The batch's tensors with all rows.
        first_cut: Layers in front of the first cut.
        num_rows: The owner's own rows, the first ones.

    Returns:
        For each leaf the tensor, or `None` if none of its rows is read.
    """
    seen: list[Tensor | None] = []
    for position, (leaf, shape) in enumerate(zip(leaves, chain.leaf_shapes, strict=True)):
        if shape is None or chain.is_read_behind(position, first_cut):
            seen.append(leaf)
        else:
            seen.append(leaf[:num_rows] if num_rows else None)
    return seen


def prefix_leaves(
    chain: LayerChain, leaves: Sequence[Tensor], num_layers: int, rows: slice
) -> list[Tensor | None]:
    """Returns the leaves as a prefix worker's step sees them: its rows, or `None` if not read."""
    seen: list[Tensor | None] = []
    for position, (leaf, shape) in enumerate(zip(leaves, chain.leaf_shapes, strict=True)):
        if shape is None:
            seen.append(leaf)
        else:
            seen.append(leaf[rows] if chain.is_read_before(position, num_layers) else None)
    return seen


def filled(
    chain: LayerChain,
    seen: Sequence[Tensor | None],
    num_rows: int,
    like: Sequence[Tensor],
) -> list[Tensor]:
    """Puts placeholders, of one row at least, for missing leaves: code may look at their shapes.

    Args:
        chain: The step's chain.
        seen: What `owner_leaves` or `prefix_leaves` returned.
        num_rows: Rows of the placeholders.
        like: The batch's tensors, on whose devices they are.
    """
    leaves = []
    for leaf, shape, known in zip(seen, chain.leaf_shapes, like, strict=True):
        if leaf is None:
            assert shape is not None
            dtype = getattr(torch, shape.dtype)
            # With memory of its own: the step may change it in place.
            leaf = torch.zeros(shape.of(max(num_rows, 1)), dtype=dtype, device=known.device)
        leaves.append(leaf)
    return leaves
