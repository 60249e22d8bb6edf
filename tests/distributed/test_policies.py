"""Every policy's schedule is carried out: exactly, or with the loss that its codecs may bring."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.distributed.launch import Case, run_cases
from tests.distributed.policy_cases import train
from tests.distributed.training import largest_difference

TARGET = "tests.distributed.policy_cases:train"
EXACT = ("all-device", "all-edge", "all-cloud", "jointdnn", "hiertrain")
BY_HAND = {
    "format": 1,
    "owner": "edge",
    "shares": {
        "device": {"num_layers": 3, "num_samples": 5},
        "edge": {"num_layers": 12, "num_samples": 2},
        "cloud": {"num_layers": 6, "num_samples": 5},
    },
    "num_chunks": 2,
}
LOSSY: dict[str, dict[str, Any]] = {
    "jalad": {"policy": "jalad"},
    "compression": {
        "compression": True, "keep_inputs_on_data_tier": True, "slow": 1e5, "device_factor": 1e4,
    },
    "int8 by hand": {
        "schedule": {**BY_HAND, "codecs": {"device": "int8+zstd", "cloud": "fp16"}}, "folder": None,
    },
    "minmax by hand": {
        "schedule": {**BY_HAND, "codecs": {"device": "minmax6", "cloud": "bf16"}}, "folder": None,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """All runs by name; the first one measures the profile that the others plan from."""
    folder = str(tmp_path_factory.mktemp("profile"))
    cases = {
        "measured": {"folder": folder, "measure": True, "policy": "jalad", "compression": True},
        "private": {"compression": True, "keep_inputs_on_data_tier": True},
        **{name: {"folder": folder, "policy": name} for name in EXACT},
        "slow": {"folder": folder, "policy": "all-cloud", "slow": 1e5},
        **{name: {"folder": folder, **lossy} for name, lossy in LOSSY.items()},
    }
    runs = run_cases(
        [Case(target=TARGET, kwargs=kwargs) for kwargs in cases.values()], timeout_seconds=200
    )
    return dict(zip(cases, runs, strict=True))


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return train(plain=True)


@pytest.mark.parametrize("policy", EXACT)
def test_policies_without_codecs_train_as_one_process_does(
    policy: str, trained: Any, plain: dict[str, Any]
) -> None:
    for run in trained[policy]:
        assert run["schedule"]["policy"] == policy
        assert largest_difference(plain, run) < 1e-6
        assert run["metrics"] == pytest.approx(plain["metrics"], abs=1e-6)


@pytest.mark.parametrize(
    ("policy", "owner"), [("all-device", "device"), ("all-edge", "edge"), ("all-cloud", "cloud")]
)
def test_one_tier_does_everything(policy: str, owner: str, trained: Any) -> None:
    shares = trained[policy][0]["schedule"]["shares"]
    assert {tier for tier, share in shares.items() if share["num_samples"]} == {owner}


@pytest.mark.parametrize("name", LOSSY)
def test_packed_activations_train_nearly_as_one_process_does(
    name: str, trained: Any, plain: dict[str, Any]
) -> None:
    for run in trained[name]:
        assert run["schedule"]["codecs"]
        moved = largest_difference(plain, {"weights": plain["initial"]})
        assert 1e-9 < largest_difference(plain, run) < moved / 2
        for loss in ("train_loss_epoch", "val_loss"):
            assert run["metrics"][loss] == pytest.approx(plain["metrics"][loss], rel=0.01)


def test_jalad_cuts_between_edge_and_cloud_within_its_accuracy_bound(trained: Any) -> None:
    run = trained["jalad"][0]
    codec = run["schedule"]["codecs"]["edge"]
    assert codec.startswith("minmax")
    assert json.loads(run["profile"])["codecs"][codec]["accuracy_loss"] <= 0.01
    assert run["schedule"]["owner"] == "cloud"


@pytest.mark.parametrize("name", ["measured", "private"])
def test_codecs_are_measured_on_every_tier(name: str, trained: Any) -> None:
    profile = json.loads(trained[name][0]["profile"])
    names = {"fp16", "int8", "int8+zstd", *(f"minmax{bits}" for bits in range(2, 9))}
    assert profile["codecs"].keys() == names
    for codec in profile["codecs"].values():
        for what in ("encode", "decode"):
            seconds = codec[f"{what}_seconds_per_byte"]
            assert seconds.keys() == {"device", "edge", "cloud"}
            assert all(1e-12 < x < 1e-6 for x in seconds.values())
    loss = {name: codec["accuracy_loss"] for name, codec in profile["codecs"].items()}
    assert loss["fp16"] < loss["minmax2"]
    assert loss["int8"] < loss["minmax2"]
    ratio = {name: codec["bytes_ratio"] for name, codec in profile["codecs"].items()}
    assert ratio["minmax2"] < ratio["int8+zstd"] < ratio["int8"] == pytest.approx(1 / 8, rel=0.1)


def test_the_profile_says_what_travels_of_a_sample(trained: Any) -> None:
    profile = json.loads(trained["measured"][0]["profile"])
    table = 3 * 256 * 8 / 12
    assert 3072 < profile["input_bytes_per_sample"] <= 3072 + table + 1


def test_images_travel_at_a_byte_a_value_where_links_are_slow(trained: Any) -> None:
    sent = trained["slow"][0]["sent"]["cloud"]["bytes_sent"]
    batches = 6 + 4  # of training and of validation
    assert sent < 2 * batches * 12 * 3072 + 8 * 62006 + 200_000
