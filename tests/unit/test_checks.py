"""What a schedule must hold for a model with batch statistics."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_hiertrain import Schedule, Share, trace_layers
from lightning_hiertrain.checks import check_schedule

CHAIN = trace_layers(
    nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)), torch.randn(6, 8)
)


def schedule(own: int, cut: int, samples: int) -> Schedule:
    shares = {
        "edge": Share(num_layers=3, num_samples=own),
        "device": Share(num_layers=cut, num_samples=samples),
    }
    return Schedule(owner="edge", shares=shares)


@pytest.mark.parametrize(("own", "samples", "tier"), [(5, 1, "device"), (1, 5, "edge")])
def test_one_sample_is_too_few_for_batch_statistics(own: int, samples: int, tier: str) -> None:
    with pytest.raises(ValueError, match=f"gives tier '{tier}' 1 sample.* give it 2 or none"):
        check_schedule(schedule(own, 2, samples), CHAIN, 6)


def test_one_sample_is_enough_in_front_of_them() -> None:
    check_schedule(schedule(5, 1, 1), CHAIN, 6)
    check_schedule(schedule(0, 2, 6), CHAIN, 6)
