"""Trains by torch.distributed.pipelining, device to edge to cloud, and times the steps.

    … -- python -m benchmarks.workloads.pipeline                      an even split, GPipe
    … -- python -m benchmarks.workloads.pipeline --cases cases.json

A case is `{"name": …, "cuts": [4, 8], "schedule": "gpipe", "num_microbatches": 4, "rates_mbit":
{"edge-cloud": 10}}`: the device runs the layers before the first cut, the cloud those from the
second on. Labels travel to the cloud a step ahead.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from benchmarks.workloads import records
from benchmarks.workloads.models import make_batches, make_chain, make_optimizer
from benchmarks.workloads.peers import Feed, time_cases, world

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def main() -> None:
    """Runs the workload."""
    made = records.parser(__doc__ or "")
    made.add_argument("--cases", type=Path)
    parsed, protocol = records.parse(made)
    batches = make_batches(parsed.model, parsed.pixels, parsed.batch_size)
    layers = list(make_chain(parsed.model, parsed.pixels))
    with world() as group:
        rank, size = dist.get_rank(), dist.get_world_size()
        even = [len(layers) * stage // size for stage in range(1, size)]
        cases = [{"name": "even", "cuts": even, "schedule": "gpipe", "num_microbatches": 4}]
        if parsed.cases is not None:
            cases = records.read_cases(parsed.cases)
        nothing, whole = slice(0, 0), slice(0, parsed.batch_size)
        feeds: list[Feed] = []

        def prepare(case: dict[str, Any]) -> Callable[[], None]:
            for feed in feeds:
                feed.finish()
            parts = [whole, *[nothing] * (size - 2), whole]
            feed = Feed(group, batches, parts, (None, batches[0][1]))
            feeds[:] = [feed]
            begin, end = list(pairwise([0, *case["cuts"], len(layers)]))[rank]
            chain = list(make_chain(parsed.model, parsed.pixels))
            module = nn.Sequential(*chain[begin:end])
            stage = PipelineStage(module, rank, size, torch.device("cpu"))
            schedule = SCHEDULES[case["schedule"]](
                stage, case["num_microbatches"], loss_fn=F.cross_entropy
            )
            parameters = list(module.parameters())
            optimizer = make_optimizer(parameters) if parameters else None

            def step() -> None:
                images, labels = feed.next()
                if rank == 0:
                    schedule.step(images, return_outputs=False)
                elif rank == size - 1:
                    schedule.step(target=labels, losses=[], return_outputs=False)
                else:
                    schedule.step(return_outputs=False)
                if optimizer is not None:
                    optimizer.step()
                    optimizer.zero_grad()

            return step

        time_cases("pipeline", parsed, protocol, cases, prepare)
        for feed in feeds:
            feed.finish()


if __name__ == "__main__":
    main()
