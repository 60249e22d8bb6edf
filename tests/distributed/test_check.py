"""`hiertrain check` says before a run what would keep it from working, and how to mend it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_hiertrain import Topology
from lightning_hiertrain.cli import main
from tests.distributed.forked import run_scenarios
from tests.unit.transport.helpers import make_topology

WAIT_SECONDS = 2.5


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each host says, by scenario; all are forks of one process."""
    folder = tmp_path_factory.mktemp("check")
    topology = make_topology(folder)
    topology.to_json(folder / "topology.json")
    (folder / "others").mkdir()
    make_topology(folder / "others")
    (folder / "others" / "edge.key").rename(folder / "other-edge.key")
    (folder / "stale").mkdir()
    stale = make_topology(folder / "stale")
    edge = replace(topology.tier("edge"), public_key=stale.tier("edge").public_key)
    replace(topology, tiers=(topology.tiers[0], edge, topology.tiers[2])).to_json(
        folder / "stale" / "topology.json"
    )
    for name in ("device", "cloud"):
        (folder / "stale" / f"{name}.key").write_text((folder / f"{name}.key").read_text())
    waiting = {"timeout_seconds": WAIT_SECONDS}
    scenarios: dict[str, dict[str, Any]] = {
        "sound": {},
        "missing": {"hosts": ["device", "edge"], **waiting},
        "version": {"faults": {"cloud": "version"}},
        "clock": {"faults": {"edge": "clock"}},
        "another's key": {"faults": {"edge": "other-edge"}, **waiting},
    }
    told = run_scenarios(
        "tests.distributed.check_cases",
        [("check", {"folder": str(folder), **scenario}) for scenario in scenarios.values()],
        timeout_seconds=150,
    )
    return dict(zip(scenarios, told, strict=True))


def test_sound_hosts_are_ready_and_hear_what_their_links_carry(reports: Any) -> None:
    for tier, report in reports["sound"].items():
        assert report["status"] == 0, report["output"]
        assert f"tier {tier} is ready" in report["output"]
        assert "FIX" not in report["output"]
        for link in ("device-edge", "edge-cloud"):
            assert re.search(rf"ok   link {link} +[\d.]+ .?bit/s, latency", report["output"])
        assert len(re.findall(r"ok   clock of \w+ ", report["output"])) == 2
        assert len(re.findall(r"ok   versions on \w+ .*torch \d", report["output"])) == 2


def test_a_missing_host_is_named_with_what_was_found_at_its_address(reports: Any) -> None:
    device, edge = reports["missing"]["device"], reports["missing"]["edge"]
    for report in (device, edge):
        assert report["status"] == 1, report["output"]
        assert report["seconds"] < 3 * WAIT_SECONDS
        assert "FIX  tier cloud" in report["output"]
    assert "- tier cloud: nothing listens at 127.0.0.1:" in edge["output"]
    assert (
        "- tier cloud: tier edge relays to it: see what `hiertrain check` says there"
        in device["output"]
    )
    assert re.search(r"ok   tier edge +reached, and its key fits", device["output"])


def test_other_versions_are_named_on_every_host(reports: Any) -> None:
    for tier, report in reports["version"].items():
        assert report["status"] == 1, report["output"]
        other = "device" if tier == "cloud" else "cloud"
        assert re.search(rf"FIX  torch on {other} +version \S+, here", report["output"])
        assert "install the same version of torch on all tiers" in report["output"]
        assert report["seconds"] < 15


def test_a_clock_that_is_off_is_told_on_every_host(reports: Any) -> None:
    for report in reports["clock"].values():
        assert report["status"] == 1, report["output"]
        assert re.search(r"FIX  clock of edge +90 s ahead of that of device", report["output"])
        assert re.search(r"ok   clock of cloud", report["output"])


def test_another_s_key_is_refused_at_once_and_missed_elsewhere(reports: Any) -> None:
    device, edge = reports["another's key"]["device"], reports["another's key"]["edge"]
    assert edge["status"] == device["status"] == 1
    assert "does not match its public key in the topology" in edge["output"]
    assert "nothing listens at 127.0.0.1" in device["output"]


# In this process alone


def test_the_tier_is_the_one_whose_key_lies_beside_the_topology(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_topology(tmp_path).to_json(tmp_path / "topology.json")
    check = ["check", str(tmp_path / "topology.json"), "--timeout_seconds", "0.1"]
    assert main(check) == 2
    assert "say which tier this host is with `--tier`" in capsys.readouterr().err
    (tmp_path / "cloud.key").unlink()
    (tmp_path / "device.key").unlink()
    assert main(check) == 1
    assert "to fix on or for tier edge:" in capsys.readouterr().out


def test_a_key_that_others_may_read_is_to_be_fixed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_topology(tmp_path).to_json(tmp_path / "topology.json")
    (tmp_path / "edge.key").chmod(0o644)
    assert main(["check", str(tmp_path / "topology.json"), "--tier", "edge"]) == 1
    assert re.search(r"FIX  keys.*\n.*\n.*\n.*chmod 600", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("address", "remedy"),
    [
        ("no-such-host.invalid:5700", "the name 'no-such-host.invalid' is unknown here"),
        ("192.0.2.9:5700", "192.0.2.9:5700 does not answer"),
    ],
)
def test_an_address_that_cannot_be_reached_says_what_to_correct(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], address: str, remedy: str
) -> None:
    topology = make_topology(tmp_path, (("device", "edge"),))
    tiers = (topology.tiers[0], replace(topology.tiers[1], address=address))
    Topology(tiers=tiers, links=topology.links).to_json(tmp_path / "topology.json")
    options = ["--tier", "device", "--timeout_seconds", "0.1"]
    assert main(["check", str(tmp_path / "topology.json"), *options]) == 1
    assert remedy in capsys.readouterr().out
