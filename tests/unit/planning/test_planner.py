"""The planner against exhaustive search, and what it promises besides."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lightning_hiertrain.errors import PlanningError
from lightning_hiertrain.planning import POLICIES, lower_bound, plan, predict, programme
from lightning_hiertrain.planning.codecs import COMPRESSION, codec_profile
from lightning_hiertrain.profiles import AffineTime, CodecProfile, Profile
from tests.unit.planning.instances import random_profile, with_transfer_seconds
from tests.unit.planning.oracle import exhaustive

MODES = {"plain": False, "overlap": True}


def with_bandwidth(profile: Profile, bytes_per_second: float) -> Profile:
    last = replace(profile.links[1], bandwidth_bytes_per_second=bytes_per_second)
    return replace(profile, links=(profile.links[0], last, *profile.links[2:]))


def check(profile: Profile, batch_size: int, mode: str, counts: tuple[int, ...] = (1, 2)) -> None:
    """Compares the plan with exhaustive search."""
    counts = counts if mode == "overlap" else (1,)
    best = exhaustive(profile, batch_size, mode=mode, chunk_counts=counts)
    if not np.isfinite(best):
        with pytest.raises(PlanningError, match="fits into memory"):
            plan(profile, batch_size=batch_size, overlap=MODES[mode], chunk_counts=counts)
        return
    schedule = plan(profile, batch_size=batch_size, overlap=MODES[mode], chunk_counts=counts)
    predicted = predict(profile, schedule, overlap=MODES[mode]).step_seconds
    assert schedule.predicted_seconds == predicted
    assert predicted == pytest.approx(best, rel=1e-6)
    assert schedule.optimality_gap == 0
    assert schedule.batch_size == batch_size


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("mode", MODES)
def test_plan_equals_exhaustive_search(seed: int, mode: str) -> None:
    data = seed % 3 if seed % 5 == 0 else 0
    profile = random_profile(seed, num_layers=2 + seed % 3, memory=seed % 4 == 3, data=data)
    check(profile, 5 + seed % 6, mode)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("mode", MODES)
def test_plan_equals_exhaustive_search_with_four_tiers(seed: int, mode: str) -> None:
    names = ("device", "edge1", "edge2", "cloud")
    profile = random_profile(200 + seed, num_layers=2, names=names, memory=seed % 2 == 1)
    check(profile, 5 + seed % 3, mode)


@pytest.mark.parametrize("mode", MODES)
def test_plan_equals_exhaustive_search_with_two_devices_and_two_edges(mode: str) -> None:
    names = ("device1", "device2", "edge1", "edge2", "cloud")
    check(random_profile(300, num_layers=1, names=names, mesh=0.5), 7, mode)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("mode", MODES)
def test_plan_with_codecs_equals_exhaustive_search(seed: int, mode: str) -> None:
    profile = random_profile(400 + seed, num_layers=2)
    # Codecs that cost about what they save, so that the choice is open.
    rng = np.random.default_rng(seed)
    codecs = {
        name: CodecProfile(
            bytes_ratio=ratio,
            encode_seconds_per_byte={t: float(rng.uniform(0, 2e-8)) for t in profile.tiers},
            decode_seconds_per_byte={t: float(rng.uniform(0, 2e-8)) for t in profile.tiers},
        )
        for name, ratio in (("fp16", 0.5), ("int8", 0.25), ("int8+zstd", 0.2))
    }
    profile = replace(profile, codecs=codecs)
    figures = {name: codec_profile(profile, name) for name in COMPRESSION}
    counts = (1, 2) if mode == "overlap" else (1,)
    best = exhaustive(
        profile, 6, mode=mode, chunk_counts=counts, codecs=COMPRESSION, figures=figures
    )
    schedule = plan(
        profile, batch_size=6, overlap=MODES[mode], chunk_counts=counts, compression=COMPRESSION
    )
    assert schedule.predicted_seconds == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("seed", range(30))
def test_lower_bound_equals_exhaustive_search(seed: int) -> None:
    profile = random_profile(1000 + seed, num_layers=2 + seed % 3)
    best = exhaustive(profile, 4 + seed % 5, mode="busiest")
    assert lower_bound(profile, batch_size=4 + seed % 5) == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mode", MODES)
def test_a_policy_equals_exhaustive_search_over_what_it_may_choose(policy: str, mode: str) -> None:
    def allowed(owner: str, cuts: dict[str, int], empty: bool) -> bool:
        workers = {tier for tier, cut in cuts.items() if cut}
        if policy.startswith("all-"):
            return owner == policy.removeprefix("all-") and not workers
        if policy == "jointdnn":
            return {owner, *workers} <= {"device", "cloud"} and (not workers or empty)
        if policy == "jalad":
            return owner == "cloud" and workers == {"edge"} and empty
        return True

    for seed in range(4):
        profile = random_profile(500 + seed, num_layers=3)
        codecs = ("minmax8",) if policy == "jalad" else ("none",)
        figures = {name: codec_profile(profile, name) for name in codecs}
        counts = (1, 4) if mode == "overlap" else (1,)
        best = exhaustive(
            profile,
            7,
            mode=mode,
            chunk_counts=counts,
            codecs=codecs,
            figures=figures,
            allowed=allowed,
        )
        schedule = plan(profile, batch_size=7, policy=policy, overlap=MODES[mode])
        assert schedule.predicted_seconds == pytest.approx(best, rel=1e-6)
        assert schedule.policy == policy


def test_hiertrain_is_never_slower_than_any_other_policy() -> None:
    for seed in range(300):
        bandwidth = 1e6 / 8 * 0.5 * 2000 ** (seed / 299)  # 0.5 to 1000 Mbit/s
        profile = random_profile(2000 + seed, num_layers=3 + seed % 6)
        profile = with_bandwidth(profile, bandwidth)
        overlap = seed % 2 == 0
        seconds = {
            policy: plan(
                profile, batch_size=32, policy=policy, overlap=overlap, compression=True
            ).predicted_seconds
            for policy in POLICIES
        }
        assert seconds["hiertrain"] <= min(seconds.values()) * (1 + 1e-6), (seed, seconds)


def test_overlap_is_never_slower_and_the_bound_holds() -> None:
    for seed in range(100):
        profile = random_profile(3000 + seed, num_layers=4)
        bound = lower_bound(profile, batch_size=32)
        assert bound <= plan(profile, batch_size=32).predicted_seconds * (1 + 1e-6)
        # What carrying takes from processors counts only where something else goes on meanwhile.
        profile = with_transfer_seconds(profile, {})
        plain = plan(profile, batch_size=32, overlap=False)
        overlapped = plan(profile, batch_size=32)
        assert overlapped.predicted_seconds <= plain.predicted_seconds * (1 + 1e-6)


def test_jalad_takes_the_fewest_bits_that_the_accuracy_allows() -> None:
    losses = {2: 0.2, 3: 0.1, 4: 0.02, 5: 0.009, 6: 0.004, 8: 0.001}
    profile = with_bandwidth(random_profile(1, num_layers=4), 1e5)
    profile = replace(
        profile,
        codecs={
            f"minmax{bits}": CodecProfile(bytes_ratio=bits / 32, accuracy_loss=loss)
            for bits, loss in losses.items()
        },
    )
    schedule = plan(profile, policy="jalad", accuracy_loss_limit=0.01)
    assert dict(schedule.codecs) == {"edge": "minmax5"}
    with pytest.raises(PlanningError, match="no quantiser of the policy 'jalad' keeps to"):
        plan(profile, policy="jalad", accuracy_loss_limit=1e-4)


def test_compression_leaves_out_what_loses_too_much() -> None:
    profile = replace(
        random_profile(2, num_layers=4),
        codecs={"tiny": CodecProfile(bytes_ratio=1e-3, accuracy_loss=0.5)},
    )
    allowed = plan(profile, compression=("tiny",), accuracy_loss_limit=0.6)
    refused = plan(profile, compression=("tiny",), accuracy_loss_limit=0.4)
    assert set(allowed.codecs.values()) == {"tiny"}
    assert dict(refused.codecs) == {}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("depth", [1, 2])
def test_raw_samples_stay_on_the_data_tier(mode: str, depth: int) -> None:
    def allowed(owner: str, cuts: dict[str, int], empty: bool) -> bool:
        workers = {tier: cut for tier, cut in cuts.items() if cut}
        if owner == "device":
            return not workers
        return set(workers) == {"device"} and empty and workers["device"] >= depth

    for seed in range(6):
        profile = random_profile(600 + seed, num_layers=3)
        counts = (1, 4) if mode == "overlap" else (1,)
        best = exhaustive(profile, 6, mode=mode, chunk_counts=counts, allowed=allowed)
        schedule = plan(
            profile,
            batch_size=6,
            overlap=MODES[mode],
            keep_inputs_on_data_tier=True,
            least_depth=depth,
        )
        assert schedule.shares["device"].num_samples == 6
        assert schedule.predicted_seconds == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_shares_honour_the_least_number_of_samples(mode: str) -> None:
    moved = 0
    for seed in range(8):
        profile = random_profile(700 + seed, num_layers=3)
        counts = (1, 4) if mode == "overlap" else (1,)
        best = exhaustive(profile, 7, mode=mode, chunk_counts=counts, least_samples=2)
        schedule = plan(profile, batch_size=7, overlap=MODES[mode], least_samples=2)
        assert all(share.num_samples != 1 for share in schedule.shares.values())
        assert schedule.predicted_seconds == pytest.approx(best, rel=1e-6)
        free = plan(profile, batch_size=7, overlap=MODES[mode])
        moved += any(share.num_samples == 1 for share in free.shares.values())
    assert moved, "no plan would have given a tier one sample"


def test_more_samples_than_the_mini_batch_has_are_refused() -> None:
    with pytest.raises(ValueError, match="`least_samples` is 9 and the mini-batch has 8 samples"):
        plan(random_profile(1, num_layers=3), batch_size=8, least_samples=9)


@pytest.mark.parametrize("policy", ["all-edge", "all-cloud", "jalad"])
def test_a_policy_that_cannot_keep_raw_samples_says_so(policy: str) -> None:
    with pytest.raises(PlanningError, match=f"'{policy}' sends raw samples away from the data"):
        plan(random_profile(1, num_layers=3), policy=policy, keep_inputs_on_data_tier=True)


def test_a_depth_past_the_last_layer_is_refused() -> None:
    with pytest.raises(ValueError, match="`least_depth` is 4, the model has layers 1 to 3"):
        plan(random_profile(1, num_layers=3), keep_inputs_on_data_tier=True, least_depth=4)


def test_a_memory_that_is_too_small_is_named_with_what_it_lacks() -> None:
    profile = random_profile(1, num_layers=3)
    tiers = {name: replace(tier, memory_bytes=10**5) for name, tier in profile.tiers.items()}
    parameters = sum(layer.parameter_bytes for layer in profile.layers)
    outputs = sum(layer.output_bytes_per_sample for layer in profile.layers)
    inputs, targets = profile.input_bytes_per_sample, profile.target_bytes_per_sample
    need = 4 * parameters + 32 * (targets + inputs + outputs)
    with pytest.raises(PlanningError) as caught:
        plan(replace(profile, tiers=tiers), batch_size=32, policy="all-edge", overlap=False)
    assert f"tier 'edge' needs {need:,} bytes and may use 100,000" in str(caught.value)
    assert f"{need - 10**5:,} too few" in str(caught.value)


def test_memory_moves_samples_to_another_tier() -> None:
    profile = random_profile(1, num_layers=3)
    free = plan(profile, overlap=False)
    busiest = max(free.shares, key=lambda tier: free.shares[tier].num_samples)
    limited = {**profile.tiers, busiest: replace(profile.tiers[busiest], memory_bytes=10**5)}
    schedule = plan(replace(profile, tiers=limited), overlap=False)
    assert schedule.shares[busiest].num_samples < free.shares[busiest].num_samples
    assert schedule.predicted_seconds > free.predicted_seconds


def test_a_time_limit_returns_the_incumbent_with_its_gap_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    profile = random_profile(1, num_layers=40, names=tuple(f"tier{i}" for i in range(8)))
    with caplog.at_level(logging.WARNING):
        schedule = plan(profile, time_limit_seconds=0.05)
    assert schedule.optimality_gap > 0
    assert schedule.predicted_seconds == predict(profile, schedule).step_seconds
    assert "time limit of 0.05 s ended the search" in caplog.text
    bound = schedule.predicted_seconds * (1 - schedule.optimality_gap)
    assert bound <= lower_bound_by_sampling(profile)


def lower_bound_by_sampling(profile: Profile) -> float:
    """The best of some schedules; no bound may exceed it."""
    return min(
        plan(profile, policy=f"all-{tier}").predicted_seconds or np.inf for tier in profile.tiers
    )


def test_ties_break_the_same_way_every_time(tmp_path: Path) -> None:
    profile = random_profile(4, num_layers=6)
    same = {
        name: AffineTime(fixed=1e-3, per_sample=1e-3) for name in profile.tiers
    }  # three equal tiers
    layers = tuple(
        replace(layer, forward_seconds=same, backward_seconds=same) for layer in profile.layers
    )
    profile = replace(profile, layers=layers)
    code = (
        "from tests.unit.planning.test_planner import *\n"
        "import sys\n"
        "profile = Profile.from_json(sys.argv[1])\n"
        "print(plan(profile, batch_size=32).to_dict())"
    )
    first = plan(profile, batch_size=32)
    for seed in range(5):
        plan(random_profile(seed, num_layers=6), batch_size=32)
        assert plan(profile, batch_size=32) == first
    path = tmp_path / "profile.json"
    profile.to_json(path)
    printed = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, timeout=120, check=True
    )
    assert printed.stdout.strip() == str(first.to_dict())


def test_a_plan_after_a_bandwidth_change_uses_the_compiled_programme() -> None:
    profile = random_profile(7, num_layers=8)
    plan(profile)
    compiled = programme._template.cache_info().misses
    for factor in (0.99, 0.98, 1.01):
        plan(with_bandwidth(profile, profile.links[1].bandwidth_bytes_per_second * factor))
    assert programme._template.cache_info().misses == compiled


@pytest.mark.parametrize(("num_layers", "seconds"), [(8, 0.5), (21, 1.0), (50, 2.0), (150, 10.0)])
def test_planning_is_fast(num_layers: int, seconds: float) -> None:
    plan(random_profile(0, num_layers=2), batch_size=8)  # imports
    for seed in range(3):
        profile = random_profile(seed, num_layers=num_layers)
        for batch_size in (128, 4096):
            start = time.process_time()  # what other processes take does not count
            plan(profile, batch_size=batch_size)
            assert time.process_time() - start < seconds * (1 if batch_size == 128 else 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 2}, "has 2 samples and there are 3 tiers"),
        ({"batch_size": 12.5}, "has 12.5 samples"),
        ({"policy": "fastest"}, "there is no policy 'fastest'"),
        ({"policy": "all-fog"}, "needs a tier 'fog'"),
        ({"compression": ("gzip",)}, "the codec 'gzip' is unknown"),
        ({"chunk_counts": ()}, "`chunk_counts` must be whole numbers of at least 1"),
        ({"chunk_counts": (0,)}, "`chunk_counts` must be whole numbers of at least 1"),
    ],
)
def test_impossible_arguments_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(random_profile(1, num_layers=3), **arguments)  # type: ignore[arg-type]


def test_a_tier_that_takes_no_time_is_refused() -> None:
    profile = random_profile(1, num_layers=1)
    nothing = {**profile.layers[0].forward_seconds, "edge": AffineTime(fixed=0, per_sample=0)}
    layer = replace(profile.layers[0], forward_seconds=nothing, backward_seconds=nothing)
    with pytest.raises(ValueError, match="tier 'edge' takes 0 s for each of the 1 layers"):
        plan(replace(profile, layers=(layer,)))


def test_numbers_beyond_reason_are_refused() -> None:
    with pytest.raises(ValueError, match="carrying one mini-batch would take"):
        plan(with_bandwidth(random_profile(1, num_layers=3), 1e-300))


@pytest.mark.parametrize("names", [("device",), ("device", "cloud")])
def test_one_and_two_tiers_are_planned(names: tuple[str, ...]) -> None:
    profile = random_profile(5, num_layers=3, names=names)
    for overlap in (False, True):
        best = exhaustive(
            profile, 9, mode="overlap" if overlap else "plain", chunk_counts=(1, 4)[: 1 + overlap]
        )
        schedule = plan(profile, batch_size=9, overlap=overlap)
        assert schedule.predicted_seconds == pytest.approx(best, rel=1e-6)


def test_importing_the_planner_leaves_the_solver_for_later() -> None:
    code = (
        "import sys, lightning_hiertrain.planning as p, lightning_hiertrain.schedule\n"
        "print('cvxpy' in sys.modules, 'pyscipopt' in sys.modules)\n"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert printed.stdout.split() == ["False", "False"]
