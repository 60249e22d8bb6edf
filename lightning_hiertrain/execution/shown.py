"""The mini-batch as hooks and callbacks on the owner may see it."""

from __future__ import annotations

from typing import Any

from lightning_hiertrain.execution.feed import MiniBatch
from lightning_hiertrain.partition.chain import LayerChain
from lightning_hiertrain.partition.rows import batch_leaves, with_leaves
from lightning_hiertrain.partition.withheld import Withheld


def shown(mini_batch: MiniBatch, chain: LayerChain, data_tier: str) -> Any:
    """Returns the owner's batch with a stand-in for every tensor of which it has not all rows.

    The step itself gets the rows. Outside it nobody knows that they are not all of them.

    Args:
        mini_batch: The mini-batch on the owner.
        chain: The model's chain of layers.
        data_tier: The tier that has the whole.
    """
    cuts = mini_batch.cuts
    if not cuts:
        return mini_batch.batch
    reason = (
        "a hook or callback reads a tensor of `batch` on tier "
        f"{mini_batch.schedule.owner!r}, which has only its own share of those samples; the whole "
        f"mini-batch is on tier {data_tier!r}. Return what the hook needs from `training_step`, "
        "which sees the whole of what it uses behind the first layers, or read the batch in a "
        f"callback where `trainer.strategy.tier == {data_tier!r}`"
    )
    leaves = []
    for position, leaf in enumerate(batch_leaves(mini_batch.batch)):
        shape = chain.leaf_shapes[position]
        if shape is None or chain.is_read_behind(position, cuts[0][1]):
            leaves.append(leaf)
        else:
            whole = shape.of(mini_batch.num_samples)
            leaves.append(Withheld(whole, dtype=leaf.dtype, device=leaf.device, reason=reason))
    return with_leaves(mini_batch.batch, leaves)
