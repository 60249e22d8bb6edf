"""Models of many architectures across three tiers against plain Lightning.

They are those of the tables in docs/models.md, which say how many cut points each has.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import architecture_cases
from tests.distributed.architecture_cases import ARCHITECTURES
from tests.distributed.launch import Case, run_cases
from tests.distributed.test_transparency import schedule

pytest.importorskip("torchvision", reason="torchvision is not installed")

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
ROW = re.compile(r"^\| (?P<model>[^|]+?) \| (?P<count>\d+) \|", re.MULTILINE)
TABLE = {row["model"].replace("`", ""): int(row["count"]) for row in ROW.finditer(PAGE.read_text())}
GPT = "GPT-style decoder, 12 blocks"
LAYERS = {**TABLE, GPT: TABLE[GPT] + 1}
"""In a training step; that of the decoder flattens what comes out of it."""
TIERS = ("device", "edge", "cloud")


def spread(name: str, owner: str, *cuts: int) -> dict[str, Any]:
    """A schedule by which each tier has two samples."""
    workers = [tier for tier in TIERS if tier != owner]
    shares = {owner: (LAYERS[name], 2)}
    shares |= {worker: (cut, 2) for worker, cut in zip(workers, cuts, strict=True)}
    return schedule(owner, **{tier: shares[tier] for tier in TIERS})


def cases() -> dict[str, dict[str, Any]]:
    owners = itertools.cycle(TIERS)
    made: dict[str, dict[str, Any]] = {}
    for name in ARCHITECTURES:
        layers, owner = LAYERS[name], next(owners)
        first = {**spread(name, owner, layers // 6 + 1, layers // 3 + 2), "num_chunks": 2}
        then = spread(name, next(owners), layers // 2, layers - 1)
        made[name] = {"name": name, "schedule": first, "then": then}
    return made


CASES = cases()


@pytest.fixture(scope="module")
def trained() -> dict[str, list[dict[str, Any]]]:
    target = f"{architecture_cases.__name__}:train"
    found = run_cases(
        [Case(target=target, kwargs=case) for case in CASES.values()], timeout_seconds=280
    )
    return dict(zip(CASES, found, strict=True))


def test_the_models_of_the_docs_are_those_that_are_trained() -> None:
    assert list(TABLE) == list(ARCHITECTURES)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_it_ends_with_the_weights_and_logs_of_one_process(name: str, trained: Any) -> None:
    expected = architecture_cases.train(name, plain=True)
    assert expected["steps"] == 3
    assert expected["change"] > 1e-4
    owner = CASES[name]["then"]["owner"]
    for tier, found in zip(TIERS, trained[name], strict=True):
        # Momentum and gradients are not kept where nobody needs them, the owner having changed.
        for kept in ("optimizer_states", "gradients"):
            assert found[kept] == (expected[kept] if tier == owner else 0), (tier, kept)
        assert found["layers"] == LAYERS[name]
        assert found["steps"] == 3
        assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-9)
        assert found["weights"].keys() == expected["weights"].keys()
        for key, value in expected["weights"].items():
            torch.testing.assert_close(found["weights"][key], value, rtol=1e-8, atol=1e-10, msg=key)
