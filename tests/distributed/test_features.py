"""What Lightning offers, used across tiers: each project must end as it does on one process."""

from __future__ import annotations

import csv
import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import feature_cases, trainer_cases
from tests.distributed.launch import Case, observe_cases, run_cases
from tests.distributed.test_stages import same
from tests.distributed.test_transparency import schedule

MODULES = {
    **dict.fromkeys(feature_cases.PROJECTS, feature_cases),
    **dict.fromkeys(trainer_cases.PROJECTS, trainer_cases),
}
OWNERS = itertools.cycle(("edge", "cloud", "device"))
LAYERS = dict.fromkeys(
    ("frozen layer, groups, table", "compiled parts", "overrides", "weights changed by hand"), 6
)
"""Other than 5: here the losses of the samples, or another layer, are one more."""


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
        for name in MODULES
    ]
    found = run_cases(
        [Case(target=f"{MODULES[case['project']].__name__}:run", kwargs=case) for case in cases],
        timeout_seconds=170,
    )
    plain = [
        module.run(name, folder=str(folder / name / "plain"), plain=True)
        for name, module in MODULES.items()
    ]
    return dict(zip(MODULES, zip(plain, found, strict=True), strict=True))


@pytest.mark.parametrize("name", MODULES)
def test_a_project_ends_as_on_one_process(runs: Any, name: str) -> None:
    expected, ranks = runs[name]
    assert expected["steps"] > 0
    for rank, found in enumerate(ranks):
        for key, value in expected.items():
            if key not in ("log", "calls", "notes"):
                atol = 2e-2 if "16" in name else 1e-6
                assert same(value, found[key], atol=atol), (rank, key, value, found[key])


@pytest.mark.parametrize("name", MODULES)
def test_logs_are_written_once_with_the_values_of_one_process(runs: Any, name: str) -> None:
    expected, ranks = runs[name]
    assert rows(expected["log"]) or name in ("fast_dev_run", "barebones")
    atol = 2e-2 if "16" in name else 1e-6
    assert same(rows(expected["log"]), rows(ranks[0]["log"]), atol=atol)
    assert expected["notes"] == ranks[0]["notes"]


def test_datasets_are_made_on_the_data_tier_alone(runs: Any) -> None:
    expected, ranks = runs["datamodule"]
    assert ranks[0]["calls"] == expected["calls"]
    assert ranks[1]["calls"] == ranks[2]["calls"] == []


GIVEN = schedule("edge", device=(1, 3), edge=(5, 5), cloud=(3, 4))
ENDS = {"KeyboardInterrupt": (1, "SystemExit"), "SIGTERM": (0, "SIGTERMException")}
"""How a tier is interrupted: which one, and how its own run ends."""


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[Any]]]:
    folder = tmp_path_factory.mktemp("endings")
    cases = {"go_on": [{"folder": str(folder / "tiers")}]}
    cases["interrupted"] = [{"how": how, "rank": rank} for how, (rank, _) in ENDS.items()]
    found = run_cases(
        [
            Case(target=f"{trainer_cases.__name__}:{name}", kwargs={**kwargs, "schedule": GIVEN})
            for name, several in cases.items()
            for kwargs in several
        ],
        timeout_seconds=80,
    )
    return folder, found


def test_going_on_from_the_last_checkpoint_needs_no_common_disk(endings: Any) -> None:
    # The tiers looked for "last" each in its own folder, and waited for one another in vain.
    folder, (ranks, *_) = endings
    expected = trainer_cases.go_on(folder=str(folder / "plain"), plain=True)
    assert expected["steps"] == expected["seen"] == 11
    assert expected["files"].count("events") >= 2
    for rank, found in enumerate(ranks):
        for key, value in expected.items():
            wanted = [] if key == "files" and rank else value
            assert same(wanted, found[key]), (rank, key, wanted, found[key])


@pytest.mark.parametrize("how", ENDS)
def test_an_interrupt_on_one_tier_ends_all(endings: Any, how: str) -> None:
    interrupted, ended = ENDS[how]
    for rank, found in enumerate(endings[1][1 + list(ENDS).index(how)]):
        assert found["ended"] == (ended if rank == interrupted else "PeerLostError")
        assert found["seconds"] < 30


@pytest.mark.parametrize(
    ("project", "message"),
    [
        ("weights read late", "`Hidden` uses the weights between steps on tier"),
        ("inputs read in a hook", "reads a tensor of `batch` on tier 'edge'"),
    ],
    ids=["weights read late", "inputs read in a hook"],
)
def test_what_a_tier_has_not_got_is_not_read_silently(
    project: str, message: str, tmp_path: Path
) -> None:
    case = Case(
        target=f"{feature_cases.__name__}:run",
        kwargs={"project": project, "folder": str(tmp_path), "schedule": GIVEN},
    )
    outcomes = observe_cases([case], timeout_seconds=60)
    assert all(outcome.error is not None for outcome in outcomes)
    assert any(message in str(outcome.error) for outcome in outcomes)


def rows(lines: list[str]) -> list[dict[str, float | None]]:
    return [
        {key: float(value) if value else None for key, value in row.items()}
        for row in csv.DictReader(lines)
    ]
