"""How benchmarks count steps, choose rivals' cases and read results."""

import json

import pytest

from benchmarks.figures import curves, draw, predictions, table
from benchmarks.workloads.candidates import best_shares, best_splits, varied_schedules
from benchmarks.workloads.models import make_batches, make_chain
from benchmarks.workloads.records import Protocol, record
from tests.unit.planning.instances import random_profile

PROTOCOL = Protocol(steps=20, warm_up=4, limit_seconds=120)


@pytest.mark.parametrize(
    ("warm", "ends", "counted"),
    [
        ([0.1] * 3, False, 20),
        ([0.1] * 4, True, 20),
        ([9.0], False, 5),
        ([9.0, 9.0], True, 5),
        ([121.0], True, 0),
    ],
)
def test_slow_steps_are_fewer_and_very_slow_ones_end_it(warm, ends, counted):
    assert PROTOCOL.ends_warm_up(warm) is ends
    assert PROTOCOL.counted_steps(warm) == counted


def test_a_record_keeps_the_median_or_what_was_given_up():
    assert record({"name": "a"}, [1.0], [3.0, 1.0, 2.0])["median_seconds"] == 2.0
    given_up = record({"name": "a"}, [120.0], [])
    assert (given_up["median_seconds"], given_up["cut_off_seconds"]) == (None, 120.0)


@pytest.fixture(scope="module")
def profile():
    return random_profile(seed=3, num_layers=6)


def test_the_best_shares_are_the_whole_mini_batch(profile):
    shares = best_shares(profile, 64)

    assert sum(shares) == 64
    assert best_shares(profile, 64, with_device=False)[0] == 0


def test_the_best_splits_cut_the_chain_in_three(profile):
    names = [layer.name.rpartition(".")[2] for layer in profile.layers]
    splits = best_splits(profile, names, 64, count=2)

    assert [split["num_microbatches"] for split in splits] == [4, 4, 8, 8]
    assert splits[0]["predicted_seconds"] <= splits[1]["predicted_seconds"]
    assert all(0 < split["cuts"][0] < split["cuts"][1] < 6 for split in splits)


def test_varied_schedules_have_every_owner(profile):
    schedules = varied_schedules(profile, 64, 6, overlap=False, slowest=float("inf"))

    assert {schedule.owner for schedule in schedules} == set(profile.tiers)
    assert {schedule.batch_size for schedule in schedules} == {64}
    assert len({json.dumps(schedule.to_dict()) for schedule in schedules}) == 6


def test_all_systems_get_the_same_eight_bit_images():
    (as_bytes, labels), (as_floats, same) = (
        make_batches("lenet5", pixels, 4)[0] for pixels in ("uint8", "float32")
    )

    assert as_bytes.element_size() == 1
    assert labels.equal(same)
    assert make_chain("lenet5", "uint8")(as_bytes).equal(make_chain("lenet5", "float32")(as_floats))


def point(system, rate, seconds, **more):
    return {
        "system": system,
        "rates_mbit": {"edge-cloud": rate},
        "median_seconds": seconds,
        **more,
    }


RESULTS = {
    "model": "lenet5",
    "batch_size": 128,
    "lower_bound_seconds": {"1": 0.4, "10": 0.2},
    "points": [
        point("overlap", 1, 0.5, predicted_seconds=0.45, schedule={"owner": "edge"}),
        point("overlap", 10, 0.25, predicted_seconds=0.25, schedule={"owner": "cloud"}),
        point("all-edge", 1, 1.0, predicted_seconds=1.0, schedule={"owner": "edge"}),
        point("all-edge", 10, 1.0, predicted_seconds=1.1, schedule={"owner": "edge"}),
        point("ddp, equal shares", 10, 2.0),
        point("ddp, best shares", 10, 1.5),
        point("gpipe", 1, None, schedule="gpipe", predicted_seconds=3.0),
        {"system": "plain", "rates_mbit": {}, "median_seconds": 1.0},
    ],
}


def test_of_the_ways_of_ddp_the_best_is_drawn():
    assert curves(RESULTS) == {
        "all-edge": {1: 1.0, 10: 1.0},
        "ddp": {10: 1.5},
        "overlap": {1: 0.5, 10: 0.25},
    }


def test_predictions_are_compared_with_and_without_overlap():
    assert predictions(RESULTS) == {
        "without overlap": [(1.0, 1.0), (1.1, 1.0)],
        "with overlap": [(0.45, 0.5), (0.25, 0.25)],
    }


def test_the_table_tells_how_much_faster():
    text = table(RESULTS)

    assert "| ddp | - | 1.5 |" in text
    assert "over all-edge: 2.83 times in the geometric mean, at best 4.00 at 10 Mbit/s" in text
    assert "80% of the lower bound" in text
    assert "predictions without overlap: 2 schedules, median error 5.0%, greatest 10.0%" in text


def test_figures_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    files = draw(RESULTS, tmp_path / "figures")

    assert [file.read_bytes()[:4] for file in files] == 2 * [b"\x89PNG"]
