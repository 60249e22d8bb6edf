"""Callbacks that the strategy adds by itself or that a user may add."""

from __future__ import annotations


from lightning.pytorch import Callback, Trainer


class ProfilingCallback(Callback):
    def __init__(self, *, num_steps: int, seconds: float) -> None:
        self._num_steps, self._seconds = num_steps, seconds

    def attach(self, trainer: Trainer) -> None: ...
