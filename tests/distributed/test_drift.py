"""A run whose tiers or links are not, or no longer, as profiled finds the schedule of the truth."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_hiertrain import Profile, Schedule, plan, predict
from tests.distributed.drift_cases import BATCH, DROP, FAST, SLOW, profile_of
from tests.distributed.forked import run_scenarios
from tests.distributed.namespaces import namespaces

WIDTH = 4096
"""Numbers in a sample where the link between edge and cloud changes: 256 KiB in a mini-batch."""
MOST_STEPS = 120
STEPS = 40
WRONG_PROFILE = {"steps": STEPS, "believed": {"edge": 0.25}}
"""By this profile the edge is four times faster than it is."""


@pytest.fixture(scope="module")
def reports(
    tmp_path_factory: pytest.TempPathFactory, namespaces_reason: str | None
) -> Iterator[list[dict[str, Any]]]:
    """What came of a wrong profile and, where there are namespaces, of a link that changes."""

    def run(*scenarios: dict[str, Any]) -> list[dict[str, Any]]:
        asked = [("train_with_drift", {"scenarios": scenarios})]
        (found,) = run_scenarios("tests.distributed.drift_cases", asked, timeout_seconds=120)
        return list(found)

    if namespaces_reason is not None:
        yield run(WRONG_PROFILE)
        return
    folder = tmp_path_factory.mktemp("topology")
    with namespaces() as hosts:
        for link in (("device", "edge"), ("edge", "cloud")):
            hosts.limit_rate(*link, bytes_per_second=FAST)
        hosts.make_topology(Path(folder)).to_json(folder / "topology.json")
        changing = {
            "steps": MOST_STEPS,
            "width": WIDTH,
            "topology": str(folder / "topology.json"),
            "namespaces": hosts.names,
        }
        yield run(WRONG_PROFILE, changing)


def seconds_by_truth(schedule: dict[str, Any], truth: Profile) -> float:
    return predict(truth, Schedule.from_dict(schedule)).step_seconds


def best_seconds(truth: Profile) -> float:
    best = plan(truth, batch_size=BATCH).predicted_seconds
    assert best is not None
    return best


def test_a_tier_slower_than_profiled_gets_the_share_of_the_truth_and_keeps_it(
    reports: list[dict[str, Any]],
) -> None:
    report, truth = reports[0], profile_of(16, {})
    assert report["codes"] == {"device": 0, "edge": 0, "cloud": 0}, report["outputs"]
    assert report["agree"]
    (_, first), (switched, second) = report["schedules"]
    assert switched <= 25
    assert seconds_by_truth(first, truth) > 1.5 * best_seconds(truth)
    assert seconds_by_truth(second, truth) < 1.2 * best_seconds(truth)


def test_switches_change_no_update(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert len(report["schedules"]) > 1
        assert len(report["differences"]) == 3
        assert max(report["differences"]) < 1e-6


def test_a_link_that_slows_is_left_and_taken_again_when_it_recovers(
    reports: list[dict[str, Any]], namespaces_reason: str | None
) -> None:
    if namespaces_reason is not None:
        pytest.skip(namespaces_reason)
    report = reports[1]
    assert report["codes"] == {"device": 0, "edge": 0, "cloud": 0}, report["outputs"]
    assert report["agree"]

    def in_force(step: int) -> dict[str, Any]:
        return next(made for since, made in reversed(report["schedules"]) if since <= step)

    fast, slow = profile_of(WIDTH, {}), profile_of(WIDTH, {}, rate=SLOW)
    told = report["schedules"], report["outputs"]["device"]
    assert report["recovered"] is not None, told
    assert report["recovered"] < DROP + 30
    assert report["steps"] < MOST_STEPS, told
    assert seconds_by_truth(in_force(DROP), slow) > 1.5 * best_seconds(slow), told
    assert seconds_by_truth(in_force(report["recovered"]), slow) < 1.3 * best_seconds(slow), told
    assert seconds_by_truth(in_force(report["recovered"]), fast) > 1.5 * best_seconds(fast), told
    assert seconds_by_truth(in_force(MOST_STEPS), fast) < 1.4 * best_seconds(fast), told
