"""What a step takes besides its layers."""

from __future__ import annotations

import itertools

import pytest
import torch

from lightning_hiertrain.profiling import overhead
from lightning_hiertrain.profiling.overhead import StepClock


class Clocks:
    """Stands in for the machine's clocks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.processor = 0.0
        monkeypatch.setattr(overhead, "perf_counter", lambda: self.now)
        monkeypatch.setattr(overhead, "process_time", lambda: self.processor)
        monkeypatch.setattr(overhead, "thread_time", lambda: self.processor)

    def run(self, seconds: float, processor: float) -> None:
        self.now += seconds
        self.processor += processor


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    return Clocks(monkeypatch)


def train(
    clocks: Clocks,
    steps: list[tuple[float, float]],
    *,
    processors: float,
    device: str = "cpu",
) -> StepClock:
    """Steps between slices of measuring, on a tier with a part of a processor."""
    clock = StepClock(torch.device(device))
    for step in [*steps, (0.0, 0.0)]:
        with clock.between_steps():
            with clock.working():
                clocks.run(1.0, processors)
            clocks.run(5.0, 0.0)  # waits for the other tiers
        clocks.run(*step)
    return clock


def test_on_the_tier_that_computes_it_is_what_lies_beyond_the_layers(clocks: Clocks) -> None:
    clock = train(clocks, [(9.0, 9.0), (0.5, 0.5), (0.6, 0.1), (0.7, 0.1)], processors=1.0)
    assert clock.overhead_seconds(0.4) == pytest.approx(0.2)
    assert clock.overhead_seconds(0.8) == 0.0


def test_elsewhere_it_is_the_time_that_the_processor_needs(clocks: Clocks) -> None:
    steps = [(9.0, 9.0), (2.0, 0.02), (3.0, 0.03), (4.0, 0.04)]  # mostly waits
    assert train(clocks, steps, processors=1.0).overhead_seconds(0.0) == pytest.approx(0.03)
    assert train(clocks, steps, processors=0.1).overhead_seconds(0.0) == pytest.approx(0.3)


def test_dealing_is_what_lies_between_two_steps(clocks: Clocks) -> None:
    clock = StepClock(torch.device("cpu"))
    assert clock.dealing_seconds() == 0.0
    for gap in (9.0, 0.2, 0.5, 0.3):  # the first one sets things up
        clocks.run(2.0, 2.0)
        clock.step_ended()
        clocks.run(gap, 0.0)
        with clock.between_steps():
            clocks.run(5.0, 5.0)
    assert clock.dealing_seconds() == pytest.approx(0.3)


def test_measuring_on_an_accelerator_says_nothing_of_the_processor(clocks: Clocks) -> None:
    steps = [(9.0, 9.0), (2.0, 0.02), (3.0, 0.03), (4.0, 0.04)]
    clock = train(clocks, steps, processors=0.1, device="meta")  # any but the CPU
    assert clock.overhead_seconds(0.0) == pytest.approx(0.03)


def test_one_step_is_better_than_none(clocks: Clocks) -> None:
    for steps, expected in itertools.zip_longest(([], [(0.5, 0.5)]), (0.0, 0.1)):
        assert train(clocks, steps, processors=1.0).overhead_seconds(0.4) == pytest.approx(expected)


def test_a_gap_takes_at_least_its_processor_time_on_a_part_of_a_processor(clocks: Clocks) -> None:
    clock = train(clocks, [], processors=0.1)
    for _ in range(3):
        clock.step_ended()
        clocks.run(0.02, 0.01)  # while the processor has a moment to spare
        with clock.between_steps():
            pass
    assert clock.dealing_seconds() == pytest.approx(0.1)


def test_carrying_is_what_other_threads_do_beyond_what_they_do_idly(
    clocks: Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = train(clocks, [], processors=0.1)
    main, idle = clocks.processor, 0.02
    monkeypatch.setattr(overhead, "thread_time", lambda: main)
    monkeypatch.setattr(
        overhead.threading.Event, "wait", lambda _, seconds: clocks.run(seconds, idle * seconds)
    )
    num_bytes = 0
    assert clock.transfer_seconds_per_byte() == 0.0
    with clock.carrying(lambda: num_bytes):
        clocks.run(2.0, 2.0 * idle + 0.05)
        num_bytes = 1000
    assert clock.transfer_seconds_per_byte() == pytest.approx(10 * 0.05 / 1000)
