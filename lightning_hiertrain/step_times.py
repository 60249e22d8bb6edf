"""How long the steps under one schedule take."""

from __future__ import annotations

import statistics
import time

_WARM_UP_STEPS = 2


class StepTimes:
    """Times steps, from the first of their mini-batches to the end of their update."""

    def __init__(self) -> None:
        self._started = 0.0
        self._seconds: list[float] = []

    @property
    def count(self) -> int:
        """Steps that have ended."""
        return len(self._seconds)

    @property
    def median_seconds(self) -> float | None:
        """The median, without the first few steps if there are more; `None` if there was none."""
        steps = self._seconds[_WARM_UP_STEPS:] or self._seconds
        return statistics.median(steps) if steps else None

    def begin(self) -> None:
        """Notes the begin of a step."""
        self._started = time.perf_counter()

    def end(self) -> None:
        """Notes its end."""
        self._seconds.append(time.perf_counter() - self._started)

    def clear(self) -> None:
        """Begins anew."""
        self._seconds.clear()
