"""Notes of several tiers become one timeline; expected values are read off the drawing."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_hiertrain.timeline.joining import join, meaning
from lightning_hiertrain.timeline.summary import carried_by_links, time_of_tiers
from tests.unit.timeline.notes import ACTIVATIONS, AHEAD, notes, timeline, wait


def test_a_wait_is_parted_where_the_message_was_queued() -> None:
    made = timeline()
    assert time_of_tiers(made, made.steps) == {
        "device": {
            "forward": 2.0,
            "codec": 0.5,
            "waiting for edge": 4.5,
            "waiting for link edge>device": 1.0,
            "backward": 1.5,
            "other": 0.5,
        },
        "edge": {
            "forward": 2.5,
            "waiting for device": 0.5,
            "waiting for link device>edge": 1.5,
            "loss": 0.5,
            "backward": 4.0,
            "optimizer": 1.0,
            "other": 0.0,
        },
    }


def test_links_carry_what_was_sent_and_are_busy_from_queue_to_arrival() -> None:
    made = timeline()
    carried = carried_by_links(made, made.steps)
    assert carried["device>edge"].num_bytes == 4000
    assert carried["device>edge"].busy_seconds == pytest.approx(1.5)
    assert carried["edge>device"].num_bytes == 3000
    assert carried["edge>device"].busy_seconds == pytest.approx(1.0)


def test_overlapped_step_ends_with_the_owners_update() -> None:
    (step,) = timeline().steps
    assert (step.number, step.start, step.end) == (1, 0.0, 10.0)
    assert step.phases == {"forward": 4.5, "loss": 0.5, "backward": 4.0, "update": 1.0}


def test_plain_step_ends_when_every_tier_has_the_weights() -> None:
    (step,) = timeline(overlap=False).steps
    assert (step.start, step.end) == (0.0, 10.5)
    # The device ends its backward after the owner has begun the update.
    assert step.phases == {"forward": 4.5, "loss": 0.5, "backward": 4.0, "update": 1.5}


def test_a_step_without_a_seen_loss_has_no_phases() -> None:
    changed = notes()
    changed["edge"]["activities"] = [(95.0, "other", ""), (120.0, "other", "")]
    joined = join(changed, AHEAD, wanted=[1], owner="edge", overlap=True)
    assert joined.steps[0].phases == {}


def test_steps_that_were_not_seen_whole_are_left_out() -> None:
    joined = join(notes(), AHEAD, wanted=[0, 1, 2], owner="edge", overlap=True)
    assert [step.number for step in joined.steps] == [1]
    assert join(notes(), AHEAD, wanted=[2], owner="edge", overlap=True).steps == ()


def test_a_message_sent_before_recording_began_counts_from_its_first_chunk() -> None:
    changed = notes()
    changed["device"]["sent"] = []
    joined = join(changed, AHEAD, wanted=[1], owner="edge", overlap=True)
    (activations,) = (t for t in joined.transfers if t.what == "activations")
    assert (activations.queued, activations.arrived) == (3.0, 4.0)


def test_a_message_behind_another_one_begins_when_that_has_arrived() -> None:
    changed = notes()
    changed["device"]["sent"].append(
        {"peer": "edge", "tag": "1/gradients/1", "bytes": 10, "queued": 2.6}
    )
    received: list[dict[str, Any]] = changed["edge"]["received"]
    received.append({**received[0], "tag": "1/gradients/1", "arrived": 106.0})
    joined = join(changed, AHEAD, wanted=[1], owner="edge", overlap=True)
    (gradients,) = (t for t in joined.transfers if t.what == "gradients")
    assert (gradients.queued, gradients.arrived) == (4.0, 6.0)


def test_a_message_that_had_come_before_is_not_waited_for() -> None:
    changed = notes()
    changed["edge"]["waits"] = [wait("device", ACTIVATIONS, 104.2, 104.4)]
    joined = join(changed, AHEAD, wanted=[1], owner="edge", overlap=True)
    assert not [s for s in joined.spans if s.tier == "edge" and s.what.startswith("waiting")]


@pytest.mark.parametrize(
    ("tag", "expected"),
    [
        ("17/batch", ("samples", "")),
        ("17/activations/0", ("activations", "chunk 1")),
        ("17/activation_gradients/3", ("activation gradients", "chunk 4")),
        ("17/gradients/5", ("gradients", "layer 5")),
        ("17/weights/5", ("weights", "layer 5")),
        ("17/update", ("control", "")),
        ("collective/4/barrier", ("control", "")),
    ],
)
def test_tags_say_what_travels(tag: str, expected: tuple[str, str]) -> None:
    assert meaning(tag) == expected
