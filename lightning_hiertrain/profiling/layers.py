"""Measuring every layer of a chain on this tier, in slices between training steps.

One repetition is a whole step (forward, backward) of a copy of the user's module, on some number of
samples, with the clock read at every cut: layers are timed where they run, with the caches as their
neighbours leave them. The first runs climb from one sample upwards, so that a slow tier learns what
it can afford before it starts on a whole mini-batch:

```
climb     1   4   16   64   128               while the budget holds a few repetitions more
measure   1   16   32   64   128   1   16     interleaved: a drift in speed hits all counts alike
```
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from time import perf_counter
from typing import Any

import torch
from torch import nn

from lightning_hiertrain.accelerators import synchronise
from lightning_hiertrain.partition import LayerChain
from lightning_hiertrain.partition.isolation import same_chance
from lightning_hiertrain.partition.rows import (
    batch_leaves,
    num_samples,
    repeat_rows,
    split_positions,
    with_leaves,
)
from lightning_hiertrain.profiles import AffineTime
from lightning_hiertrain.profiling.fit import fit_affine
from lightning_hiertrain.profiling.stopwatch import Repetition, time_step

log = logging.getLogger(__name__)

_CLIMB = 4
_FRACTIONS = (8, 4, 2, 1)
_WARM_UP = 3
"""Repetitions dropped at each count; fewer where there are not six."""
_FEWEST = 4
"""Repetitions at each count that must fit in the budget for a count to be taken."""
_MOST = 48
_ENOUGH = 12
"""Repetitions after which a count may end early, once its median is known well enough."""
_KNOWN_WELL = 0.005
"""Relative standard error of the median that ends a count early."""
_OPTIMIZER_STEPS = 12
_OPTIMIZER_PART = 0.2
"""Of the time spent so far, what the optimizer's steps may take beyond the first two."""


@dataclass(frozen=True, kw_only=True)
class TierMeasurement:
    """What one tier takes for each layer."""

    forward: tuple[AffineTime, ...]
    """By layer."""
    backward: tuple[AffineTime, ...]
    """By layer."""
    loss_seconds: AffineTime
    """Forward and backward of what follows the chain."""
    optimizer_seconds: float
    step_seconds: AffineTime
    """The whole step, fitted by itself."""
    repetitions: Mapping[int, int]
    """By number of samples, how many repetitions were kept."""
    overhead_seconds: float = 0.0
    """What a training step takes besides, from a `StepClock`."""
    transfer_seconds_per_byte: float = 0.0
    """What the processor does for each byte that is sent or received, from a `StepClock`."""


class LayerProfiler:
    """Measures the layers of a chain on this tier, a slice of time after another.

    Args:
        chain: The step's chain.
        step: A step of a copy of the user's module, free of side effects on anything else; returns
            the loss as its first tensor that requires a gradient.
        module: That copy. Its gradients and buffers and the optimizer's state change, nothing else.
        batch: A few rows to measure with, repeated where more are needed.
        batch_size: Samples in a mini-batch, the largest count that is measured.
        optimizer: An optimizer of the copy's parameters, or `None` not to measure its step.
        seconds: Time budget of all slices together.

    Raises:
        ValueError: If the mini-batch holds no sample or the budget no time.
    """

    def __init__(
        self,
        chain: LayerChain,
        step: Callable[[Any], Any],
        module: nn.Module,
        batch: Any,
        *,
        batch_size: int,
        optimizer: torch.optim.Optimizer | None,
        seconds: float,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"`batch_size` must be at least 1, got {batch_size}")
        if not seconds > 0:
            raise ValueError(f"`seconds` must be above 0, got {seconds}")
        self._chain = chain
        self._step = step
        self._module = module
        self._batch = batch
        self._split = split_positions(batch, num_samples(batch))
        self._batch_size = batch_size
        self._optimizer = optimizer
        self._budget = seconds
        self._spent = 0.0
        parameter = next(module.parameters(), None)
        self._device = torch.device("cpu") if parameter is None else parameter.device
        self._rows: dict[int, Any] = {}
        self._seen: dict[int, list[Repetition]] = {}
        self._cost: dict[int, float] = {}
        self._counts: tuple[int, ...] = ()  # empty while climbing
        self._next_climb = 1
        self._turn = 0
        self._optimizer_steps: list[float] = []

    @property
    def done(self) -> bool:
        """Whether the budget is used up or everything is known well enough."""
        if not self._seen or (self._optimizer is not None and not self._optimizer_steps):
            return False
        return self._spent >= self._budget or (bool(self._counts) and not self._open_counts())

    @property
    def progress(self) -> float:
        """How far the measuring is, from 0 to 1."""
        if self.done:
            return 1.0
        spent = min(self._spent / self._budget, 1.0)
        if not self._counts:
            return spent
        repeated = sum(min(len(self._seen.get(n, ())) / _MOST, 1.0) for n in self._counts)
        return max(spent, repeated / len(self._counts))

    def run_for(self, seconds: float) -> None:
        """Measures until a slice of time is used up, one repetition at least, or all is done.

        Args:
            seconds: Length of the slice.
        """
        start = perf_counter()
        with same_chance():
            while not self.done:
                before = perf_counter()
                self._measure_once()
                after = perf_counter()
                self._spent += after - before
                if after - start >= seconds:
                    break

    def result(self) -> TierMeasurement:
        """Fits what was measured so far.

        Raises:
            RuntimeError: If nothing was measured yet.
        """
        if not self._seen:
            raise RuntimeError("nothing was measured yet; call `run_for` first")
        kept = {n: _without_warm_up(self._seen[n]) for n in self._measured_counts()}
        layers = range(len(self._chain))
        return TierMeasurement(
            forward=tuple(_fit(kept, _forward_of(layer)) for layer in layers),
            backward=tuple(_fit(kept, _backward_of(layer)) for layer in layers),
            loss_seconds=_fit(kept, lambda r: r.loss),
            optimizer_seconds=_median_step(self._optimizer_steps),
            step_seconds=_fit(kept, lambda r: r.total),
            repetitions={n: len(repetitions) for n, repetitions in kept.items()},
        )

    def _measure_once(self) -> None:
        if self._counts:
            waiting = self._open_counts()
            count = waiting[self._turn % len(waiting)] if waiting else self._counts[0]
            self._turn += 1
            self._repeat(count)
        else:
            self._climb()
        self._time_optimizer()
        for parameter in self._module.parameters():
            parameter.grad = None

    def _climb(self) -> None:
        count = self._next_climb
        try:
            self._repeat(count)
            if len(self._seen[count]) < 2:
                return  # the first run at a count says little about its cost
        except Exception:
            if self._seen or count > 1 or self._batch_size == 1:
                raise
            log.debug("a step on a single sample failed", exc_info=True)
            self._next_climb = 2
            return
        higher = min(count * _CLIMB, self._batch_size)
        left = self._budget - self._spent
        if higher > count and self._cost_of_measuring(self._candidates(higher)) <= left:
            self._next_climb = higher
            return
        self._counts = self._candidates(count)
        log.debug("measuring with %s samples", self._counts)

    def _candidates(self, largest: int) -> tuple[int, ...]:
        smallest = min(self._seen)
        counts = {smallest, *(largest // fraction for fraction in _FRACTIONS)}
        return tuple(sorted(n for n in counts if n >= smallest))

    def _cost_of_measuring(self, counts: Sequence[int]) -> float:
        return _FEWEST * sum(self._expected_cost(n) for n in counts)

    def _expected_cost(self, count: int) -> float:
        """Returns the seconds that a repetition takes at most, from the counts measured so far."""
        if count in self._cost:
            return self._cost[count]
        above = [n for n in self._cost if n > count]
        if above:
            return self._cost[min(above)]
        largest = max(self._cost)
        return self._cost[largest] * count / largest

    def _repeat(self, count: int) -> None:
        if count not in self._rows:
            self._rows[count] = repeat_rows(self._batch, self._split, count)
        rows = self._rows[count]
        rows = with_leaves(rows, [leaf.clone() for leaf in batch_leaves(rows)])
        start = perf_counter()
        repetition = time_step(self._chain, self._step, rows, count, self._device)
        self._seen.setdefault(count, []).append(repetition)
        self._cost[count] = min(perf_counter() - start, self._cost.get(count, float("inf")))

    def _time_optimizer(self) -> None:
        done = len(self._optimizer_steps)
        affordable = sum(self._optimizer_steps) <= _OPTIMIZER_PART * self._spent
        if self._optimizer is None or done >= _OPTIMIZER_STEPS or (done >= 2 and not affordable):
            return
        gradients = [p.grad for p in self._module.parameters() if p.grad is not None]
        if not gradients:
            return
        for gradient in gradients:
            gradient.zero_()  # takes the same time and leaves the weights where they are
        synchronise(self._device)
        start = perf_counter()
        self._optimizer.step()
        synchronise(self._device)
        self._optimizer_steps.append(perf_counter() - start)

    def _measured_counts(self) -> tuple[int, ...]:
        """Returns the counts to fit to; while still climbing, all that were seen."""
        return tuple(n for n in self._counts if n in self._seen) or tuple(sorted(self._seen))

    def _open_counts(self) -> list[int]:
        return [n for n in self._counts if not _is_known(self._seen.get(n, []))]


def _is_known(repetitions: Sequence[Repetition]) -> bool:
    if len(repetitions) >= _MOST:
        return True
    kept = _without_warm_up(repetitions)
    if len(kept) < _ENOUGH:
        return False
    totals = [r.total for r in kept]
    middle = median(totals)
    deviation = 1.4826 * median(abs(t - middle) for t in totals)
    return bool(1.2533 * deviation / len(totals) ** 0.5 <= _KNOWN_WELL * middle)


def _without_warm_up(repetitions: Sequence[Repetition]) -> Sequence[Repetition]:
    return repetitions[min(_WARM_UP, len(repetitions) // 2) :]


def _fit(
    repetitions: Mapping[int, Sequence[Repetition]], part: Callable[[Repetition], float]
) -> AffineTime:
    seconds = {n: [part(r) for r in seen] for n, seen in repetitions.items()}
    return fit_affine(seconds, {n: mean(map(part, _typical(r))) for n, r in repetitions.items()})


def _forward_of(layer: int) -> Callable[[Repetition], float]:
    return lambda repetition: repetition.forward[layer]


def _backward_of(layer: int) -> Callable[[Repetition], float]:
    return lambda repetition: repetition.backward[layer]


def _typical(repetitions: Sequence[Repetition]) -> Sequence[Repetition]:
    """Returns the middle half by total time.

    Means over the same repetitions add up: the parts' to the whole's, which medians would not.
    """
    ordered = sorted(repetitions, key=lambda r: r.total)
    aside = len(ordered) // 4
    return ordered[aside : len(ordered) - aside]


def _median_step(seconds: Sequence[float]) -> float:
    """Returns the median without the first two: Adam makes its state in the first."""
    return median(seconds[min(2, len(seconds) - 1) :]) if seconds else 0.0
