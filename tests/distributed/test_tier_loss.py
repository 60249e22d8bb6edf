"""Training that has lost a tier goes on from the very step: its weights are those of no loss."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.distributed.forked import run_scenarios
from tests.distributed.loss_cases import SILENCE_SECONDS, TIERS, random_scenario

EXACT = 1e-12
PLAIN: dict[str, dict[str, Any]] = {"plain": {}, "plain, accumulating": {"accumulate": 3}}
NORMALISED = {"owner": "edge", "model": "Normalised", "samples": 32}
LAST_STEP = 12
"""Of the run above: a loss there leaves no later step, whose schedule would be another one."""


def dying(call: str, tag: str, *, owner: str = "edge", victim: str = "cloud", **more: Any) -> Any:
    return {"owner": owner, "deaths": {victim: (call, tag)}, **more}


LOSSES: dict[str, dict[str, Any]] = {
    "before its activations": dying("send", "7/activations/0"),
    "between its activations": dying("send", "7/activations/1"),
    "waiting for a gradient": dying(
        "receive", "7/activation_gradients/1", owner="device", victim="edge"
    ),
    "between its gradients": dying("send", "7/gradients/1"),
    "waiting for weights": dying("receive", "8/weights/1", strategy={"overlap": False}),
    "in validation": dying("receive", "evaluation/.*"),
    "writing a checkpoint": dying(
        "send", "collective/.*save_checkpoint.*", checkpoints="checkpoints"
    ),
    "at the end of training": dying("send", "collective/.*barrier.*"),
    "before activations, accumulating": dying("send", "8/activations/1", accumulate=3),
    "between gradients, accumulating": dying("send", "8/gradients/1", accumulate=3),
    "stopped": dying("send", "7/activations/1", harm="SIGSTOP"),
    "under a planned schedule": dying("send", "8/activations/0", planned="profile"),
    "while layers are measured": dying("send", "collective/.*all_gather.*", planned="measured"),
    "while links are measured": dying("send", "link bulk", planned="measured"),
    "both others": {
        "owner": "device",
        "deaths": {
            "edge": ("receive", "7/activation_gradients/0"),
            "cloud": ("send", "9/gradients/3"),
        },
    },
}
LOSSES["both others, while layers are measured"] = {
    "owner": "device",
    "planned": "measured",
    "deaths": {"edge": ("any", 10), "cloud": ("any", 20)},
}
_chance = random.Random(7)
SOAK = {f"random {number}": random_scenario(_chance) for number in range(8)}
"""`benchmarks/faults.py` runs hundreds of them."""
NORMALISED_LOSSES = {
    f"normalised, before {what}": {
        **NORMALISED,
        "deaths": {"cloud": ("send", f"{LAST_STEP}/{what}")},
    }
    for what in ("activations/0", "gradients/1", "buffers")
}
FATAL = {
    "owner": dying("send", "7/weights/1", victim="edge"),
    "data tier": dying("send", "7/activations/1", victim="device"),
    "stop": dying("send", "7/activations/1", strategy={"on_tier_lost": "stop"}),
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("losses")
    scenarios = {**PLAIN, "normalised": NORMALISED, **LOSSES, **SOAK, **NORMALISED_LOSSES, **FATAL}
    for scenario in scenarios.values():
        if "checkpoints" in scenario:
            scenario["checkpoints"] = str(folder / "checkpoints")
    named = [("run_scenario", {"folder": str(folder), "scenario": x}) for x in scenarios.values()]
    reports = run_scenarios("tests.distributed.loss_cases", named, timeout_seconds=300)
    return dict(zip(scenarios, reports, strict=True))


def check_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Nothing that a user can see tells that a tier was lost."""
    assert found["weights"].keys() == expected["weights"].keys()
    for kind in ("weights", "metrics"):
        for name, value in expected[kind].items():
            assert torch.allclose(found[kind][name], value, rtol=0, atol=EXACT), name
    for what in ("lr", "global_step", "epoch", "steps_seen", "kept", "world_sizes"):
        assert found[what] == expected[what], what


@pytest.mark.parametrize("name", [*LOSSES, *NORMALISED_LOSSES])
def test_training_goes_on_from_the_step_of_the_loss(
    reports: dict[str, dict[str, Any]], name: str
) -> None:
    scenario, report = (LOSSES | NORMALISED_LOSSES)[name], reports[name]
    accumulates = scenario.get("accumulate", 1) > 1
    expected = reports["plain, accumulating" if accumulates else "plain"]["device"]
    if name in NORMALISED_LOSSES:
        expected = reports["normalised"]["device"]
    stopped = scenario.get("harm") == "SIGSTOP"
    for tier in TIERS:
        output = report[tier]["output"]
        if tier in scenario["deaths"]:
            assert report[tier]["exit"] == (1 if stopped else -9), output
            continue
        assert report[tier]["exit"] == 0, (tier, output)
        found = report[tier]["result"]
        check_same(found, expected["result"])
        for victim in scenario["deaths"]:
            assert f"tier '{victim}' is lost" in output
            if name in LOSSES and name != "at the end of training":
                assert victim not in found["schedule"]["shares"]
        after = [end - report["died"] for end in found["ends"] if end > report["died"]]
        assert not after or after[0] < (2 * SILENCE_SECONDS if stopped else 3.0)


@pytest.mark.parametrize("name", SOAK)
def test_no_moment_of_a_loss_changes_the_result(
    reports: dict[str, dict[str, Any]], name: str
) -> None:
    scenario, report = SOAK[name], reports[name]
    accumulates = scenario["accumulate"] > 1
    expected = reports["plain, accumulating" if accumulates else "plain"]["device"]["result"]
    for tier in TIERS:
        if tier not in scenario["deaths"]:
            assert report[tier]["exit"] == 0, (scenario, tier, report[tier]["output"])
            check_same(report[tier]["result"], expected)


def test_random_losses_happen(reports: dict[str, dict[str, Any]]) -> None:
    assert sum(reports[name]["died"] is not None for name in SOAK) >= 4


@pytest.mark.parametrize("name", FATAL)
def test_a_tier_that_is_needed_ends_all(reports: dict[str, dict[str, Any]], name: str) -> None:
    (victim,) = FATAL[name]["deaths"]
    for tier in TIERS:
        if tier != victim:
            assert reports[name][tier]["exit"] == 1
            assert (
                f"PeerLostError: tier '{tier}' lost tier '{victim}'"
                in (reports[name][tier]["output"])
            )
