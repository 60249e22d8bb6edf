"""What tells a benchmark of the end of each training step."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.profilers import Profiler


class StepEnds(Profiler):
    """A profiler that is told of the beginning of training and of the end of each step.

    A callback of the user's own may change weights between steps, so that `HierTrainStrategy` has
    the tiers ask each other after each one whether it did. A profiler that comes with a Trainer
    cannot, and costs plain Lightning as little.
    """

    trainer: Any = None
    """To be set before training."""
    _has_begun = False

    def begin(self) -> None:
        """Called once, before the first step."""

    def step_ended(self) -> None:
        """Called after each step."""

    def start(self, action_name: str) -> None:
        """Hears that Lightning begins something."""
        if action_name == "run_training_epoch" and not self._has_begun:
            self._has_begun = True
            self.begin()

    def stop(self, action_name: str) -> None:
        """Hears that Lightning has ended something."""
        if action_name == "run_training_batch":
            self.step_ended()
