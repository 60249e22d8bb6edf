"""Measuring during training: what a profile holds, and that it can be used again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_hiertrain import Profile, Schedule, plan, predict
from tests.distributed.launch import Case, run_cases
from tests.distributed.plan_cases import train_plainly


@pytest.mark.timeout(200)
def test_a_run_measures_plans_and_can_be_repeated_from_its_profile(tmp_path: Path) -> None:
    file = str(tmp_path / "profile.json")
    kwargs = {"max_steps": 14, "profile_file": file}
    cases = [
        {**kwargs, "profile_steps": 3, "profile_seconds": 2.0},
        {**kwargs, "overlap": False},
    ]
    target = "tests.distributed.plan_cases:train"
    measured, repeated = run_cases(
        [Case(target=target, kwargs=case) for case in cases], timeout_seconds=180
    )
    plain = train_plainly(max_steps=14)
    for report in (*measured, *repeated):
        for name, weight in plain["weights"].items():
            torch.testing.assert_close(report["weights"][name], weight, rtol=0, atol=1e-9)

    assert [report["first_policy"] for report in measured] == [None] * 3, "it measures first"
    assert [report["first_policy"] for report in repeated] == ["hiertrain"] * 3, "it does not"
    profile = Profile.from_json(f"{file}.0")
    assert Profile.from_json(f"{file}.2") == profile, "all tiers have the same profile"
    assert profile.input_bytes_per_sample == 3 * 32 * 32 * 8
    assert [layer.output_bytes_per_sample for layer in profile.layers][:3] == [37632, 37632, 9408]
    assert sum(layer.parameter_bytes for layer in profile.layers) == 62006 * 8
    assert {link.between for link in profile.links} == {
        ("device", "edge"),
        ("device", "cloud"),
        ("edge", "cloud"),
    }
    for layer in profile.layers:
        for times in (layer.forward_seconds, layer.backward_seconds):
            assert all(time(16) >= 0 and time.sample_counts for time in times.values())
            assert all(time.relative_spread is not None for time in times.values())
    convolution = profile.layers[3]
    assert all(time(16) > 0 for time in convolution.forward_seconds.values())
    assert all(tier.optimizer_seconds > 0 for tier in profile.tiers.values())
    assert profile.tiers["cloud"].overhead_seconds > 0, "the training loop takes time"
    assert 0 < profile.dealing_seconds.fixed < 60
    assert 0 < profile.dealing_seconds.per_sample < 1

    for reports, overlap in ((measured, True), (repeated, False)):
        schedule = Schedule.from_dict(reports[0]["schedule"])
        assert schedule == plan(profile, batch_size=16, overlap=overlap)
        predicted = predict(profile, schedule, overlap=overlap).step_seconds
        assert schedule.predicted_seconds == pytest.approx(predicted)
        assert reports[0]["measured_step_seconds"] > 0
