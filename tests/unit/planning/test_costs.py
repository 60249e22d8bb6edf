"""The cost model against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_hiertrain.planning import predict
from lightning_hiertrain.profiles import (
    AffineTime,
    CodecProfile,
    LayerProfile,
    LinkProfile,
    Profile,
    TierProfile,
)
from lightning_hiertrain.schedule import Schedule, Share
from lightning_hiertrain.topology import Link, Tier, Topology
from tests.unit.planning.instances import with_transfer_seconds


def layer(
    name: str, device: tuple[float, float], edge: tuple[float, float], sizes: tuple[int, int]
) -> LayerProfile:
    """A layer whose backward takes twice its forward; cloud is as fast as the edge."""
    times = {"device": device, "edge": edge, "cloud": edge}
    return LayerProfile(
        name=name,
        output_bytes_per_sample=sizes[0],
        parameter_bytes=sizes[1],
        forward_seconds={t: AffineTime(fixed=f, per_sample=s) for t, (f, s) in times.items()},
        backward_seconds={
            t: AffineTime(fixed=2 * f, per_sample=2 * s) for t, (f, s) in times.items()
        },
    )


def example() -> Profile:
    return Profile(
        model="two layers",
        input_bytes_per_sample=10,
        target_bytes_per_sample=2,
        data_tier="device",
        tiers={
            name: TierProfile(
                optimizer_seconds=0.03, loss_seconds=AffineTime(fixed=0.05, per_sample=0)
            )
            for name in ("device", "edge", "cloud")
        },
        layers=(
            layer("first", (0.2, 0.05), (0.1, 0.01), (5, 100)),
            layer("second", (0.2, 0.1), (0.1, 0.02), (1, 0)),
        ),
        links=(
            LinkProfile(
                between=("device", "edge"), bandwidth_bytes_per_second=1000, latency_seconds=0.1
            ),
            LinkProfile(
                between=("edge", "cloud"), bandwidth_bytes_per_second=500, latency_seconds=0.2
            ),
        ),
    )


def schedule(owner: str, num_chunks: int = 1, **shares: tuple[int, int]) -> Schedule:
    return Schedule(
        owner=owner,
        shares={t: Share(num_layers=m, num_samples=b) for t, (m, b) in shares.items()},
        num_chunks=num_chunks,
    )


TWO = schedule("edge", device=(1, 4), edge=(2, 6), cloud=(0, 0))


def test_the_plain_step_of_an_owner_and_a_prefix_worker() -> None:
    step = predict(example(), TWO, overlap=False)
    assert step.input_seconds == pytest.approx(0.1 + (6 * 10 + 10 * 2) / 1000)
    # The edge is ready at 0.18 + 0.16, the device's activations at 0.4 + 0.1 + 20/1000.
    assert step.forward_seconds == pytest.approx(max(0.34, 0.52) + 0.3)
    assert step.loss_seconds == pytest.approx(0.05)
    assert step.backward_seconds == pytest.approx(max(0.6 + 0.32, 0.6 + 0.12 + 0.8))
    assert step.update_seconds == pytest.approx(2 * (0.1 + 100 / 1000) + 0.03)
    assert step.optimizer_seconds == pytest.approx(0.03)
    assert step.step_seconds == pytest.approx(0.82 + 0.05 + 1.52 + 0.43)


def test_the_overlapped_step_of_an_owner_and_a_prefix_worker() -> None:
    step = predict(example(), TWO, overlap=True)
    assert step.input_seconds == 0.0
    # The first layer's weights arrive on the device at 0.1 + 100/1000.
    assert step.forward_seconds == pytest.approx(0.2 + 0.4 + 0.02 + 0.1 + 0.3)
    assert step.backward_seconds == pytest.approx(0.6 + 0.1 + 0.02 + 0.8 + 0.2)
    assert step.update_seconds == pytest.approx(0.03)
    assert step.step_seconds == pytest.approx(1.02 + 0.05 + 1.72 + 0.03)


def test_overhead_comes_before_the_first_layer() -> None:
    profile = example()
    tiers = {"device": 0.3, "edge": 0.07, "cloud": 9.0}  # the cloud takes no part
    profile = replace(
        profile,
        tiers={t: replace(profile.tiers[t], overhead_seconds=s) for t, s in tiers.items()},
    )
    plain, overlapped = predict(profile, TWO, overlap=False), predict(profile, TWO, overlap=True)
    assert plain.overhead_seconds == overlapped.overhead_seconds == 0.07
    assert plain.forward_seconds == pytest.approx(max(0.34 + 0.07, 0.52 + 0.3) + 0.3)
    # On the device it goes on while the first layer's weights travel, 0.2 s.
    assert overlapped.forward_seconds == pytest.approx(0.3 + 0.4 + 0.02 + 0.1 + 0.3)
    bare = predict(example(), TWO).busy_seconds
    assert overlapped.busy_seconds["device"] == pytest.approx(bare["device"] + 0.3)
    assert overlapped.busy_seconds["edge"] == pytest.approx(bare["edge"] + 0.07)
    assert overlapped.busy_seconds["cloud"] == 0.0


def test_bytes_take_their_time_from_the_processors_at_both_ends() -> None:
    seconds = {"device": 0.001, "edge": 0.002, "cloud": 9.0}  # nothing passes the cloud
    profile = with_transfer_seconds(example(), seconds)
    bare, step = predict(example(), TWO), predict(profile, TWO)
    # 80 bytes of inputs and targets go from the device to the edge, 320 bytes in all both ways.
    assert step.forward_seconds == pytest.approx(bare.forward_seconds + 0.001 * 80)
    assert step.backward_seconds == bare.backward_seconds
    for tier, per_byte in {"device": 0.001, "edge": 0.002, "cloud": 0.0}.items():
        assert step.busy_seconds[tier] == pytest.approx(bare.busy_seconds[tier] + per_byte * 320)
    assert predict(profile, TWO, overlap=False).step_seconds == pytest.approx(
        predict(example(), TWO, overlap=False).step_seconds
    )


def test_a_relay_receives_and_sends() -> None:
    profile = with_transfer_seconds(example(), {"edge": 0.002})
    busy = predict(profile, schedule("cloud", cloud=(2, 10))).busy_seconds
    assert busy["edge"] == pytest.approx(2 * 0.002 * (10 * 10 + 10 * 2))


def test_all_tiers_wait_until_the_mini_batch_is_dealt_out() -> None:
    tiers = {"device": 0.5, "edge": 0.07, "cloud": 9.0}
    profile = example()
    profile = replace(
        profile,
        tiers={t: replace(profile.tiers[t], overhead_seconds=s) for t, s in tiers.items()},
        dealing_seconds=AffineTime(fixed=0.4, per_sample=0.01),
    )
    rest = {"edge": Share(num_layers=2, num_samples=8), "cloud": Share(num_layers=0, num_samples=0)}
    with_own = Schedule(owner="edge", shares={"device": Share(num_layers=1, num_samples=2), **rest})
    bare = Schedule(
        owner="edge",
        shares={
            "device": Share(num_layers=0, num_samples=0),
            "edge": Share(num_layers=2, num_samples=10),
            "cloud": Share(num_layers=0, num_samples=0),
        },
    )
    for schedule, samples, device in ((with_own, 8, 0.5), (bare, 10, 0.4)):
        plain, overlapped = predict(profile, schedule, overlap=False), predict(profile, schedule)
        undealt = replace(profile, dealing_seconds=AffineTime(fixed=0.0, per_sample=0.0))
        before = predict(undealt, schedule, overlap=False)
        # The owner's own loop goes on meanwhile; the data tier's includes the dealing.
        assert plain.overhead_seconds == overlapped.overhead_seconds == 0.4
        assert plain.input_seconds == pytest.approx(before.input_seconds + 0.01 * samples)
        for prediction in (plain, overlapped):
            busy = prediction.busy_seconds["device"]
            computing = 0.0 if schedule is bare else before.busy_seconds["device"] - 0.5
            assert busy == pytest.approx(computing + device + 0.01 * samples)


def test_chunks_pay_the_fixed_times_again_and_hide_the_sending() -> None:
    step = predict(example(), replace(TWO, num_chunks=2), overlap=True)
    assert step.forward_seconds == pytest.approx(0.2 + 2 * 0.3 + 0.01 + 0.1 + 0.3)
    assert step.backward_seconds == pytest.approx(0.6 + 0.1 + 0.01 + 2 * 0.6 + 0.2)


def test_busy_times_of_tiers_and_link_directions() -> None:
    step = predict(example(), TWO, overlap=False)
    assert step.busy_seconds == pytest.approx(
        {
            "device": 0.4 + 0.8,
            "edge": 0.16 + 0.3 + 0.32 + 0.6 + 0.05 + 0.03,
            "cloud": 0.0,
            "device>edge": (80 + 20 + 100) / 1000,
            "edge>device": (20 + 100) / 1000,
            "edge>cloud": 0.0,
            "cloud>edge": 0.0,
        }
    )
    assert step.busiest == "edge"


def test_routed_traffic_takes_the_least_rate_and_the_sum_of_latencies() -> None:
    step = predict(example(), schedule("cloud", cloud=(2, 10)), overlap=False)
    assert step.input_seconds == pytest.approx(0.1 + 0.2 + (10 * 10 + 10 * 2) / 500)


def test_inputs_share_the_links_that_they_cross() -> None:
    both = schedule("cloud", edge=(1, 30), cloud=(2, 10))
    step = predict(example(), both, overlap=False)
    # device-edge carries 300 bytes for the edge and 100 + 80 for the cloud; edge-cloud the latter.
    assert step.input_seconds == pytest.approx(max(0.1 + 480 / 1000, 0.3 + 480 / 1000))


def test_parameter_traffic_shares_the_links_that_it_crosses() -> None:
    both = schedule("cloud", device=(1, 2), edge=(1, 2), cloud=(2, 2))
    step = predict(example(), both, overlap=False)
    assert step.update_seconds == pytest.approx(2 * (0.3 + 200 / 500) + 0.03)


def test_an_owner_without_samples_waits_and_pays_no_fixed_time_for_lower_layers() -> None:
    step = predict(example(), schedule("edge", device=(1, 10), edge=(2, 0)), overlap=False)
    assert step.forward_seconds == pytest.approx(0.7 + 0.1 + 50 / 1000 + 0.3)
    assert step.busy_seconds["edge"] == pytest.approx(0.3 + 0.6 + 0.05 + 0.03)


def test_codecs_shrink_what_travels_and_take_time_at_both_ends() -> None:
    int8 = CodecProfile(
        bytes_ratio=0.25,
        encode_seconds_per_byte={"device": 0.001, "edge": 0.002},
        decode_seconds_per_byte={"device": 0.003, "edge": 0.004},
    )
    profile = replace(example(), codecs={"int8": int8})
    step = predict(profile, replace(TWO, codecs={"device": "int8"}), overlap=False)
    assert step.forward_seconds == pytest.approx(0.4 + 0.02 + 0.1 + 0.005 + 0.08 + 0.3)
    assert step.backward_seconds == pytest.approx(0.6 + 0.04 + 0.1 + 0.005 + 0.06 + 0.8)
    assert step.busy_seconds["device>edge"] == pytest.approx((80 + 5 + 100) / 1000)
    assert step.busy_seconds["device"] == pytest.approx(1.2 + 20 * 0.004)


def test_a_topology_takes_links_away() -> None:
    mesh = replace(
        example(),
        links=(
            *example().links,
            LinkProfile(between=("device", "cloud"), bandwidth_bytes_per_second=1e6),
        ),
    )
    chain = Topology(
        tiers=tuple(Tier(name=name) for name in ("device", "edge", "cloud")),
        links=(Link(between=("device", "edge")), Link(between=("edge", "cloud"))),
    )
    plan = schedule("cloud", cloud=(2, 10))
    direct = predict(mesh, plan, overlap=False)
    routed = predict(mesh, plan, overlap=False, topology=chain)
    assert direct.input_seconds == pytest.approx(120 / 1e6)
    assert routed.input_seconds == pytest.approx(0.3 + 120 / 500)


def test_a_topology_with_a_link_that_was_not_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="has the link 'device-cloud', which the profile has not"):
        predict(example(), TWO, topology=Topology.local(("device", "edge", "cloud")))


def test_a_topology_of_other_tiers_is_refused() -> None:
    with pytest.raises(ValueError, match="they must be the same, in the same order"):
        predict(example(), TWO, topology=Topology.local(("device", "cloud")))


def test_a_schedule_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="is for 3 layers, the profile of 'two layers' has 2"):
        predict(example(), schedule("edge", edge=(3, 1)))


def test_a_schedule_of_other_tiers_is_refused() -> None:
    with pytest.raises(ValueError, match="names the tier 'fog'"):
        predict(example(), schedule("fog", fog=(2, 1)))


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(ValueError, match="the codec 'gzip' is unknown"):
        predict(example(), replace(TWO, codecs={"device": "gzip"}))
