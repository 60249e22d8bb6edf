"""What Lightning offers, used across tiers: each project must end as it does on one process."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import feature_cases
from tests.distributed.feature_cases import PROJECTS
from tests.distributed.launch import Case, observe_cases, run_cases
from tests.distributed.test_stages import same
from tests.distributed.test_transparency import schedule

OWNERS = itertools.cycle(("edge", "cloud", "device"))
LAYERS = {"frozen layer, groups, table": 6}
"""Other than 5: here the losses of the samples are one layer more."""


def a_schedule(project: str) -> dict[str, Any]:
    layers = LAYERS.get(project, 5)
    return {
        "edge": schedule("edge", device=(1, 3), edge=(layers, 5), cloud=(3, 4)),
        "cloud": schedule("cloud", device=(2, 6), edge=(4, 6), cloud=(layers, 0)),
        "device": schedule("device", device=(layers, 4), edge=(3, 5), cloud=(1, 3)),
    }[next(OWNERS)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, list[Any]]]:
    folder = tmp_path_factory.mktemp("features")
    cases = [
        {"project": name, "folder": str(folder / name / "tiers"), "schedule": a_schedule(name)}
        for name in PROJECTS
    ]
    found = run_cases(
        [Case(target=f"{feature_cases.__name__}:run", kwargs=case) for case in cases],
        timeout_seconds=170,
    )
    plain = [
        feature_cases.run(name, folder=str(folder / name / "plain"), plain=True)
        for name in PROJECTS
    ]
    return dict(zip(PROJECTS, zip(plain, found, strict=True), strict=True))


@pytest.mark.parametrize("name", PROJECTS)
def test_a_project_ends_as_on_one_process(runs: Any, name: str) -> None:
    expected, ranks = runs[name]
    assert expected["steps"] > 0
    for rank, found in enumerate(ranks):
        for key, value in expected.items():
            if key not in ("log", "calls"):
                assert same(value, found[key]), (rank, key, value, found[key])


@pytest.mark.parametrize("name", PROJECTS)
def test_logs_are_written_once_with_the_values_of_one_process(runs: Any, name: str) -> None:
    expected, ranks = runs[name]
    assert rows(expected["log"]) or name == "fast_dev_run"
    assert same(rows(expected["log"]), rows(ranks[0]["log"]))


def test_datasets_are_made_on_the_data_tier_alone(runs: Any) -> None:
    expected, ranks = runs["datamodule"]
    assert ranks[0]["calls"] == expected["calls"]
    assert ranks[1]["calls"] == ranks[2]["calls"] == []


@pytest.mark.parametrize(
    ("project", "message"),
    [
        ("weights read late", "`StepNorms` uses the weights between steps on tier"),
        ("inputs read in a hook", "reads a tensor of `batch` on tier 'edge'"),
    ],
)
def test_what_a_tier_has_not_got_is_not_read_silently(
    project: str, message: str, tmp_path: Path
) -> None:
    given = schedule("edge", device=(1, 3), edge=(5, 5), cloud=(3, 4))
    case = Case(
        target=f"{feature_cases.__name__}:run",
        kwargs={"project": project, "folder": str(tmp_path), "schedule": given},
    )
    outcomes = observe_cases([case], timeout_seconds=60)
    assert all(outcome.error is not None for outcome in outcomes)
    assert any(message in str(outcome.error) for outcome in outcomes)


def rows(lines: list[str]) -> list[dict[str, float | None]]:
    return [
        {key: float(value) if value else None for key, value in row.items()}
        for row in csv.DictReader(lines)
    ]
