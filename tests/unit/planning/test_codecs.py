"""Which codecs a policy may come to use, and so which are measured."""

from __future__ import annotations

import pytest

from lightning_hiertrain import HierTrainStrategy, Schedule, Share
from lightning_hiertrain.planning.codecs import COMPRESSION, QUANTISERS, candidates


def test_nothing_is_measured_that_no_plan_uses() -> None:
    assert candidates("hiertrain", False) == ()
    assert candidates("all-edge", ["none", "fp16"]) == ("fp16",)


def test_jalad_measures_its_quantisers_in_any_case() -> None:
    assert candidates("jalad", False) == QUANTISERS
    assert candidates("jalad", ["fp16"]) == ("fp16", *QUANTISERS)


def test_all_codecs_are_measured_where_all_may_be_used() -> None:
    assert set(candidates("hiertrain", True)) == {*COMPRESSION[1:], *QUANTISERS}


def test_the_strategy_refuses_a_codec_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="codec 'int9' is unknown"):
        HierTrainStrategy(compression=["fp16", "int9"])
    schedule = Schedule(
        owner="cloud",
        shares={
            "device": Share(num_layers=1, num_samples=4),
            "cloud": Share(num_layers=2, num_samples=4),
        },
        codecs={"device": "zip"},
    )
    with pytest.raises(ValueError, match="codec 'zip' is unknown"):
        HierTrainStrategy(schedule=schedule)
