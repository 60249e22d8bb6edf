"""Running the user's step up to a cut."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from lightning_hiertrain.execution.chance import own_chance
from lightning_hiertrain.partition.chain import LayerChain
from lightning_hiertrain.partition.passage import CutReached, Passage
from lightning_hiertrain.partition.rows import batch_leaves, with_leaves


def run_to_cut(
    chain: LayerChain,
    num_layers: int,
    step: Callable[[Any], Any],
    batch: Any,
    rows: slice,
    within: AbstractContextManager[Any] | None = None,
) -> Tensor | None:
    """Runs the first layers on some rows and leaves the step at the cut behind them.

    Args:
        chain: The step's chain.
        num_layers: Layers in front of the cut.
        step: The user's step, called with the batch.
        batch: The batch as a prefix worker's step sees it.
        rows: Which of its rows to run.
        within: A context for the step.

    Returns:
        What crosses the cut; `None` if the step returned nothing, as one that is skipped.
    """
    leaves = [
        leaf if shape is None else leaf[rows]
        for leaf, shape in zip(batch_leaves(batch), chain.leaf_shapes, strict=True)
    ]
    passage = Passage(chain, leaves, num_rows=rows.stop - rows.start, taps={num_layers: _leave})
    try:
        with within or nullcontext(), passage:
            output = step(with_leaves(batch, leaves))
    except CutReached as cut:
        return cut.output
    if output is None:
        return None
    passage.check_complete()
    raise AssertionError("a step passed its cut")


def chance_of(
    seed: int, tier: str, index: int, chunk: int, *, draws: bool
) -> AbstractContextManager[None]:
    """Returns the context in which a prefix worker runs a chunk, the same wherever that is.

    Args:
        seed: The prefix worker's own seed.
        tier: The prefix worker.
        index: The mini-batch.
        chunk: Which of its chunks.
        draws: Whether the layers draw random numbers.
    """
    return own_chance(f"{seed}/{tier}/{index}/{chunk}") if draws else nullcontext()


def _leave(output: Tensor) -> Tensor:
    raise CutReached(output)
