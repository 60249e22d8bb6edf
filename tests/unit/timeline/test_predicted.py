"""The laid-out prediction ends its phases when the cost model says."""

from __future__ import annotations

import pytest

from lightning_hiertrain.planning import plan, predict
from lightning_hiertrain.schedule import Schedule, Share
from lightning_hiertrain.timeline.predicted import predicted_step
from tests.unit.planning.instances import random_profile, with_transfer_seconds

SCHEDULES = [
    {"device": (2, 9), "edge": (6, 8), "cloud": (4, 15)},
    {"device": (3, 20), "edge": (6, 0), "cloud": (3, 12)},
    {"device": (6, 16), "edge": (6, 16), "cloud": (0, 0)},
    {"device": (0, 0), "edge": (6, 32), "cloud": (0, 0)},
]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("shares", SCHEDULES)
@pytest.mark.parametrize("seed", range(4))
def test_phases_end_when_the_cost_model_says(
    seed: int, shares: dict[str, tuple[int, int]], chunks: int, overlap: bool
) -> None:
    profile = random_profile(seed, num_layers=6)
    schedule = Schedule(
        owner="edge",
        shares={t: Share(num_layers=m, num_samples=b) for t, (m, b) in shares.items()},
        num_chunks=chunks,
        codecs={"device": "int8"} if shares["device"][1] and seed % 2 else {},
    )
    step = predicted_step(profile, schedule, overlap=overlap)
    phases = step.phases

    def last(what: str, tier: str | None = None) -> float:
        return max(
            (s.end for s in step.spans if s.what == what and tier in (None, s.tier)), default=0
        )

    ends = [
        last("forward", "edge"),
        *(
            s.end
            for s in step.spans
            if s.what == "codec" and s.tier == "edge" and s.detail == "activations"
        ),
    ]
    ends += [t.arrived for t in step.transfers if t.what == "activations"]
    if not overlap:
        ends += [t.arrived for t in step.transfers if t.what == "samples" and t.target == "edge"]
    assert max(ends) == pytest.approx(phases["forward"])
    start = phases["forward"] + phases["loss"]
    gradients = [t.arrived for t in step.transfers if t.what == "gradients"] if overlap else []
    assert max([last("backward"), *gradients]) == pytest.approx(start + phases["backward"])
    weights = [t.arrived for t in step.transfers if t.what == "weights"] if not overlap else []
    end = max([last("optimizer"), start + phases["backward"], *weights])
    assert end == pytest.approx(sum(phases.values()))
    computing = predict(with_transfer_seconds(profile, {}), schedule, overlap=overlap).busy_seconds
    for tier in ("device", "edge", "cloud"):
        computed = sum(s.seconds for s in step.spans if s.tier == tier)
        assert computed == pytest.approx(computing[tier], rel=1e-6)
        assert step.busy_seconds[tier] >= computing[tier]


def test_planned_schedules_can_be_laid_out() -> None:
    profile = random_profile(5, num_layers=6)
    for overlap in (True, False):
        schedule = plan(profile, batch_size=40, overlap=overlap, compression=True)
        step = predicted_step(profile, schedule, overlap=overlap)
        assert schedule.predicted_seconds == pytest.approx(step.seconds)
