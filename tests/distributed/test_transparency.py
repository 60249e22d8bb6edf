"""Training across tiers against plain Lightning: the same weights, logs, files and step counts.

Where an optimizer divides by small numbers (Adam) the comparison is in double precision, in which
rounding stays far below the tolerance and a wrong or missing row does not.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.distributed.launch import Case, run_cases
from tests.distributed.training import largest_difference, train_plainly

TARGET = "tests.distributed.training:train"
LAYERS = {"ModuleLeNet": 12, "FunctionalLeNet": 12, "AutoEncoder": 6, "Transformer": 13}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd"},
    "sgd_double": {"optimizer": "sgd", "trainer": {"precision": "64-true"}},
    "adam_clipped": {
        "optimizer": "adam",
        "trainer": {"precision": "64-true", "gradient_clip_val": 0.1},
    },
    "adam_accumulated": {
        "optimizer": "adam",
        "trainer": {"precision": "64-true", "accumulate_grad_batches": 2},
    },
}


def schedule(owner: str, **shares: tuple[int, int]) -> dict[str, Any]:
    return {
        "format": 1,
        "owner": owner,
        "shares": {
            tier: {"num_layers": layers, "num_samples": samples}
            for tier, (layers, samples) in shares.items()
        },
    }


def owned_by(owner: str, model: str) -> dict[str, Any]:
    """A schedule in which every tier has samples and the cuts differ."""
    layers = LAYERS[model]
    workers = [tier for tier in ("device", "edge", "cloud") if tier != owner]
    shares = {owner: (layers, 5), workers[0]: (layers // 3, 4), workers[1]: (layers // 2, 3)}
    return schedule(owner, **{tier: shares[tier] for tier in ("device", "edge", "cloud")})


def switching(model: str) -> dict[str, Any]:
    """Schedules of which each has another owner, the later ones with unusual shares."""
    layers = LAYERS[model]
    half = layers // 2
    second = schedule("cloud", device=(half, 9), edge=(layers, 3), cloud=(layers, 0))
    third = schedule("device", device=(layers, 6), edge=(1, 6), cloud=(0, 0))
    return {"schedule": owned_by("edge", model), "switches": {"7": second, "13": third}}


UNUSUAL: dict[str, dict[str, Any]] = {
    "owner alone": schedule("cloud", device=(0, 0), edge=(0, 0), cloud=(12, 12)),
    "one worker": schedule("device", device=(12, 5), edge=(0, 0), cloud=(6, 7)),
    "equal cuts": schedule("edge", device=(4, 3), edge=(12, 5), cloud=(4, 4)),
    "cut after the last layer": schedule("edge", device=(12, 6), edge=(12, 2), cloud=(12, 4)),
    "owner without samples": schedule("edge", device=(3, 6), edge=(12, 0), cloud=(8, 6)),
    "owner without samples, one cut": schedule("cloud", device=(5, 6), edge=(5, 6), cloud=(12, 0)),
    "all samples on one worker": schedule("cloud", device=(7, 12), edge=(0, 0), cloud=(12, 0)),
    "one sample for each worker": schedule("device", device=(12, 10), edge=(12, 1), cloud=(1, 1)),
}  # fmt: skip


def matrix() -> dict[str, dict[str, Any]]:
    cases: dict[str, dict[str, Any]] = {}
    for model, optimizer in itertools.product(LAYERS, OPTIMIZERS):
        cases[f"{model} {optimizer} switching"] = {
            "model": model,
            **OPTIMIZERS[optimizer],
            **switching(model),
        }
    chosen = itertools.cycle(OPTIMIZERS)
    for model in LAYERS:
        for owner in ("device", "edge", "cloud"):
            optimizer = next(chosen)
            cases[f"{model} {optimizer} owned by {owner}"] = {
                "model": model,
                **OPTIMIZERS[optimizer],
                "schedule": owned_by(owner, model),
            }
    for name, unusual in UNUSUAL.items():
        cases[name] = {
            "model": "FunctionalLeNet",
            **OPTIMIZERS["sgd_double"],
            "schedule": unusual,
            "max_steps": 5,
        }
    chunked = {**switching("ModuleLeNet")}
    chunked["schedule"] = {**chunked["schedule"], "num_chunks": 3}
    for optimizer, overlap in itertools.product(("sgd_double", "adam_accumulated"), (True, False)):
        cases[f"{optimizer} {'in chunks' if overlap else 'without overlap'}"] = {
            "model": "ModuleLeNet",
            **OPTIMIZERS[optimizer],
            **(chunked if overlap else switching("ModuleLeNet")),
            "overlap": overlap,
        }
    for samples in (1, 2):
        cases[f"last batch of {samples}"] = {
            "model": "ModuleLeNet",
            **OPTIMIZERS["adam_clipped"],
            "schedule": owned_by("edge", "ModuleLeNet"),
            "samples": 24 + samples,
            "max_steps": 6,
        }
    return cases


MATRIX = matrix()


def plain_arguments(case: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value for key, value in case.items() if key not in ("schedule", "switches", "overlap")
    }


@pytest.fixture(scope="module")
def trained() -> dict[str, list[dict[str, Any]]]:
    cases = [Case(target=TARGET, kwargs=case) for case in MATRIX.values()]
    return dict(zip(MATRIX, run_cases(cases, timeout_seconds=170), strict=True))


@pytest.fixture(scope="module")
def plain() -> dict[str, dict[str, Any]]:
    """What plain Lightning makes of the cases, each kind once."""
    done: dict[str, dict[str, Any]] = {}
    for case in MATRIX.values():
        arguments = plain_arguments(case)
        if repr(arguments) not in done:
            done[repr(arguments)] = train_plainly(**arguments)
    return done


@pytest.mark.parametrize("name", MATRIX)
def test_weights_steps_and_logs_are_those_of_one_process(
    name: str, trained: Any, plain: dict[str, Any]
) -> None:
    expected = plain[repr(plain_arguments(MATRIX[name]))]
    assert expected["global_step"] > 0
    assert largest_difference(expected, {"weights": expected["initial"]}) > 1e-3
    for rank, found in enumerate(trained[name]):
        assert largest_difference(expected, found) < 1e-6, rank
        for key in ("global_step", "epoch", "lr"):
            assert found[key] == expected[key], (rank, key)
        assert found["metrics"].keys() == expected["metrics"].keys()
        for metric, value in expected["metrics"].items():
            assert float(found["metrics"][metric]) == pytest.approx(float(value), abs=1e-5), metric
