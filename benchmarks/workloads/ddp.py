"""Trains by DistributedDataParallel over gloo, with equal or given shares, and times the steps.

    … -- python -m benchmarks.workloads.ddp                      equal shares
    … -- python -m benchmarks.workloads.ddp --cases cases.json

A case is `{"name": …, "shares": [12, 40, 76], "rates_mbit": {"edge-cloud": 10}}`. The data lies on
rank 0, as for the other systems; the rows of the next mini-batch travel during a step. Gradients
are weighted so that the update is that of the whole mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.workloads import records
from benchmarks.workloads.models import make_batches, make_chain, make_optimizer
from benchmarks.workloads.peers import Feed, time_cases, world


def main() -> None:
    """Runs the workload."""
    made = records.parser(__doc__ or "")
    made.add_argument("--cases", type=Path)
    parsed, protocol = records.parse(made)
    batches = make_batches(parsed.model, parsed.pixels, parsed.batch_size)
    with world() as group:
        size = dist.get_world_size()
        equal = [
            parsed.batch_size // size + (rank < parsed.batch_size % size) for rank in range(size)
        ]
        cases = [{"name": "equal", "shares": equal}]
        if parsed.cases is not None:
            cases = records.read_cases(parsed.cases)
        feeds: list[Feed] = []

        def prepare(case: dict[str, Any]) -> Callable[[], None]:
            for feed in feeds:
                feed.finish()
            ends = list(accumulate(case["shares"], initial=0))
            if ends[-1] != parsed.batch_size:
                raise ValueError(f"shares {case['shares']} do not add up to {parsed.batch_size}")
            parts = [slice(a, b) for a, b in pairwise(ends)]
            feed = Feed(group, batches, parts, batches[0])
            feeds[:] = [feed]
            # All tiers make the same weights: AlexNet's need not travel before the first step.
            chain = make_chain(parsed.model, parsed.pixels)
            model = DistributedDataParallel(chain, init_sync=False)
            optimizer = make_optimizer(model.parameters())
            weight = size / parsed.batch_size

            def step() -> None:
                images, labels = feed.next()
                loss = weight * F.cross_entropy(model(images), labels, reduction="sum")
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

            return step

        time_cases("ddp", parsed, protocol, cases, prepare)
        for feed in feeds:
            feed.finish()


if __name__ == "__main__":
    main()
