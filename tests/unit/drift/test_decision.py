"""Whether a switch is worth it, and how often there may be one."""

from __future__ import annotations

import math
import random
import threading
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from lightning_hiertrain import Profile, Schedule, Share, plan, predict
from lightning_hiertrain.drift.decision import (
    Patience,
    drifted_profile,
    expected_busy,
    judge,
    switch_seconds,
)
from lightning_hiertrain.profiles import AffineTime, LayerProfile, LinkProfile, TierProfile

SPEEDS = {"device": 16e-3, "edge": 4e-3, "cloud": 2e-3}


def profile(rate: float = 6e6) -> Profile:
    times = {tier: AffineTime(fixed=0.0, per_sample=value) for tier, value in SPEEDS.items()}
    layer = LayerProfile(
        name="layer",
        output_bytes_per_sample=100,
        parameter_bytes=1000,
        forward_seconds=times,
        backward_seconds=times,
    )
    return Profile(
        model="Model",
        input_bytes_per_sample=30_000,
        target_bytes_per_sample=8,
        data_tier="device",
        tiers={tier: TierProfile(overhead_seconds=0.01) for tier in SPEEDS},
        layers=(layer,) * 4,
        links=(
            LinkProfile(between=("device", "edge"), bandwidth_bytes_per_second=6e6),
            LinkProfile(between=("cloud", "edge"), bandwidth_bytes_per_second=rate),
        ),
        optimizer_state_bytes=4000,
    )


def best(known: Profile) -> Schedule:
    return plan(known, batch_size=16)


def verdict(known: Profile, current: Schedule, **options: float):
    asked = {"measured_seconds": math.inf, "least_saving": 0.1, "steps_left": math.inf, **options}
    return judge(known, current, plan=best, overlap=True, **asked)


def test_the_schedule_of_the_truth_is_found_when_a_tier_is_slower():
    current = best(profile())
    drifted = drifted_profile(profile(), {"cloud": 4.0}, {})
    found = verdict(drifted, current)
    assert found.is_worth_it
    assert found.schedule.shares == best(drifted).shares != current.shares
    assert found.new_seconds == pytest.approx(predict(drifted, found.schedule).step_seconds)


def test_a_link_is_changed_whichever_end_is_named_first():
    drifted = drifted_profile(profile(), {}, {"edge-cloud": 1e5})
    assert drifted == profile(rate=1e5)
    assert verdict(drifted, best(profile())).is_worth_it


def test_a_schedule_that_is_still_best_is_kept():
    assert not verdict(profile(), best(profile())).is_worth_it
    twice = drifted_profile(profile(), dict.fromkeys(SPEEDS, 2.0), {})
    assert not verdict(twice, best(profile())).is_worth_it


def test_a_small_saving_is_not_worth_it():
    current = best(profile())
    drifted = drifted_profile(profile(), {"cloud": 4.0}, {})
    saved = 1 - verdict(drifted, current).new_seconds / verdict(drifted, current).current_seconds
    assert verdict(drifted, current, least_saving=saved - 0.01).is_worth_it
    assert not verdict(drifted, current, least_saving=saved + 0.01).is_worth_it


def test_what_was_measured_counts_where_it_is_less_than_predicted():
    current = best(profile())
    drifted = drifted_profile(profile(), {"cloud": 4.0}, {})
    new = verdict(drifted, current).new_seconds
    assert not verdict(drifted, current, measured_seconds=1.05 * new).is_worth_it
    assert verdict(drifted, current, measured_seconds=1.2 * new).is_worth_it


def test_a_switch_that_costs_more_than_it_saves_is_not_worth_it():
    current = best(profile())
    heavy = replace(
        drifted_profile(profile(), {"cloud": 4.0}, {}), optimizer_state_bytes=600_000_000
    )
    found = verdict(heavy, current)
    assert found.schedule.owner != current.owner
    assert found.switch_seconds > 100 * (found.current_seconds - found.new_seconds)
    assert not found.is_worth_it


def test_the_end_of_the_run_is_no_time_for_a_switch():
    current = best(profile())
    drifted = drifted_profile(profile(), {"cloud": 4.0}, {})
    assert verdict(drifted, current).switch_seconds > 0
    assert not verdict(drifted, current, steps_left=0).is_worth_it


def test_a_switch_costs_what_travels():
    def schedule(owner: str, **layers: int) -> Schedule:
        shares = {t: Share(num_layers=n, num_samples=4 if n else 0) for t, n in layers.items()}
        return Schedule(owner=owner, shares=shares)

    edge = schedule("edge", device=2, edge=4, cloud=0)
    cloud = schedule("cloud", device=3, edge=1, cloud=4)
    known = profile(rate=1000.0)
    assert switch_seconds(known, edge, edge) == 0.0
    # All weights and the optimizer's state to the cloud, one more layer to the device.
    assert switch_seconds(known, edge, cloud) == pytest.approx(8.0 + 1000 / 6e6)
    # The old owner has all weights.
    assert switch_seconds(known, cloud, edge) == pytest.approx((3000 + 4000) / 1000)


def test_tiers_without_samples_are_told_from_those_with():
    schedule = Schedule(
        owner="edge",
        shares={
            "device": Share(num_layers=0, num_samples=0),
            "edge": Share(num_layers=4, num_samples=16),
        },
    )
    expected = expected_busy(profile(), schedule, overlap=True)
    assert expected.seconds == {"edge": pytest.approx(0.01 + 16 * 8 * 4e-3)}
    assert expected.idle_tiers == {"device", "cloud"}


def test_a_plan_in_the_background_draws_none_of_the_random_numbers_of_the_training():
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    made = []
    thread = threading.Thread(target=lambda: made.append(best(profile(rate=3e5))))
    thread.start()
    thread.join(60)
    assert made
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (np.random.get_state()[1].tolist(), random.getstate())


def test_switches_that_follow_soon_upon_another_become_rare():
    patience, switches = Patience(), []
    for step in range(1000):
        patience.step()
        if patience.allows:  # a machine that would have a switch whenever it may
            patience.switched()
            switches.append(step)
    pauses = [b - a for a, b in pairwise(switches)]
    assert pauses == sorted(pauses)
    assert len(switches) < 10


def test_switches_far_apart_stay_quick():
    patience = Patience()
    for _ in range(10):
        for _ in range(40):
            patience.step()
        assert patience.allows
        patience.switched()
        for _ in range(4):
            assert not patience.allows
            patience.step()
        assert patience.allows


def test_what_was_refused_is_looked_at_again_ever_more_rarely():
    patience, looks = Patience(), []
    patience.refused()
    for step in range(1, 200):
        patience.step()
        assert patience.allows
        if patience.wants_another_look:
            looks.append(step)
            patience.refused()
    assert looks == [8, 24, 56, 120]
