"""A recorded run: its timeline is complete and true, and training is what it would have been."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lightning_hiertrain.timeline import Timeline
from lightning_hiertrain.timeline.summary import carried_by_links, time_of_tiers
from tests.distributed import timeline_cases
from tests.distributed.launch import Case, run_cases
from tests.distributed.test_transparency import schedule
from tests.distributed.training import largest_difference

CHUNKED = {
    **schedule("edge", device=(3, 24), edge=(12, 24), cloud=(6, 16)),
    "num_chunks": 2,
}
BYTES_A_SAMPLE = {"device": 8 * 6 * 14 * 14, "cloud": 8 * 16 * 5 * 5}
"""Double precision after the first and the second pooling."""
ALONE = schedule("device", device=(12, 64), edge=(0, 0), cloud=(0, 0))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("timelines")
    kwargs: dict[str, dict[str, Any]] = {
        "overlap": {"schedule": CHUNKED},
        "plain step": {"schedule": CHUNKED, "overlap": False, "steps": [0, 4, 5, 9]},
        "alone": {"schedule": ALONE, "steps": [3]},
        "measured": {"measures": True, "max_steps": 18},
        "too late": {"schedule": CHUNKED, "steps": [40], "max_steps": 4},
    }
    cases = [
        Case(
            target=f"{timeline_cases.__name__}:train",
            kwargs={"path": str(folder / name / "timeline.json"), **more},
        )
        for name, more in kwargs.items()
    ]
    results = run_cases(cases, timeout_seconds=150)
    return {"folder": folder, **dict(zip(kwargs, results, strict=True))}


def timeline_of(runs: dict[str, Any], name: str) -> Timeline:
    return Timeline.from_json(Path(runs["folder"], name, "timeline.json"))


def test_training_is_not_changed_by_being_recorded(runs: dict[str, Any]) -> None:
    plain = timeline_cases.train(plain=True)
    for name in ("overlap", "plain step", "alone"):
        for result in runs[name]:
            assert largest_difference(result, plain) < 1e-9, name
            assert not result["looks_on"]


@pytest.mark.parametrize("name", ["overlap", "plain step"])
def test_the_spans_of_every_tier_fill_the_step(runs: dict[str, Any], name: str) -> None:
    timeline = timeline_of(runs, name)
    for step in timeline.steps:
        for tier, causes in time_of_tiers(timeline, [step]).items():
            assert sum(causes.values()) == pytest.approx(step.seconds, rel=1e-3), tier
        for tier in timeline.tiers:
            spans = [span for span in timeline.spans if span.tier == tier]
            spans = [span for span in spans if step.start <= span.start and span.end <= step.end]
            covered = sum(span.seconds for span in spans)
            assert 0.9 * step.seconds < covered < 1.001 * step.seconds, tier
            for before, after in pairwise(spans):
                assert after.start >= before.end - 1e-6, (before, after)


def test_steps_and_phases_are_those_of_the_run(runs: dict[str, Any]) -> None:
    assert [step.number for step in timeline_of(runs, "overlap").steps] == [6, 7, 8]
    assert [step.number for step in timeline_of(runs, "plain step").steps] == [0, 4, 5, 9]
    for name in ("overlap", "plain step", "alone"):
        for step in timeline_of(runs, name).steps:
            assert sum(step.phases.values()) == pytest.approx(step.seconds, rel=1e-3), name
            assert min(step.phases.values()) >= 0
            assert step.phases["forward"] > 0
            assert step.phases["backward"] > 0


def test_what_prefix_workers_and_owner_compute_is_told_apart(runs: dict[str, Any]) -> None:
    timeline = timeline_of(runs, "overlap")
    found = {(span.tier, span.what, span.detail) for span in timeline.spans}
    for tier in ("device", "cloud"):
        for what in ("forward", "backward"):
            assert (tier, what, "chunk 1") in found
            assert (tier, what, "chunk 2") in found
    for what, detail in (
        *(("forward", part) for part in ("layers 1-3", "layers 4-6", "layers 7-12")),
        *(("backward", part) for part in ("layers 12-7", "layers 6-4", "layers 3-1")),
        ("loss", "forward"),
        ("loss", "backward"),
        ("optimizer", ""),
    ):
        assert ("edge", what, detail) in found, (what, detail)
    waits = {(s.tier, s.source) for s in timeline.spans if s.what == "waiting for tier"}
    assert {("device", "edge"), ("cloud", "edge")} <= waits


def test_activations_take_the_bytes_that_they_have(runs: dict[str, Any]) -> None:
    timeline = timeline_of(runs, "overlap")
    for step in timeline.steps:
        for tier, samples in (("device", 24), ("cloud", 16)):
            sent = [
                transfer
                for transfer in timeline.transfers
                if (transfer.source, transfer.target) == (tier, "edge")
                and transfer.what == "activations"
                and step.start < transfer.arrived <= step.end
            ]
            assert [transfer.detail for transfer in sent] == ["chunk 1", "chunk 2"]
            excess = sum(transfer.num_bytes for transfer in sent) - samples * BYTES_A_SAMPLE[tier]
            assert 0 < excess < 1000
    carried = carried_by_links(timeline, timeline.steps)
    assert carried["device>edge"].num_bytes > 24 * BYTES_A_SAMPLE["device"]
    assert 0 < carried["device>edge"].busy_seconds < timeline.steps[0].seconds * 2


def test_a_tier_that_works_alone_waits_for_nobody(runs: dict[str, Any]) -> None:
    timeline = timeline_of(runs, "alone")
    causes = time_of_tiers(timeline, timeline.steps)
    assert not [name for name in causes["device"] if name.startswith("waiting")]
    assert sum(s for name, s in causes["cloud"].items() if name.startswith("waiting")) > 0


def test_steps_under_the_planned_schedule_are_recorded_beside_the_prediction(
    runs: dict[str, Any],
) -> None:
    timeline = timeline_of(runs, "measured")
    first = timeline.steps[0].number
    assert first >= 7  # some steps are measured, and five pass under the schedule
    assert [step.number for step in timeline.steps] == [first, first + 1, first + 2]
    assert timeline.profile is not None
    assert timeline.predicted is not None
    assert timeline.schedule.policy == "hiertrain"
    assert timeline.predicted.seconds == pytest.approx(timeline.schedule.predicted_seconds)


def test_no_file_is_written_if_the_steps_never_come(runs: dict[str, Any]) -> None:
    assert not Path(runs["folder"], "too late", "timeline.json").exists()
