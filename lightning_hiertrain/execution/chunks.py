"""Cutting a prefix worker's rows into chunks, so that one travels while the next is computed."""

from __future__ import annotations

from itertools import pairwise

from lightning_hiertrain.execution.feed import MiniBatch
from lightning_hiertrain.partition.chain import LayerChain


def chunks_of(mini_batch: MiniBatch, worker: str, chain: LayerChain) -> list[slice]:
    """Returns the chunks of a prefix worker's rows, the same on both ends of the link.

    Layers that take statistics over the batch or change buffers see all rows at once: then there is
    one chunk.

    Args:
        mini_batch: The mini-batch at hand.
        worker: The prefix worker.
        chain: The model's chain of layers.

    Returns:
        Slices of the worker's rows, in order, none of them empty.
    """
    rows = mini_batch.rows[worker]
    count = rows.stop - rows.start
    schedule = mini_batch.schedule
    wanted = min(schedule.num_chunks, count)
    if wanted > 1 and chain.needs_whole_shares(schedule.shares[worker].num_layers):
        wanted = 1
    bounds = [count * i // wanted for i in range(wanted + 1)] if wanted else [0]
    return [slice(a, b) for a, b in pairwise(bounds)]
