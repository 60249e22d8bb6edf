"""The planner against exhaustive search."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_hiertrain.errors import PlanningError
from lightning_hiertrain.planning import lower_bound, plan, predict
from tests.unit.planning.instances import random_profile
from tests.unit.planning.oracle import exhaustive

MODES = {"plain": False, "overlap": True}


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("mode", MODES)
def test_plan_equals_exhaustive_search(seed: int, mode: str) -> None:
    data = seed % 3 if seed % 5 == 0 else 0
    profile = random_profile(seed, num_layers=2 + seed % 3, memory=seed % 4 == 3, data=data)
    batch_size = 5 + seed % 6
    counts = (1, 2) if mode == "overlap" else (1,)
    best = exhaustive(profile, batch_size, mode=mode, chunk_counts=counts)
    if not np.isfinite(best):
        with pytest.raises(PlanningError, match="memory"):
            plan(profile, batch_size=batch_size, overlap=MODES[mode], chunk_counts=counts)
        return
    schedule = plan(profile, batch_size=batch_size, overlap=MODES[mode], chunk_counts=counts)
    predicted = predict(profile, schedule, overlap=MODES[mode]).step_seconds
    assert schedule.predicted_seconds == predicted
    assert predicted == pytest.approx(best, rel=1e-6)
    assert schedule.optimality_gap == 0


@pytest.mark.parametrize("seed", range(30))
def test_lower_bound_equals_exhaustive_search(seed: int) -> None:
    profile = random_profile(1000 + seed, num_layers=2 + seed % 3)
    best = exhaustive(profile, 4 + seed % 5, mode="busiest")
    assert lower_bound(profile, batch_size=4 + seed % 5) == pytest.approx(best, rel=1e-6)
