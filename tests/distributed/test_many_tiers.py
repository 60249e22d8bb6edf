"""Two devices and two edges beside a cloud: four prefix workers and an owner."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.launch import Case, run_cases
from tests.distributed.plan_cases import train_plainly

TIERS = ["device", "phone", "edge", "gateway", "cloud"]
BY_HAND = {
    "format": 1,
    "owner": "cloud",
    "num_chunks": 2,
    "shares": {
        "device": {"num_layers": 2, "num_samples": 4},
        "phone": {"num_layers": 4, "num_samples": 3},
        "edge": {"num_layers": 7, "num_samples": 3},
        "gateway": {"num_layers": 7, "num_samples": 4},
        "cloud": {"num_layers": 12, "num_samples": 2},
    },
}


@pytest.mark.timeout(240)
def test_five_tiers_train_as_one() -> None:
    kwargs = {"tiers": TIERS, "max_steps": 12}
    cases = [
        {**kwargs, "schedule": BY_HAND},
        {**kwargs, "profile_steps": 2, "profile_seconds": 1.0},
    ]
    by_hand, planned = run_cases(
        [Case(target="tests.distributed.plan_cases:train", kwargs=case) for case in cases],
        world_size=5,
        timeout_seconds=220,
    )
    plain = train_plainly(max_steps=12)
    for report in (*by_hand, *planned):
        for name, weight in plain["weights"].items():
            torch.testing.assert_close(report["weights"][name], weight, rtol=0, atol=1e-9)
        assert report["val_loss"] == pytest.approx(plain["val_loss"], abs=1e-9)
    assert {tuple(report["profile"]["tiers"]) for report in planned} == {tuple(TIERS)}
    assert {report["schedule"]["policy"] for report in planned} == {"hiertrain"}
    assert len({str(report["schedule"]) for report in planned}) == 1
