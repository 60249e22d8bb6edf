from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hiertrain.schedule import Schedule, Share
from tests.unit.json_values import ANY_JSON, damaged


def example(**changes: object) -> Schedule:
    arguments: dict[str, object] = {
        "owner": "edge",
        "shares": {
            "device": Share(num_layers=3, num_samples=20),
            "edge": Share(num_layers=8, num_samples=70),
            "cloud": Share(num_layers=5, num_samples=38),
        },
        "policy": "hiertrain",
        "predicted_seconds": 0.25,
        "codecs": {"device": "int8"},
        "num_chunks": 4,
        "optimality_gap": 0.0,
    }
    return Schedule(**{**arguments, **changes})  # type: ignore[arg-type]


def test_a_schedule_survives_the_way_through_a_file(tmp_path: Path) -> None:
    example().to_json(tmp_path / "schedule.json")
    assert Schedule.from_json(tmp_path / "schedule.json") == example()


def test_a_schedule_without_the_optional_fields_is_read() -> None:
    schedule = Schedule.from_dict(
        {"format": 1, "owner": "edge", "shares": {"edge": {"num_layers": 2, "num_samples": 4}}}
    )
    assert (schedule.codecs, schedule.num_chunks, schedule.optimality_gap) == ({}, 1, None)


def test_prefix_workers_come_shallowest_first_and_ties_by_rank() -> None:
    assert example().prefix_workers == ("device", "cloud")
    shares = {tier: Share(num_layers=8, num_samples=1) for tier in ("cloud", "edge", "device")}
    assert example(shares=shares, codecs={}).prefix_workers == ("cloud", "device")


def test_grid_shows_roles_samples_and_layers() -> None:
    shares = {**example().shares, "cloud": Share(num_layers=0, num_samples=0)}
    assert example(shares=shares).grid().splitlines() == [
        "tier    role    samples  layers",
        "device  prefix       20  ###..... 3/8",
        "edge    owner        70  ######## 8/8",
        "cloud   idle          0  ........ 0/8",
    ]


def test_grid_of_a_long_chain_is_drawn_to_scale() -> None:
    shares = {
        "device": Share(num_layers=150, num_samples=1),
        "edge": Share(num_layers=600, num_samples=1),
    }
    device, edge = example(shares=shares).grid().splitlines()[1:]
    assert device.endswith("#" * 15 + "." * 45 + " 150/600")
    assert edge.endswith("#" * 60 + " 600/600")


@given(st.integers(0, 300))
def test_rows_deal_out_every_row_once_and_in_order(num_samples: int) -> None:
    rows = example().rows(num_samples)
    assert list(rows) == ["edge", "device", "cloud"]
    dealt = [row for part in rows.values() for row in range(num_samples)[part]]
    assert dealt == list(range(num_samples))
    for tier, part in rows.items():
        share = example().shares[tier].num_samples * num_samples / 128
        assert abs(part.stop - part.start - share) < 1


@given(st.integers(0, 40), st.integers(1, 3))
def test_no_tier_takes_fewer_rows_than_it_must(num_samples: int, least: int) -> None:
    parts = example().rows(num_samples, least=least).values()
    dealt = [row for part in parts for row in range(num_samples)[part]]
    assert dealt == list(range(num_samples))
    counts = [part.stop - part.start for part in parts]
    assert all(count == 0 or count >= min(least, num_samples) for count in counts)


def test_too_few_rows_go_to_the_tier_with_most() -> None:
    shares = {name: Share(num_layers=8, num_samples=8) for name in ("device", "edge", "cloud")}
    for num_samples, counts in ((3, [3, 0, 0]), (4, [4, 0, 0]), (5, [2, 3, 0]), (7, [3, 2, 2])):
        rows = example(shares=shares, codecs={}).rows(num_samples, least=2)
        assert sorted(p.stop - p.start for p in rows.values()) == sorted(counts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"owner": "fog"}, "the owner 'fog' has no share"),
        ({"shares": {"edge": Share(num_layers=0, num_samples=4)}, "codecs": {}}, "at least one"),
        ({"shares": {"edge": Share(num_layers=4, num_samples=0)}, "codecs": {}}, "at least one"),
        (
            {
                "shares": {
                    "edge": Share(num_layers=4, num_samples=1),
                    "device": Share(num_layers=5, num_samples=1),
                }
            },
            "'device' runs 5 layers and the owner 'edge' only 4",
        ),
        (
            {
                "shares": {
                    "edge": Share(num_layers=4, num_samples=1),
                    "device": Share(num_layers=3, num_samples=0),
                }
            },
            "has both or neither",
        ),
        ({"num_chunks": 0}, "`num_chunks` must be a whole number of at least 1, got 0"),
        ({"codecs": {"edge": "int8"}}, "for tiers other than the owner"),
        ({"codecs": {"device": 8}}, "codecs are words"),
        ({"predicted_seconds": float("nan")}, "`predicted_seconds` must be a finite number"),
        ({"policy": 3}, "`policy` must be a word"),
    ],
)
def test_an_impossible_schedule_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        example(**changes)


@pytest.mark.parametrize("value", [-1, 1.5, True, "3", None])
def test_an_impossible_share_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="`num_samples` must be a whole number"):
        Share(num_layers=3, num_samples=value)  # type: ignore[arg-type]


@settings(max_examples=300, deadline=None)
@given(damaged(example().to_dict()) | ANY_JSON)
def test_any_json_is_a_valid_schedule_or_a_value_error(data: object) -> None:
    try:
        schedule = Schedule.from_dict(data)  # type: ignore[arg-type]
    except ValueError:
        return
    assert Schedule.from_dict(json.loads(json.dumps(schedule.to_dict()))) == schedule


def test_an_unknown_field_is_refused():
    data = Schedule(owner="edge", shares={"edge": Share(num_layers=2, num_samples=4)}).to_dict()
    with pytest.raises(ValueError, match=r"has no field 'chunks'; it has .*'num_chunks'"):
        Schedule.from_dict({**data, "chunks": 4})
