"""What cannot work is refused at once, with the reason, on every tier; nothing waits in vain."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer

from lightning_hiertrain import HierTrainStrategy, Link, Tier, Topology
from lightning_hiertrain.transport import make_keys
from tests.distributed.bad_input_cases import (
    CASES,
    TIERS,
    TIMEOUT_SECONDS,
    Small,
    profile,
    rows,
    schedule,
)
from tests.distributed.launch import Case, run_cases
from tests.unit.transport.helpers import make_topology

REFUSED_EVERYWHERE = {
    "manual optimization": r"sets `automatic_optimization = False`.*use automatic optimization",
    "several optimizers": r"multiple optimizers is only supported with manual optimization",
    "LBFGS": r"`LBFGS` evaluates the training step several times.*such as SGD or Adam",
    "no cut point": r"in `Uncuttable`.*`mean` \(\S*bad_input_cases.py:\d+\) makes a value",
    "BatchSizeFinder": r"`BatchSizeFinder` cannot work.*on one machine with `strategy='auto'`",
    "ModelPruning": r"`ModelPruning` cannot work.*prune after training",
    "module in a function": r"a trained tensor of shape \(.*\) is no parameter of the module",
    "size of the mini-batch": r"works on the whole batch of 6 samples, and on 4 of them it ends",
    "schedule of another model": r"for a model of 6 layers, this one has 5; plan again",
    "schedule of another batch": r"mini-batches of 9 samples, the first one holds 6; plan again",
    "batch of words": r"a batch of type `list` cannot be split into samples",
    "batch of a scalar": r"a batch of type `Tensor` cannot be split into samples",
    "profile of another model": r"profile of 'Other' is 'layer1'.*profile the model again",
    "profile of fewer layers": r"of 'Other' has 4 layers, this model \('Small'\) has 5; profile",
    "other policies": r"`policy` is 'hiertrain' on tier 'device' and 'all-edge' on tier 'cloud'",
    "other schedules": r"the digest of `schedule` is '.*' on tier 'device' and '.*' on tier 'edge'",
    "other topologies": r"give every tier the same topology",
    "two edges": r"two processes claim to be tier 'edge'.*HIERTRAIN_TIER",
}
FAILING_TIER = {
    "optimizer that steps twice": ("edge", "MisconfigurationException: the optimizer evaluates"),
    "skipped on one tier": ("edge", "returned nothing ahead of it on tier 'cloud'"),
    "error of the step": ("device", "ValueError: not enough values to unpack (expected 3, got 2)"),
    "step of the owner": ("edge", "ArithmeticError: the step of edge went wrong"),
    "step of a prefix worker": ("cloud", "ArithmeticError: the step of cloud went wrong"),
    "step of the data tier": ("device", "ArithmeticError: the step of device went wrong"),
    "backward of the owner": ("edge", "ArithmeticError: the backward pass went wrong"),
    "backward of a prefix worker": ("cloud", "ArithmeticError: the backward pass went wrong"),
    "dataset": ("device", "OSError: row 20 cannot be read"),
    "callback on one tier": ("cloud", "ArithmeticError: the callback of cloud went wrong"),
    "callback on rank 0": ("device", "ArithmeticError: the callback of device went wrong"),
    "setup on one tier": ("edge", "ArithmeticError: the callback of edge went wrong"),
    "checkpoint of the owner": ("device", "ArithmeticError: the callback of device went wrong"),
    "checkpoint of another tier": ("device", "ArithmeticError: the callback of device went wrong"),
    "end of training on one tier": ("cloud", "ArithmeticError: the callback of cloud went wrong"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("topologies")


@pytest.fixture(scope="module")
def failures(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """How each rank failed in each case, all in the same three processes."""
    chain = make_topology(folder)
    chain.to_json(folder / "chain.json")
    triangle = replace(chain, links=(*chain.links, Link(between=("device", "cloud"))))
    triangle.to_json(folder / "triangle.json")
    cases = [
        Case(
            target="tests.distributed.bad_input_cases:fail",
            kwargs={"name": name, "folder": str(folder)},
        )
        for name in CASES
    ]
    return dict(zip(CASES, run_cases(cases, timeout_seconds=150), strict=True))


def test_no_tier_waits_for_its_timeout(failures: Any) -> None:
    for name, ranks in failures.items():
        for rank, failure in enumerate(ranks):
            assert failure["seconds"] < TIMEOUT_SECONDS / 3, (name, rank, failure["message"])


@pytest.mark.parametrize("name", REFUSED_EVERYWHERE)
def test_every_tier_is_told_what_is_wrong(failures: Any, name: str) -> None:
    for failure in failures[name]:
        assert re.search(REFUSED_EVERYWHERE[name], failure["message"], re.DOTALL), failure


@pytest.mark.parametrize("name", FAILING_TIER)
def test_an_error_on_one_tier_ends_all_and_is_seen_on_all(failures: Any, name: str) -> None:
    tier, original = FAILING_TIER[name]
    for own, failure in zip(TIERS, failures[name], strict=True):
        assert original in failure["traceback"]
        assert "bad_input_cases.py" in failure["traceback"]
        if own != tier:
            assert failure["message"].startswith(f"tier {own!r} lost tier {tier!r} during ")


def test_a_checkpoint_on_an_error_holds_the_newest_weights_or_is_not_written(
    failures: Any, folder: Path
) -> None:
    # Rank 0 asked the owner for them, which took part in nothing any more.
    checkpoint = torch.load(folder / "owner-device.ckpt", weights_only=False)
    assert checkpoint["global_step"] == 5
    assert checkpoint["optimizer_states"][0]["param_groups"][0]["lr"] == 0.1
    plain = Small.load_from_checkpoint(folder / "owner-device.ckpt")
    assert plain.state_dict().keys() == checkpoint["state_dict"].keys()
    assert not (folder / "owner-edge.ckpt").exists()


def test_a_missing_tier_is_named_with_its_address(failures: Any) -> None:
    device, edge, _ = failures["cloud missing at its address"]
    assert "tier 'cloud' is missing (reached through tier 'edge')" in device["message"]
    assert re.search(r"tier 'cloud' is missing \(dialled at 127.0.0.1:\d+", edge["message"])
    for failure in (device, edge, *failures["cloud missing"][:2]):
        assert "waited 2 s for all tiers" in failure["message"]
        assert "tier 'cloud' is missing" in failure["message"]


# In this process alone: refused before another tier is asked


def make_trainer(strategy: HierTrainStrategy, **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"devices": 1, "num_nodes": 3, **options},
    )


def fit_as_second_node(monkeypatch: pytest.MonkeyPatch, strategy: HierTrainStrategy) -> None:
    for name, value in {"NODE_RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    make_trainer(strategy, max_epochs=1).fit(Small(), rows())


@pytest.mark.parametrize(
    "options",
    [{"devices": 1, "num_nodes": 1}, {"devices": 2, "num_nodes": 1}, {"devices": 3}],
)
def test_another_number_of_processes_than_tiers_is_refused(options: dict[str, int]) -> None:
    match = r"has 3 tiers .*; use `Trainer\(devices=3\)` on one machine"
    with pytest.raises(MisconfigurationException, match=match):
        make_trainer(HierTrainStrategy(), **options)


def test_torchrun_s_local_processes_are_not_three_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    # Lightning itself ends in an IndexError here.
    torchrun = {"RANK": 2, "LOCAL_RANK": 2, "GROUP_RANK": 0, "WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3}
    for name, value in {"TORCHELASTIC_RUN_ID": "run", **torchrun}.items():
        monkeypatch.setenv(name, str(value))
    match = r"number 3 on this machine.*with all tiers on one machine use `Trainer\(devices=3\)`"
    with pytest.raises(MisconfigurationException, match=match):
        make_trainer(HierTrainStrategy())


def test_the_same_tier_for_all_local_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIERTRAIN_TIER", "edge")
    trainer = make_trainer(HierTrainStrategy(), devices=3, num_nodes=1)
    with pytest.raises(MisconfigurationException, match=r"same tier of all 3 processes.*unset it"):
        trainer.fit(Small(), rows())


def test_an_unknown_tier_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIERTRAIN_TIER", "fog")
    with pytest.raises(MisconfigurationException, match=r"HIERTRAIN_TIER='fog' is not one of"):
        fit_as_second_node(monkeypatch, HierTrainStrategy())


def test_machines_without_addresses_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    match = r"do not know each other's address: pass `HierTrainStrategy\(topology="
    with pytest.raises(MisconfigurationException, match=match):
        fit_as_second_node(monkeypatch, HierTrainStrategy())


OUTSIDE = Topology(
    tiers=(
        Tier(name="device"),
        Tier(name="edge", address="192.0.2.20:5700"),
        Tier(name="cloud", address="192.0.2.30:5700"),
    ),
    links=(Link(between=("device", "edge")), Link(between=("edge", "cloud"))),
)


def test_machines_without_keys_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"without keys.*make keys .* with `hiertrain keys`"):
        fit_as_second_node(monkeypatch, HierTrainStrategy(topology=OUTSIDE))


def test_keys_without_the_private_one_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_keys(OUTSIDE, tmp_path / "elsewhere").to_json(tmp_path / "topology.json")
    with pytest.raises(ValueError, match=r"'edge' cannot open .*: it was given no private key"):
        fit_as_second_node(monkeypatch, HierTrainStrategy(topology=tmp_path / "topology.json"))


def test_another_tier_s_private_key_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    topology = make_keys(OUTSIDE, tmp_path)
    strategy = HierTrainStrategy(topology=topology, private_key=tmp_path / "cloud.key")
    with pytest.raises(ValueError, match=r"key given to tier 'edge'.* it is that of tier 'cloud'"):
        fit_as_second_node(monkeypatch, strategy)


@pytest.mark.parametrize("bandwidth", [float("nan"), 0, -1, float("inf"), "fast", None])
def test_an_impossible_bandwidth_is_refused(tmp_path: Path, bandwidth: Any) -> None:
    data = profile().to_dict()
    data["links"][1]["bandwidth_bytes_per_second"] = bandwidth
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"`bandwidth_bytes_per_second of edge-cloud` must be a"):
        HierTrainStrategy(profile=path)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"tiers": ("device", "device", "cloud")}, r"two or more different tiers"),
        ({"tiers": ("device",)}, r"two or more different tiers"),
        ({"data_tier": "fog"}, r"`data_tier='fog'` is not one of `tiers="),
        ({"policy": "best"}, r"`policy='best'` is unknown; choose one of"),
        ({"timeout_seconds": 0}, r"`timeout_seconds` must be above 0, got 0"),
        ({"silence_seconds": float("nan")}, r"`silence_seconds` must be above 0, got nan"),
        ({"schedule": schedule(), "profile": profile()}, r"`schedule` and `profile` exclude"),
        ({"schedule": "missing.json"}, r"missing.json"),
        ({"tiers": ("a", "b"), "data_tier": "a", "schedule": schedule()}, r"the schedule is for"),
        ({"tiers": ("a", "b"), "data_tier": "a", "profile": profile()}, r"the profile is for the"),
        ({"profile": profile(data_tier="edge")}, r"with the data on tier 'edge'.*'device'"),
        ({"tiers": ("device", "cloud", "edge"), "topology": OUTSIDE}, r"in the same order"),
        ({"schedule": schedule().to_dict()}, r"must be a `Schedule` or a path, got 'dict'.*from_d"),
        ({"overlap": "no"}, r"`overlap` must be True or False, got 'no'"),
        ({"private_key": "missing.key"}, r"there is no 'missing.key'"),
        ({"least_depth": float("nan")}, r"`least_depth` must be a whole number, got nan"),
    ],
)
def test_impossible_arguments_are_refused(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises((ValueError, TypeError, OSError), match=match):
        HierTrainStrategy(**arguments)
