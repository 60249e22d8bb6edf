from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings

from lightning_hiertrain.profiles import (
    AffineTime,
    CodecProfile,
    LayerProfile,
    LinkProfile,
    Profile,
    TierProfile,
)
from tests.unit.json_values import ANY_JSON, damaged


def example() -> Profile:
    time = {
        "device": AffineTime(
            fixed=1e-4, per_sample=2e-4, relative_spread=0.1, sample_counts=(8, 32)
        )
    }
    time["edge"] = AffineTime(fixed=1e-5, per_sample=2e-5)
    return Profile(
        model="LeNet5",
        input_bytes_per_sample=12288,
        target_bytes_per_sample=8,
        data_tier="device",
        tiers={
            "device": TierProfile(optimizer_seconds=0.004, memory_bytes=10**9),
            "edge": TierProfile(loss_seconds=AffineTime(fixed=1e-3, per_sample=0.0)),
        },
        layers=(
            LayerProfile(
                name="conv1",
                output_bytes_per_sample=18816,
                parameter_bytes=1824,
                forward_seconds=time,
                backward_seconds=time,
            ),
        ),
        links=(
            LinkProfile(
                between=("device", "edge"), bandwidth_bytes_per_second=6.25e6, latency_seconds=0.001
            ),
        ),
        codecs={
            "int8": CodecProfile(
                bytes_ratio=0.25, encode_seconds_per_byte={"device": 1e-9}, accuracy_loss=0.001
            )
        },
        optimizer_state_bytes=3648,
    )


def test_no_samples_take_no_time_and_others_the_fixed_part_too() -> None:
    time = AffineTime(fixed=2.0, per_sample=0.5)
    assert (time(0), time(1), time(4)) == (0.0, 2.5, 4.0)


def test_a_profile_survives_the_way_through_a_file(tmp_path: Path) -> None:
    example().to_json(tmp_path / "profile.json")
    assert Profile.from_json(tmp_path / "profile.json") == example()


def test_a_profile_without_the_optional_fields_is_read() -> None:
    data = json.loads(
        """{"format": 1, "model": "LeNet5", "input_bytes_per_sample": 12288,
            "target_bytes_per_sample": 8, "data_tier": "device",
            "tiers": {"device": {"optimizer_seconds": 0.004, "memory_bytes": null}, "edge": {}},
            "layers": [{"name": "conv1", "output_bytes_per_sample": 18816, "parameter_bytes": 1824,
              "forward_seconds": {"device": {"fixed": 1e-4, "per_sample": 2e-4},
                                  "edge": {"fixed": 0, "per_sample": 1e-5}},
              "backward_seconds": {"device": {"fixed": 2e-4, "per_sample": 5e-4},
                                   "edge": {"fixed": 0, "per_sample": 1e-5}}}],
            "links": [{"between": ["device", "edge"], "bandwidth_bytes_per_second": 6.25e6}]}"""
    )
    profile = Profile.from_dict(data)
    assert profile.layers[0].forward_seconds["device"](10) == pytest.approx(2.1e-3)
    assert profile.link("edge", "device").latency_seconds == 0.0
    assert profile.codecs == {}
    assert profile.optimizer_state_bytes is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 10**400, True, "1", None])
def test_a_time_that_nothing_can_take_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="`per_sample` must be a"):
        AffineTime(fixed=0.0, per_sample=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_a_bandwidth_that_no_link_has_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"bandwidth_bytes_per_second of device-edge.*above 0"):
        LinkProfile(between=("device", "edge"), bandwidth_bytes_per_second=value)


def test_a_layer_without_a_tiers_time_is_refused() -> None:
    layer = example().layers[0]
    partly = replace(layer, backward_seconds={"device": AffineTime(fixed=0.0, per_sample=1.0)})
    with pytest.raises(ValueError, match="layer 'conv1' has no backward time for tier 'edge'"):
        replace(example(), layers=(partly,))


def test_links_that_do_not_reach_a_tier_are_refused() -> None:
    with pytest.raises(ValueError, match="no chain of links joins tier 'device' to tier 'edge'"):
        replace(example(), links=())


def test_a_data_tier_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="'cloud' is not among the tiers"):
        replace(example(), data_tier="cloud")


def test_a_codec_that_packs_to_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"bytes_ratio.*above 0"):
        CodecProfile(bytes_ratio=0.0)


def test_another_format_is_refused() -> None:
    with pytest.raises(ValueError, match="format 2, this version reads format 1"):
        Profile.from_dict({**example().to_dict(), "format": 2})


@settings(max_examples=300, deadline=None)
@given(damaged(example().to_dict()) | ANY_JSON)
def test_any_json_is_a_valid_profile_or_a_value_error(data: object) -> None:
    try:
        profile = Profile.from_dict(data)  # type: ignore[arg-type]
    except ValueError:
        return
    assert Profile.from_dict(json.loads(json.dumps(profile.to_dict()))) == profile


def test_a_route_carries_what_its_slowest_link_does() -> None:
    two = example()
    third = {**two.layers[0].forward_seconds, "cloud": AffineTime(fixed=0.0, per_sample=1e-6)}
    layer = replace(two.layers[0], forward_seconds=third, backward_seconds=third)
    slow = LinkProfile(between=("edge", "cloud"), bandwidth_bytes_per_second=1e6)
    profile = replace(
        two,
        tiers={**two.tiers, "cloud": TierProfile()},
        layers=(layer,),
        links=(*two.links, slow),
    )
    assert profile.bytes_per_second("device", "edge") == 6.25e6
    assert profile.bytes_per_second("device", "cloud") == 1e6
    assert profile.bytes_per_second("cloud", "edge") == 1e6
