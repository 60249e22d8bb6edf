"""Lightning's loops on three tiers, of which one has the data and one does the steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.launch import Case, observe_cases, run_cases
from tests.distributed.symmetric_cases import train

TARGET = "tests.distributed.symmetric_cases:train"
PLACES = [("edge", "device"), ("device", "cloud")]
STAGES: list[dict[str, Any]] = [{"max_epochs": 3}, {"max_epochs": 6, "resume": True}]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("runs")
    plain = [train(str(folder / "plain"), **stage) for stage in STAGES]
    cases = [
        Case(
            target=TARGET,
            kwargs={"folder": str(folder / owner), "owner": owner, "data_tier": data_tier, **stage},
        )
        for owner, data_tier in PLACES
        for stage in STAGES
    ]
    return plain * len(PLACES), run_cases(cases, timeout_seconds=110), folder


def same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.allclose(first, second, atol=1e-7)
    if isinstance(first, float):
        return first == pytest.approx(second, abs=1e-7)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


def test_every_tier_ends_as_one_process_does_also_when_resumed(runs: Any) -> None:
    expected, cases, _ = runs
    assert expected[0]["epochs"] == 3 < expected[1]["epochs"]
    assert "direct" in expected[0]["log"]
    assert "writer" in expected[0]["log"]
    for plain, ranks in zip(expected, cases, strict=True):
        for rank, found in enumerate(ranks):
            for key, value in plain.items():
                if key != "log" or rank == 0:
                    assert same(value, found[key]), (rank, key, value, found[key])


def test_the_checkpoint_holds_what_plain_lightning_would_save(runs: Any) -> None:
    *_, folder = runs
    plain, *others = (
        torch.load(folder / name / "checkpoints" / "last.ckpt", weights_only=False)
        for name in ("plain", *(owner for owner, _ in PLACES))
    )
    for other in others:
        for key in ("state_dict", "optimizer_states", "lr_schedulers", "loops", "Data"):
            assert same(plain[key], other[key]), key


def test_an_error_of_the_data_tier_s_loader_ends_all_tiers(tmp_path: Path) -> None:
    case = Case(target=TARGET, kwargs={"folder": str(tmp_path), "owner": "edge", "fails": True})
    outcomes = observe_cases([case], timeout_seconds=60)
    assert all(outcome.error is not None for outcome in outcomes)
    assert "the disk is gone" in str(outcomes[0].error)
    assert "the disk is gone" in str(outcomes[1].error)
    assert "device" in str(outcomes[2].error)
