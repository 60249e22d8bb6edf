"""What a training step takes on a tier besides layers, loss and optimizer, and what a byte does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from time import perf_counter, process_time, thread_time
from typing import Any, TypeVar

import torch

from lightning_hiertrain.accelerators import synchronise

Value = TypeVar("Value")
_WHILE_SECONDS = 0.05
_IDLE_SECONDS = 0.3


class StepClock:
    """Times training steps between slices of measuring.

    While layers are measured one tier, the data tier, computes the real steps. There the overhead
    is what a step takes beyond its layers. The other tiers only keep up with the training loop:
    their overhead is the processor time that they need for it, in seconds of a clock. The two
    differ where a tier gets a part of a processor; how great that is shows in work that waits for
    nothing else. Layers on an accelerator wait for that: there a whole processor is taken for
    granted.

    A part of the data tier's overhead is what lies between two steps: the dataloader, hooks, and
    dealing out the next mini-batch. The other tiers cannot begin before it is over. With a part of
    a processor a short gap may be over before that part is used up, and a busier tier has it used
    up: it takes at least its processor time, in seconds of a clock.

    What is sent and received is encrypted and copied by other threads, which take their processor
    time from the layers.

    Args:
        device: Where the layers run; it is waited for before the clock is read.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps: list[tuple[float, float]] = []
        """Seconds and processor seconds of each step."""
        self._worked = self._worked_processor = 0.0
        self._left: tuple[float, float] | None = None
        self._gaps: list[tuple[float, float]] = []
        """Seconds and processor seconds between two steps."""
        self._ended: tuple[float, float] | None = None
        self._idle_rate = 0.0
        """What the other threads do when nothing is sent, in processor seconds a second."""
        self._carried = 0.0
        self._carried_bytes = 0

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """What happens inside is no part of a step."""
        synchronise(self._device)
        if self._ended is not None:
            self._gaps.append((perf_counter() - self._ended[0], thread_time() - self._ended[1]))
        if self._left is not None:
            self._steps.append((perf_counter() - self._left[0], process_time() - self._left[1]))
        yield
        synchronise(self._device)
        self._left = perf_counter(), process_time()

    def step_ended(self) -> None:
        """Notes that a step is over and the next one has not begun."""
        synchronise(self._device)
        self._ended = perf_counter(), thread_time()

    @contextmanager
    def working(self) -> Iterator[None]:
        """What happens inside waits for nothing but a processor."""
        start, start_processor = perf_counter(), thread_time()
        yield
        self._worked += perf_counter() - start
        self._worked_processor += thread_time() - start_processor

    @contextmanager
    def carrying(self, count_bytes: Callable[[], int]) -> Iterator[None]:
        """What happens inside sends and receives, and this thread does nothing else meanwhile.

        Args:
            count_bytes: Returns how many bytes this tier has sent and received in all.
        """
        start, begun = perf_counter(), _of_other_threads()
        threading.Event().wait(_IDLE_SECONDS)
        self._idle_rate = (_of_other_threads() - begun) / (perf_counter() - start)
        start, begun, bytes_before = perf_counter(), _of_other_threads(), count_bytes()
        yield
        idle = self._idle_rate * (perf_counter() - start)
        self._carried += max(_of_other_threads() - begun - idle, 0.0)
        self._carried_bytes += count_bytes() - bytes_before

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
        return median(processor for _, processor in steps) * self._stretch

    def dealing_seconds(self) -> float:
        """Returns the time between two steps, 0 if none was seen; the median likewise."""
        gaps = _settled(self._gaps) or [(0.0, 0.0)]
        return median(max(seconds, processor * self._stretch) for seconds, processor in gaps)

    def transfer_seconds_per_byte(self) -> float:
        """Returns what a byte takes that this tier sends or receives, 0 if none was seen."""
        if not self._carried_bytes:
            return 0.0
        return self._carried * self._stretch / self._carried_bytes

    @property
    def _stretch(self) -> float:
        """How many seconds of a clock a second of the processor takes this tier."""
        if self._worked_processor and self._device.type == "cpu":
            return max(self._worked / self._worked_processor, 1.0)
        return 1.0


def _settled(values: list[Value]) -> list[Value]:
    return values[1:] or values


def _of_other_threads() -> float:
    return process_time() - thread_time()


def mean_seconds(work: Callable[[], Any]) -> float:
    """Returns how long some work takes, done again and again for a short while."""
    start, count = perf_counter(), 0
    while (elapsed := perf_counter() - start) < _WHILE_SECONDS or not count:
        work()
        count += 1
    return elapsed / count
