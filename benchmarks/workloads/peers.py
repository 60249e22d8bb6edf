"""What the peers have in common: a world of gloo, steps that are timed, a step that never ends."""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.testbed import join_quota, set_rate
from benchmarks.workloads import records
from benchmarks.workloads.models import Batch

MEETING = timedelta(hours=2)
"""Longer than any step that is not given up."""
GRACE_SECONDS = 5.0

Run = Callable[[dict[str, Any]], Callable[[], None]]
"""Prepares a case and returns what makes one step."""


@contextmanager
def world() -> Iterator[dist.ProcessGroup]:
    """Opens the world of all tiers, and yields a second group in which mini-batches travel."""
    dist.init_process_group("gloo", timeout=MEETING)
    try:
        group = dist.new_group(backend="gloo", timeout=MEETING)
        yield group
    finally:
        dist.destroy_process_group()


def time_cases(
    system: str,
    parsed: argparse.Namespace,
    protocol: records.Protocol,
    cases: list[dict[str, Any]],
    prepare: Run,
) -> None:
    """Times one case after the other; the data tier writes `SYSTEM.json` after each.

    A step that takes too long cannot be stopped, so it ends the process, with what is known by
    then written down: the cases behind it are left for another start.
    """
    results: list[dict[str, Any]] = []
    head = {
        "system": system,
        "model": parsed.model,
        "batch_size": parsed.batch_size,
        "pixels": parsed.pixels,
        "command": sys.argv[1:],
        "machine": records.machine(),
    }

    def write() -> None:
        data = {**head, "peak_memory_bytes": records.peak_memory_bytes(), "results": results}
        records.write(f"{system}.json", data)

    join_quota()
    for case in cases:
        if dist.get_rank() == 0:
            for link, mbit in case.get("rates_mbit", {}).items():
                set_rate(link, mbit)
        dist.barrier()
        warm: list[float] = []
        counted: list[float] = []
        step = prepare(case)

        def give_up(case: dict[str, Any] = case, warm: list[float] = warm) -> None:
            if dist.get_rank() == 0:
                results.append(records.record(case, [*warm, protocol.limit_seconds], []))
                write()
            os._exit(0)

        with _limit(protocol.limit_seconds, give_up) as restart:
            _time(step, protocol, warm, counted, restart)
        results.append(records.record(case, warm, counted))
        write()
        if dist.get_rank() == 0:
            seconds = results[-1]["median_seconds"] or results[-1]["cut_off_seconds"]
            sys.stdout.write(f"{case['name']}: {seconds:.4f} s, {len(counted)} steps\n")


def _time(
    step: Callable[[], None],
    protocol: records.Protocol,
    warm: list[float],
    counted: list[float],
    restart: Callable[[], None],
) -> None:
    last = time.perf_counter()
    to_count = None
    while to_count is None:
        step()
        now = time.perf_counter()
        warm.append(now - last)
        restart()
        decided = protocol.counted_steps(warm) if protocol.ends_warm_up(warm) else None
        to_count = _agreed(decided)
        last = time.perf_counter()
    for _ in range(to_count):
        step()
        now = time.perf_counter()
        counted.append(now - last)
        last = now
        restart()


def _agreed(value: Any) -> Any:
    """Returns on all tiers what the data tier says."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


@contextmanager
def _limit(seconds: float, give_up: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Calls `give_up` when a step lasts too long; what it yields says that one has ended."""
    ended = threading.Event()
    done = threading.Event()
    # The data tier writes the result; the others follow a little later.
    patience = seconds + (0 if dist.get_rank() == 0 else GRACE_SECONDS)

    def watch() -> None:
        while not done.is_set():
            if not ended.wait(patience):
                give_up()
            ended.clear()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield ended.set
    finally:
        done.set()
        ended.set()
        thread.join()


class Feed:
    """Brings the data tier's mini-batches to the others, one step ahead.

    Args:
        group: Where they travel.
        batches: On the data tier the mini-batches that are taken in turn.
        parts: For each rank the rows that it gets.
        shapes: For images and labels the shape of a row, `None` for what does not travel.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        batches: list[Batch],
        parts: list[slice],
        like: tuple[Tensor | None, Tensor | None],
    ) -> None:
        self._group = group
        self._batches = batches
        self._parts = parts
        self._like = like
        self._step = 0
        self._ahead: tuple[list[Any], list[Tensor | None]] | None = None

    def next(self) -> list[Tensor | None]:
        """Returns this rank's rows and starts the next mini-batch on its way."""
        works, tensors = self._ahead or self._start()
        for work in works:
            work.wait()
        self._ahead = self._start()
        return tensors

    def finish(self) -> None:
        """Waits for the mini-batch that is on its way; nobody will ask for it."""
        for work in self._ahead[0] if self._ahead is not None else []:
            work.wait()
        self._ahead = None

    def _start(self) -> tuple[list[Any], list[Tensor | None]]:
        works: list[Any] = []
        own = self._parts[dist.get_rank()]
        if dist.get_rank() == 0:
            batch = self._batches[self._step % len(self._batches)]
            for rank, part in enumerate(self._parts):
                if rank and part.stop > part.start:
                    works += [
                        dist.isend(tensor[part].contiguous(), rank, group=self._group)
                        for tensor, like in zip(batch, self._like, strict=True)
                        if like is not None
                    ]
            tensors: list[Tensor | None] = [tensor[own] for tensor in batch]
        else:
            rows = own.stop - own.start
            tensors = [
                None if like is None else torch.empty((rows, *like.shape[1:]), dtype=like.dtype)
                for like in self._like
            ]
            works = [
                dist.irecv(tensor, 0, group=self._group)
                for tensor in tensors
                if tensor is not None and rows
            ]
        self._step += 1
        return works, tensors
