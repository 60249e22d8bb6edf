"""What the strategy is asked for, and the thread on which plans are made."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

from lightning_hiertrain import HierTrainStrategy
from lightning_hiertrain.drift.watch import _Planning


@pytest.mark.parametrize("value", [-0.1, 1.0, 7])
def test_an_impossible_saving_is_refused(value: float):
    with pytest.raises(ValueError, match="`replan_when` is the part of a step"):
        HierTrainStrategy(replan_when=value)


def test_a_plan_is_made_on_another_thread_and_leaves_the_interpreter_as_it_was():
    interval, threads, verdict = sys.getswitchinterval(), [], object()

    def work() -> Any:
        threads.append(threading.current_thread())
        return verdict

    planning = _Planning(work, None)  # type: ignore[arg-type]
    planning.join(10)
    assert planning.is_done
    assert planning.verdict is verdict
    assert threads != [threading.main_thread()]
    assert sys.getswitchinterval() == interval


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_a_plan_that_fails_leaves_the_run_as_it_was(error: type[Exception]):
    def work() -> Any:
        raise error("on purpose")

    interval = sys.getswitchinterval()
    planning = _Planning(work, None)  # type: ignore[arg-type]
    planning.join(10)
    assert planning.is_done
    assert planning.verdict is None
    assert sys.getswitchinterval() == interval
