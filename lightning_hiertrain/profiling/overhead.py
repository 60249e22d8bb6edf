"""What a training step takes on a tier besides layers, loss and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter, process_time, thread_time
from typing import Any, TypeVar

import torch

from lightning_hiertrain.accelerators import synchronise

Value = TypeVar("Value")
_WHILE_SECONDS = 0.05


class StepClock:
    """Times training steps between slices of measuring.

    While layers are measured one tier, the data tier, computes the real steps. There the overhead
    is what a step takes beyond its layers. The other tiers only keep up with the training loop:
    their overhead is the processor time that they need for it, in seconds of a clock. The two
    differ where a tier gets a part of a processor; how great that is shows in work that waits for
    nothing else. Layers on an accelerator wait for that: there a whole processor is taken for
    granted.

    A part of the data tier's overhead is what lies between two steps: the dataloader, hooks, and
    dealing out the next mini-batch. The other tiers cannot begin before it is over.

    Args:
        device: Where the layers run; it is waited for before the clock is read.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps: list[tuple[float, float]] = []
        """Seconds and processor seconds of each step."""
        self._worked = self._worked_processor = 0.0
        self._left: tuple[float, float] | None = None
        self._gaps: list[float] = []
        self._ended: float | None = None

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """What happens inside is no part of a step."""
        synchronise(self._device)
        if self._ended is not None:
            self._gaps.append(perf_counter() - self._ended)
        if self._left is not None:
            self._steps.append((perf_counter() - self._left[0], process_time() - self._left[1]))
        yield
        synchronise(self._device)
        self._left = perf_counter(), process_time()

    def step_ended(self) -> None:
        """Notes that a step is over and the next one has not begun."""
        synchronise(self._device)
        self._ended = perf_counter()

    @contextmanager
    def working(self) -> Iterator[None]:
        """What happens inside waits for nothing but a processor."""
        start, start_processor = perf_counter(), thread_time()
        yield
        self._worked += perf_counter() - start
        self._worked_processor += thread_time() - start_processor

    def overhead_seconds(self, computed_seconds: float) -> float:
        """Returns the overhead of a step, 0 if none was seen.

        The median is over all steps but the first, which sets things up, if there are more.

        Args:
            computed_seconds: What layers, loss and optimizer take of each step on this tier.
        """
        steps = _settled(self._steps)
        if not steps:
            return 0.0
        if computed_seconds > 0:
            return max(median(seconds for seconds, _ in steps) - computed_seconds, 0.0)
        stretch = 1.0
        if self._worked_processor and self._device.type == "cpu":
            stretch = self._worked / self._worked_processor
        return median(processor for _, processor in steps) * max(stretch, 1.0)

    def dealing_seconds(self) -> float:
        """Returns the time between two steps, 0 if none was seen; the median likewise."""
        return float(median(_settled(self._gaps) or [0.0]))


def _settled(values: list[Value]) -> list[Value]:
    return values[1:] or values


def mean_seconds(work: Callable[[], Any]) -> float:
    """Returns how long some work takes, done again and again for a short while."""
    start, count = perf_counter(), 0
    while (elapsed := perf_counter() - start) < _WHILE_SECONDS or not count:
        work()
        count += 1
    return elapsed / count
