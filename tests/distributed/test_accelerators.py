"""Tiers with different accelerators, one of them emulated, train as one process does."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.distributed.forked import run_scenarios
from tests.distributed.test_transparency import schedule
from tests.emulated import accelerator

MEASURED = {"profile_steps": 2, "profile_seconds": 0.5}
CASES: dict[str, dict[str, Any]] = {
    # In front of the cut, then as the owner; then, with another Trainer, all that is measured.
    "cloud": {
        "schedules": [
            schedule("device", device=(9, 3), edge=(4, 4), cloud=(6, 5)),
            schedule("cloud", device=(4, 5), edge=(7, 4), cloud=(9, 3)),
        ],
        # Codecs are measured, and none is good enough to be used.
        "strategies": [{}, {**MEASURED, "compression": ["int8+zstd"], "accuracy_loss_limit": 0.0}],
    },
    # Traced there; what leaves it has passed layers.
    "device": {
        "schedules": [schedule("cloud", device=(4, 12), cloud=(9, 0))],
        "strategies": [{"keep_inputs_on_data_tier": True}],
        "model": {"optimizer": "sgd"},
    },
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    reason = accelerator.missing()
    if reason is not None:
        pytest.skip(reason)
    library = tmp_path_factory.mktemp("accelerator") / "emulated.so"
    accelerator.build(library)
    scenarios = [
        ("run", {"emulated": tier, "library": str(library), **case}) for tier, case in CASES.items()
    ]
    scenarios.append(("refused", {"library": str(library)}))
    name = "tests.distributed.accelerator_cases"
    found = run_scenarios(name, scenarios, timeout_seconds=150)
    return dict(zip((*CASES, "refused"), found, strict=True))


@pytest.mark.timeout(420)
@pytest.mark.parametrize("emulated", CASES)
def test_a_tier_with_another_accelerator_trains_as_one_process(runs: Any, emulated: str) -> None:
    tiers = dict(runs[emulated])
    plain = tiers.pop("plain")
    same = functools.partial(torch.testing.assert_close, atol=2e-6, rtol=0)
    for tier, found in tiers.items():
        assert found["device"] == ("accel:0" if tier == emulated else "cpu")
        for part in range(1, len(CASES[emulated]["strategies"]) + 1):
            assert found[f"steps {part}"] == plain[f"steps {part}"] > 0
            same(found[f"metrics {part}"], plain[f"metrics {part}"])
        same(found["weights"], plain["weights"])
        same(found["test"], plain["test"])
        same(found["predictions"], plain["predictions"])


def test_the_clock_waits_for_the_accelerator_when_layers_are_measured(runs: Any) -> None:
    layers = runs["cloud"]["cloud"]["profile"].layers
    assert runs["cloud"]["cloud"]["synchronizations"] > 2 * len(layers)
    assert runs["cloud"]["edge"]["synchronizations"] == 0


def test_the_emulated_accelerator_refuses_what_a_gpu_refuses(runs: Any) -> None:
    """Else the other tests would say nothing."""
    assert "same device" in runs["refused"]["sum"]
    assert "same device" in runs["refused"]["product"]
    assert "same device" in runs["refused"]["join"]
    assert "numpy" in runs["refused"]["array"]
    assert "generator" in runs["refused"]["chance"]
