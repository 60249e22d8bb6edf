"""A tier holds no memory for weights that others train."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import memory_cases
from tests.distributed.launch import Case, run_cases
from tests.distributed.test_transparency import schedule

CASES: dict[str, dict[str, Any]] = {
    "given": {"schedule": schedule("cloud", device=(1, 3), edge=(2, 3), cloud=(8, 2))},
    # All-device while it measures, then another owner.
    "measured": {"policy": "all-cloud", "profile_steps": 3, "profile_seconds": 0.3},
}


@pytest.fixture(scope="module")
def runs() -> dict[str, list[dict[str, Any]]]:
    target = f"{memory_cases.__name__}:train"
    found = run_cases([Case(target=target, kwargs=case) for case in CASES.values()])
    return dict(zip(CASES, found, strict=True))


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return memory_cases.train(plain=True)


@pytest.mark.parametrize("name", CASES)
def test_weights_end_on_every_tier_as_in_plain_lightning(runs: Any, plain: Any, name: str) -> None:
    for report in runs[name]:
        assert report["strides"] == plain["strides"]
        assert report["metrics"] == pytest.approx(plain["metrics"], abs=1e-5)
        for key, value in plain["weights"].items():
            torch.testing.assert_close(report["weights"][key], value, atol=1e-5, rtol=0, msg=key)


def test_prefix_workers_hold_the_layers_that_they_run(runs: Any) -> None:
    device, edge, cloud = runs["given"]
    assert set(cloud["held"]) == {cloud["whole"]}
    for worker in (device, edge):
        assert max(worker["held"]) < 0.01 * worker["whole"]


def test_the_data_tier_gives_memory_back_when_another_tier_owns_the_step(runs: Any) -> None:
    device, edge, cloud = runs["measured"]
    assert device["held"][0] == cloud["held"][-1] == device["whole"]
    assert max(device["held"][-1], cloud["held"][0], *edge["held"]) < 0.01 * device["whole"]
