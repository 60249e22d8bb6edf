"""Several runs one after the other in the same script, against the same in plain Lightning."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import lifecycle_cases
from tests.distributed.launch import Case, run_cases

CASES = (
    "fit_then_test_with_another_trainer",
    "fit_and_test_without_keys",
    "fit_twice",
    "fit_again_with_new_parts",
    "fit_again_after_some_steps",
    "fit_another_model",
    "train_nothing",
    "fit_after_failure",
)


@pytest.fixture(scope="module")
def reports() -> dict[str, list[dict[str, Any]]]:
    cases = [Case(target=f"{lifecycle_cases.__name__}:{name}") for name in CASES]
    return dict(zip(CASES, run_cases(cases, timeout_seconds=120), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_all_tiers_end_as_plain_lightning_does(
    reports: dict[str, list[dict[str, Any]]], name: str
) -> None:
    expected = getattr(lifecycle_cases, name)(plain=True)
    for report in reports[name]:
        assert report.keys() == expected.keys()
        for key, value in report.items():
            torch.testing.assert_close(value, expected[key], atol=1e-6, rtol=0, msg=key)
