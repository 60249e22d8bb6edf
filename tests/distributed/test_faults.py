"""Full disks, signals, strangers and strange values: each run goes on or ends as it should."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch

from tests.distributed.bad_input_cases import TIERS
from tests.distributed.fault_cases import EVERY, STRANGE
from tests.distributed.forked import run_scenarios
from tests.unit.transport.strangers import NO_KEY, NOT_LISTED, OTHER_KEY, UNENCRYPTED

FAULTS: list[dict[str, str]] = [
    *({"tier": tier, "fault": "SIGTERM"} for tier in TIERS),
    *({"tier": tier, "fault": "SIGKILL"} for tier in TIERS),
    {"tier": "device", "fault": "SIGINT"},
    {"tier": "cloud", "fault": "disk"},
]
IDLE = 900
MAY_MOUNT = os.geteuid() == 0
if MAY_MOUNT:
    FAULTS.append({"tier": "device", "fault": "disk", "owner": "cloud"})
OWNERS = dict(zip(STRANGE, ("edge", "cloud", "device", "edge", "cloud", "edge"), strict=True))


@pytest.fixture(scope="module")
def reports() -> list[Any]:
    """What came of all faults, strange values and the attack, in this order; all are forks of one.

    Their imports take as long as the scenarios.
    """
    values = [{"name": name, "owner": owner} for name, owner in OWNERS.items()]
    return run_scenarios(
        "tests.distributed.fault_cases",
        [
            *(("train_with_fault", fault) for fault in FAULTS),
            *(("train_strangely", value) for value in values),
            ("train_under_attack", {"idle": IDLE}),
        ],
        timeout_seconds=250,
    )


@pytest.fixture(scope="module")
def faults(reports: list[Any]) -> dict[tuple[str, str], Any]:
    keys = [(each["tier"], each["fault"]) for each in FAULTS]
    return dict(zip(keys, reports, strict=False))


@pytest.fixture(scope="module")
def strange(reports: list[Any]) -> dict[str, Any]:
    return dict(zip(OWNERS, reports[len(FAULTS) : -1], strict=True))


def test_what_is_called_a_checkpoint_is_whole_and_holds_the_weights_of_its_step(
    faults: Any,
) -> None:
    for fault, report in faults.items():
        assert len(report["checkpoints"]) >= 2, (fault, report["outputs"])
        for name, (step, difference) in report["checkpoints"].items():
            assert name == f"step={step}.ckpt"
            assert step % EVERY == 0
            assert difference < 1e-5, (fault, name)
        left = set(report["files"]) - set(report["checkpoints"])
        # A killed process cannot remove what it was writing; it never has a checkpoint's name.
        assert not left or fault == ("device", "SIGKILL"), fault
        assert all(name.endswith(".part") for name in left)


@pytest.mark.skipif(not MAY_MOUNT, reason="a small disk can be mounted by root alone")
def test_a_full_disk_ends_the_run_with_the_last_good_checkpoint_named(faults: Any) -> None:
    report = faults["device", "disk"]
    newest = max(step for step, _ in report["checkpoints"].values())
    said = report["outputs"]["device"]
    assert f"step={newest + EVERY}.ckpt could not be written (No space left on device)" in said
    assert re.search(rf"the last good checkpoint is /\S+/step={newest}.ckpt", said)
    assert set(report["codes"].values()) == {1}
    for tier in ("edge", "cloud"):
        assert "lost tier 'device'" in report["outputs"][tier]
        assert "No space left on device" in report["outputs"][tier]


def test_a_full_disk_where_nothing_is_written_disturbs_nobody(faults: Any) -> None:
    report = faults["cloud", "disk"]
    assert set(report["codes"].values()) == {0}, report["outputs"]


@pytest.mark.parametrize("tier", TIERS)
def test_a_tier_that_is_told_to_end_says_where_the_run_can_be_resumed(
    faults: Any, tier: str
) -> None:
    report = faults[tier, "SIGTERM"]
    assert None not in report["codes"].values(), report["outputs"]
    if tier != "device":
        return
    newest = max(step for step, _ in report["checkpoints"].values())
    assert f"/step={newest}.ckpt" in report["outputs"]["device"]


def test_strangers_and_malformed_frames_leave_training_undisturbed(reports: list[Any]) -> None:
    report = reports[-1]
    assert set(report["codes"].values()) == {0}, report["outputs"]
    assert len(set(report["steps"])) == 1
    assert report["steps"][0] > 25
    assert max(report["differences"]) < 1e-5
    said = report["outputs"]["edge"]
    for kind in (
        *(NOT_LISTED, UNENCRYPTED, OTHER_KEY, NO_KEY),
        "an envelope that cannot be read",
        "an envelope of an unknown kind",
        "an envelope that names an unknown tier",
        "an envelope with an impossible number",
    ):
        assert said.count(kind) == 1, (kind, said)


# Values


@pytest.mark.parametrize("name", [name for name in STRANGE if "anomalies" not in name])
def test_values_that_are_not_finite_do_what_they_do_on_one_machine(strange: Any, name: str) -> None:
    plain, tiers = strange[name]
    finite = all(bool(value.isfinite().all()) for value in plain["weights"].values())
    assert finite is name.startswith("no loss")
    for tier, found in tiers.items():
        assert found["steps"] == plain["steps"], (tier, found)
        for key, value in plain["weights"].items():
            torch.testing.assert_close(
                found["weights"][key], value, atol=1e-6, rtol=0, equal_nan=True
            )


def test_an_anomaly_is_found_and_ends_all_tiers_with_its_traceback(strange: Any) -> None:
    (name,) = (name for name in STRANGE if "anomalies" in name)
    plain, tiers = strange[name]
    assert plain["type"] == "RuntimeError"
    match = re.search(r"Function '(\w+)' returned nan values", plain["message"])
    assert match is not None, plain
    owner = OWNERS[name]
    for tier, found in tiers.items():
        assert found["type"] == ("RuntimeError" if tier == owner else "PeerLostError"), found
        assert match[0] in found["traceback"], (tier, found["traceback"])
        assert "fault_cases.py" in found["traceback"]
