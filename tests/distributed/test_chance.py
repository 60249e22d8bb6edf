"""Batch statistics and dropout across tiers: not equal to one process, but of the same kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import chance_cases
from tests.distributed.launch import Case, run_cases
from tests.distributed.test_transparency import schedule

SPREAD = schedule("edge", device=(3, 8), edge=(10, 10), cloud=(6, 6))
CASES: dict[str, dict[str, Any]] = {
    "one step": {"model": "convolutions", "max_steps": 1, "schedule": SPREAD},
    "one step, nothing on the owner": {
        "model": "convolutions",
        "max_steps": 1,
        "schedule": schedule("cloud", device=(3, 8), edge=(6, 16), cloud=(10, 0)),
    },
    "one step, accumulated": {
        "model": "convolutions",
        "max_steps": 1,
        "schedule": SPREAD,
        "trainer": {"accumulate_grad_batches": 2},
    },
    "statistics of the samples": {
        "model": "normalised",
        "schedule": schedule("edge", device=(2, 8), edge=(6, 8), cloud=(5, 8)),
    },
    # Shares in proportion would have 2, 1 and 1 rows, or 2, 2 and 1.
    **{
        f"last batch of {rows}": {
            "model": "normalised",
            "schedule": schedule("edge", device=(2, 8), edge=(6, 8), cloud=(5, 8)),
            "samples": 24 + rows,
            "max_steps": 2,
        }
        for rows in (4, 5)
    },
    "trained": {"model": "convolutions", "schedule": SPREAD, "max_steps": 40},
    "dropout": {
        "model": "dropped",
        "schedule": schedule("edge", device=(4, 8), edge=(7, 8), cloud=(4, 8)),
    },
}
CASES["dropout again"] = CASES["dropout"]


@pytest.fixture(scope="module")
def runs() -> dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]:
    target = f"{chance_cases.__name__}:train"
    found = run_cases([Case(target=target, kwargs=case) for case in CASES.values()])
    plain = [
        chance_cases.train(plain=True, **{k: v for k, v in case.items() if k != "schedule"})
        for case in CASES.values()
    ]
    return dict(zip(CASES, zip(plain, found, strict=True), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_all_tiers_end_with_the_same_weights_and_statistics(runs: Any, name: str) -> None:
    _, (first, *others) = runs[name]
    for other in others:
        assert first["metrics"] == other["metrics"]
        for key, value in first["weights"].items():
            assert torch.equal(value, other["weights"][key]), key


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("one step")])
def test_the_statistics_of_shares_make_those_of_the_mini_batch(runs: Any, name: str) -> None:
    plain, (found, *_) = runs[name]
    for layer in ("1", "5"):
        counts = [x["weights"][f"model.{layer}.num_batches_tracked"] for x in (plain, found)]
        assert counts[0] == counts[1] > 0
    # The input of the first is the same as on one process.
    expected, mean = (x["weights"]["model.1.running_mean"] for x in (plain, found))
    assert expected.abs().max() > 0.01
    assert torch.allclose(mean, expected, atol=1e-9)
    expected, variance = (x["weights"]["model.1.running_var"] for x in (plain, found))
    # Of several mini-batches between two updates the variance is right in the mean.
    assert torch.allclose(variance, expected, rtol=0.01 if "accumulated" in name else 1e-9)
    expected, mean = (x["weights"]["model.5.running_mean"] for x in (plain, found))
    assert torch.allclose(mean, expected, atol=0.02)


def test_statistics_of_samples_are_shared_like_those_of_layers(runs: Any) -> None:
    plain, (found, *_) = runs["statistics of the samples"]
    for name in ("0.running_mean", "0.running_var"):
        expected, value = (x["weights"][f"model.{name}"] for x in (plain, found))
        assert torch.allclose(value, expected, atol=1e-9), name
    for name in ("4.running_mean", "4.running_var"):
        expected, value = (x["weights"][f"model.{name}"] for x in (plain, found))
        assert torch.allclose(value, expected, rtol=0.1, atol=0.05), name
    assert found["weights"]["model.4.num_batches_tracked"] == 12


@pytest.mark.parametrize("name", ["last batch of 4", "last batch of 5"])
def test_no_share_of_a_small_batch_is_too_small_for_statistics(runs: Any, name: str) -> None:
    """PyTorch refuses to normalise one value of a channel."""
    plain, (found, *_) = runs[name]
    for key in ("0.running_mean", "0.running_var"):
        expected, value = (x["weights"][f"model.{key}"] for x in (plain, found))
        assert torch.allclose(value, expected, atol=1e-9), key
    assert found["weights"]["model.4.num_batches_tracked"] == 2


def test_training_with_batch_statistics_is_close_to_one_process(runs: Any) -> None:
    plain, (found, *_) = runs["trained"]
    assert plain["metrics"]["val_loss"] < 1.0
    assert found["metrics"]["val_loss"] == pytest.approx(plain["metrics"]["val_loss"], rel=0.1)


def test_shares_have_dropout_masks_of_their_own(runs: Any) -> None:
    _, ranks = runs["dropout"]
    # Each tier's masks of the layer that all run; tracing and validation drop nothing.
    masks = [
        [mask for mask in rank["masks"] if mask.shape == (8, 32) and mask.any()] for rank in ranks
    ]
    for own in masks:
        assert len(own) == 12
        assert all(0.3 < mask.double().mean() < 0.7 for mask in own)
        assert not torch.equal(own[0], own[1])
    for one, two in ((0, 1), (1, 2), (0, 2)):
        assert not any(torch.equal(a, b) for a, b in zip(masks[one], masks[two], strict=True))


def test_dropout_is_the_same_in_a_run_with_the_same_seed(runs: Any) -> None:
    _, (first, *_) = runs["dropout"]
    _, (again, *_) = runs["dropout again"]
    for key, value in first["weights"].items():
        assert torch.equal(value, again["weights"][key]), key
