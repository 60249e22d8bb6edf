import gc
import random
from time import perf_counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_hiertrain.partition import trace_step
from lightning_hiertrain.profiling import layers, stopwatch
from lightning_hiertrain.profiling.layers import LayerProfiler
from lightning_hiertrain.profiling.stopwatch import time_step


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Clock:
    """Time that passes only where a test says so: results then do not depend on a busy machine."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds

    def spend(self, seconds):
        self.seconds += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(layers, "perf_counter", clock)
    monkeypatch.setattr(stopwatch, "perf_counter", clock)
    return clock


class Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, spend, forward_time, backward_time):
        ctx.spend = spend
        ctx.backward_time = backward_time
        spend(forward_time[0] + forward_time[1] * x.size(0))
        return x

    @staticmethod
    def backward(ctx, gradient):
        ctx.spend(ctx.backward_time[0] + ctx.backward_time[1] * gradient.size(0))
        return gradient, None, None, None


class Known(nn.Module):
    """A layer whose cost is known: `(fixed, per_sample)` seconds forward and backward."""

    def __init__(self, clock, forward_time, backward_time):
        super().__init__()
        self.times = (clock.spend, forward_time, backward_time)
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return Wait.apply(x, *self.times) * self.weight


def lenet():
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5),
        nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(400, 120), nn.ReLU(),
        nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def images(rows=8):
    return torch.randn(rows, 3, 32, 32), torch.arange(rows) % 10


def step_of(module, loss=F.cross_entropy):
    return lambda batch: {"loss": loss(module(batch[0]), batch[1])}


def profiler_of(module, batch, *, step=None, batch_size=16, seconds=1.0, **kwargs):
    step = step or step_of(module)
    chain = trace_step(step, module, batch)
    optimizer = kwargs.pop("optimizer", None)
    return LayerProfiler(
        chain, step, module, batch, batch_size=batch_size, optimizer=optimizer, seconds=seconds
    )


def test_known_costs_are_recovered(clock):
    times = [((1e-3, 2e-4), (2e-3, 1e-4)), ((5e-4, 5e-4), (5e-4, 6e-4)), ((2e-3, 0), (0, 3e-4))]
    module = nn.Sequential(nn.Linear(3, 3), *(Known(clock, *time) for time in times))
    batch = (torch.randn(4, 3), torch.randn(4, 3))
    profiler = profiler_of(module, batch, step=step_of(module, F.mse_loss), seconds=5.0)
    profiler.run_for(10)
    result = profiler.result()
    assert [(t.fixed, t.per_sample) for t in result.forward[1:]] == [
        pytest.approx(f) for f, _ in times
    ]
    assert [(t.fixed, t.per_sample) for t in result.backward[1:]] == [
        pytest.approx(b) for _, b in times
    ]
    assert result.loss_seconds(16) == 0.0
    assert result.forward[0].sample_counts == (1, 2, 4, 8, 16)
    assert min(result.repetitions.values()) >= 12


def test_layers_and_loss_add_up_to_the_whole_lenet_step():
    module = lenet()
    profiler = profiler_of(module, images(), batch_size=64, seconds=2.0)
    profiler.run_for(10)
    result = profiler.result()
    parts = sum(t(64) for t in (*result.forward, *result.backward, result.loss_seconds))
    assert parts == pytest.approx(result.step_seconds(64), rel=1e-6)
    step, rows, whole = step_of(module), images(64), []
    for _ in range(20):
        start = perf_counter()
        step(rows)["loss"].backward()
        whole.append(perf_counter() - start)
    # The same step with no clock in it, at another time on a machine that may be busy.
    assert min(whole) * 0.7 < parts < max(whole) * 1.5


def test_one_repetition_adds_up_to_its_whole():
    module = lenet()
    chain = trace_step(step_of(module), module, images())
    ratios, rows = [], images(32)
    for _ in range(5):
        start = perf_counter()
        repetition = time_step(chain, step_of(module), rows, 32, torch.device("cpu"))
        ratios.append(repetition.total / (perf_counter() - start))
    assert 0.9 < max(ratios) <= 1.0
    assert len(repetition.forward) == len(repetition.backward) == len(chain)
    assert min(*repetition.forward, *repetition.backward, repetition.loss) >= 0


def test_a_slow_tier_stays_near_its_budget_with_fewer_counts(clock):
    module = nn.Sequential(Known(clock, (1e-3, 4e-3), (1e-3, 4e-3)))
    batch = (torch.randn(4, 3), torch.randn(4, 3))
    step = step_of(module, F.mse_loss)
    profiler = profiler_of(module, batch, step=step, batch_size=128, seconds=0.5)
    while not profiler.done:
        profiler.run_for(0.1)
    assert 0.3 < clock() < 0.7
    result = profiler.result()
    assert 2 <= len(result.repetitions) < 5
    assert max(result.repetitions) < 128
    assert result.forward[0].sample_counts == tuple(result.repetitions)
    assert result.forward[0](128) == pytest.approx(0.513)


def test_an_uneven_machine_shows_in_the_spread(clock):
    class Uneven(Known):
        calls = 0

        def forward(self, x):
            self.calls += 1
            clock.spend(4e-3 if self.calls % 2 else 0.0)
            return super().forward(x)

    def spread(kind):
        module = nn.Sequential(kind(clock, (1e-3, 1e-3), (0, 0)))
        batch = (torch.randn(4, 3), torch.randn(4, 3))
        chain = trace_step(step_of(module, F.mse_loss), module, batch)
        profiler = LayerProfiler(
            chain, step_of(module, F.mse_loss), module, batch, batch_size=8, optimizer=None,
            seconds=2.0,
        )  # fmt: skip
        profiler.run_for(10)
        return profiler.result().forward[0].relative_spread

    assert spread(Known) == pytest.approx(0.0, abs=1e-6)
    assert spread(Uneven) > 0.1


def test_a_step_longer_than_the_budget_is_measured_once(clock):
    module = nn.Sequential(Known(clock, (0.05, 0.0), (0.0, 0.0)))
    batch = (torch.randn(4, 3), torch.randn(4, 3))
    profiler = profiler_of(module, batch, step=step_of(module, F.mse_loss), seconds=0.01)
    profiler.run_for(0.001)
    assert profiler.done
    assert profiler.result().repetitions == {1: 1}


def test_a_slice_ends_in_time_and_progress_grows():
    profiler = profiler_of(lenet(), images(), batch_size=32, seconds=5.0)
    seen = [profiler.progress]
    for _ in range(4):
        start = perf_counter()
        profiler.run_for(0.02)
        assert perf_counter() - start < 0.5
        seen.append(profiler.progress)
    assert seen[0] == 0.0
    assert seen == sorted(seen)
    assert seen[-1] > 0.0
    profiler.run_for(20)
    assert profiler.done
    assert profiler.progress == 1.0
    assert all(count >= 12 for count in profiler.result().repetitions.values())


def test_in_place_activations_after_conv_and_norm_keep_their_hooks():
    module = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3),
        nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 10),
    )  # fmt: skip
    batch = (torch.randn(8, 3, 10, 10), torch.arange(8))
    chain = trace_step(step_of(module), module, batch)
    repetition = time_step(chain, step_of(module), batch, 8, torch.device("cpu"))
    assert len(chain) == 7
    assert min(repetition.backward) > 0
    with_hooks = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    step_of(module)(batch)["loss"].backward()
    for gradient, parameter in zip(with_hooks, module.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


def test_an_in_place_call_on_a_view_shares_the_time():
    class View(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 10)

        def forward(self, x):
            return self.second(F.relu(self.first(x).view(-1, 6), inplace=True))

    module, batch = View(), (torch.randn(8, 6), torch.arange(8))
    chain = trace_step(step_of(module), module, batch)
    repetition = time_step(chain, step_of(module), batch, 8, torch.device("cpu"))
    assert len(repetition.backward) == len(chain) >= 3
    assert min(repetition.backward) >= 0


def test_layers_that_hand_on_their_input_take_no_less_than_no_time():
    # The gradient's hooks on one tensor run in the order of its layers: the times went back.
    class HandsOn(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 10)

        def forward(self, x):
            x = F.dropout(self.first(x).relu(), 0.0).contiguous().float()
            return self.second(x)

    module, batch = HandsOn(), (torch.randn(8, 6), torch.arange(8))
    chain = trace_step(step_of(module), module, batch)
    repetition = time_step(chain, step_of(module), batch, 8, torch.device("cpu"))
    assert len(chain) >= 4
    assert min(repetition.backward) >= 0
    assert min(repetition.forward) >= 0


def test_frozen_layers_take_no_time_backward():
    module = lenet()
    for parameter in module[:4].parameters():
        parameter.requires_grad = False
    chain = trace_step(step_of(module), module, images())
    repetition = time_step(chain, step_of(module), images(), 8, torch.device("cpu"))
    assert repetition.backward[:4] == (0.0,) * 4
    assert min(repetition.backward[7:]) > 0


def test_a_model_that_needs_two_rows_is_measured_from_two():
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    batch = (torch.randn(4, 4), torch.arange(4) % 3)
    profiler = profiler_of(module, batch, batch_size=16, seconds=2.0)
    profiler.run_for(10)
    assert min(profiler.result().repetitions) == 2


def test_an_error_of_the_step_reaches_the_caller():
    module = lenet()
    step = step_of(module)
    chain = trace_step(step, module, images())

    def broken(batch):
        if batch[0].size(0) == 4:
            raise RuntimeError("four is too many")
        return step(batch)

    profiler = LayerProfiler(
        chain, broken, module, images(), batch_size=16, optimizer=None, seconds=1.0
    )
    with pytest.raises(RuntimeError, match="four is too many"):
        profiler.run_for(5)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_nothing_but_gradients_buffers_and_optimizer_state_changes(kind):
    module = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 4))
    x, y = torch.rand(8, 6), torch.arange(8) % 4

    def step(batch):
        return F.cross_entropy(module(batch[0].mul_(0.5)), batch[1])

    def noisy_step(batch):
        random.random()
        np.random.rand()
        return step(batch)

    chain = trace_step(step, module, (x, y))
    before = {name: p.clone() for name, p in module.named_parameters()}
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    rows, collecting = x.clone(), gc.isenabled()
    profiler = LayerProfiler(
        chain, noisy_step, module, (x, y), batch_size=16, optimizer=kind(module.parameters()),
        seconds=0.3,
    )  # fmt: skip
    profiler.run_for(5)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert (states[2] == np.random.get_state()[1]).all()
    assert gc.isenabled() == collecting
    assert torch.equal(x, rows)
    for name, parameter in module.named_parameters():
        assert parameter.grad is None
        assert torch.equal(parameter, before[name])


def test_the_optimizer_is_timed_without_its_first_steps(clock):
    class Slow(torch.optim.SGD):
        steps = 0

        def step(self, closure=None):
            self.steps += 1
            clock.spend(0.1 if self.steps == 1 else 5e-3)

    module = nn.Sequential(Known(clock, (0.01, 1e-3), (0.01, 1e-3)))
    batch = (torch.randn(4, 3), torch.randn(4, 3))
    optimizer = Slow(module.parameters(), lr=0.1)
    step = step_of(module, F.mse_loss)
    profiler = profiler_of(module, batch, step=step, optimizer=optimizer, seconds=20.0)
    profiler.run_for(50)
    assert optimizer.steps >= 10
    assert profiler.result().optimizer_seconds == pytest.approx(5e-3)


def test_bad_arguments_are_refused():
    module = lenet()
    with pytest.raises(ValueError, match="`seconds` must be above 0"):
        profiler_of(module, images(), seconds=0)
    with pytest.raises(ValueError, match="`batch_size` must be at least 1"):
        profiler_of(module, images(), batch_size=0)
    with pytest.raises(RuntimeError, match="nothing was measured yet"):
        profiler_of(module, images()).result()
