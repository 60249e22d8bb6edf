"""A tier that dies, stops or is cut off ends the others with an error that names it.

If it is needed, or if the user says so; else the others go on. `test_tier_loss.py` has what they
then compute.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lightning_hiertrain import Link, Tier, Topology
from lightning_hiertrain.transport import make_keys
from tests.distributed.forked import run_scenarios
from tests.distributed.killed_cases import SILENCE_SECONDS, TIERS
from tests.distributed.launch import ROOT, Command, run_processes
from tests.distributed.namespaces import Namespaces

ENDING_SECONDS = 8.0
"""For the processes to end on a busy machine, once the error is raised."""
KILLED = [
    {"victim": victim, "owner": owner, "harm": "SIGKILL"}
    for victim in TIERS
    for owner in (victim, "edge" if victim != "edge" else "cloud")
]
LOCAL = [
    *KILLED,
    {"victim": "cloud", "owner": "edge", "harm": "SIGSTOP"},
    {"victim": "device", "owner": "edge", "harm": "SIGINT"},
    {"victim": "device", "owner": "edge", "harm": "SIGTERM"},
    {"victim": "cloud", "owner": "cloud", "harm": "SIGTERM"},
]
HOSTS = [
    *KILLED,
    {"victim": "device", "owner": "edge", "harm": "SIGSTOP"},
    {"victim": "cloud", "owner": "edge", "harm": "blackhole"},
]
GO_ON = [
    {"victim": "cloud", "owner": "edge", "harm": harm, "on_tier_lost": "continue"}
    for harm in ("SIGKILL", "SIGSTOP", "blackhole")
]


def harmed(scenarios: list[dict[str, Any]]) -> list[dict[str, Any]]:
    named = [("run_scenario", scenario) for scenario in scenarios]
    return run_scenarios("tests.distributed.killed_cases", named, timeout_seconds=200)


def check(scenario: dict[str, Any], report: dict[str, Any], *, noticed_seconds: float) -> None:
    victim = scenario["victim"]
    for tier in TIERS:
        found = report[tier]
        assert found["ended_seconds"] is not None, (scenario, tier, found["output"])
        if tier != victim:
            assert found["exit"] == 1, (scenario, tier, found["output"])
            assert f"PeerLostError: tier '{tier}' lost tier '{victim}'" in found["output"]
            assert found["noticed_seconds"] < noticed_seconds, (scenario, tier)
            assert found["ended_seconds"] < found["noticed_seconds"] + ENDING_SECONDS


def test_harm_to_a_local_process_ends_all() -> None:
    for scenario, report in zip(LOCAL, harmed(LOCAL), strict=True):
        harm, code = scenario["harm"], report[scenario["victim"]]["exit"]
        # A stopped one hears, when it goes on, that it has been given up.
        assert code == {"SIGKILL": -9, "SIGSTOP": 1, "SIGINT": 1, "SIGTERM": 0}[harm], scenario
        limit = 2 * SILENCE_SECONDS if harm == "SIGSTOP" else 2.0
        check(scenario, report, noticed_seconds=limit)


def run_on_hosts(
    hosts: Namespaces, folder: Path, scenarios: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    topology = Topology(
        tiers=(
            Tier(name="device"),
            Tier(name="edge", address=f"{hosts.address('edge', seen_from='device')}:5700"),
            Tier(name="cloud", address=f"{hosts.address('cloud', seen_from='edge')}:5700"),
        ),
        links=(Link(between=("device", "edge")), Link(between=("edge", "cloud"))),
    )
    make_keys(topology, folder).to_json(folder / "topology.json")
    where = {"topology": str(folder / "topology.json"), "namespaces": hosts.names}
    return harmed([{**scenario, **where} for scenario in scenarios])


def test_harm_to_one_of_three_hosts_ends_all(three_hosts: Namespaces, tmp_path: Path) -> None:
    for scenario, report in zip(HOSTS, run_on_hosts(three_hosts, tmp_path, HOSTS), strict=True):
        check(scenario, report, noticed_seconds=2 * SILENCE_SECONDS)


def test_two_of_three_hosts_go_on_without_the_third(
    three_hosts: Namespaces, tmp_path: Path
) -> None:
    for scenario, report in zip(GO_ON, run_on_hosts(three_hosts, tmp_path, GO_ON), strict=True):
        limit = 3.0 if scenario["harm"] == "SIGKILL" else 2 * SILENCE_SECONDS
        for tier in ("device", "edge"):
            assert report[tier]["exit"] == 0, (scenario, tier, report[tier]["output"])
            assert "tier 'cloud' is lost" in report[tier]["output"]
            assert report[tier]["went_on_seconds"] < limit + 1.0, (scenario, tier)
        killed = scenario["harm"] == "SIGKILL"
        assert report["cloud"]["exit"] == (-9 if killed else 1), report["cloud"]["output"]
        if not killed:
            assert "PeerLostError: tier 'cloud' lost tier" in report["cloud"]["output"]


# Processes that Lightning's launcher has started


class Run(NamedTuple):
    """A script that is training."""

    process: subprocess.Popen[bytes]
    pids: dict[str, int]
    output: Path


@contextmanager
def training(folder: Path, *arguments: str) -> Iterator[Run]:
    output = folder / "output.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "tests/distributed/train_small.py", str(folder), *arguments],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 90
        while not all((folder / f"{tier}.pid").exists() for tier in TIERS):
            assert process.poll() is None, output.read_text()
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.05)
        yield Run(
            process, {tier: int((folder / f"{tier}.pid").read_text()) for tier in TIERS}, output
        )
    finally:
        for pid in inhabitants(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()


def inhabitants(session: int) -> list[int]:
    """Returns the processes of a session that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] not in "ZX":
            found.append(int(path.parent.name))
    return found


def wait_for_the_others(run: Run) -> None:
    """Waits for the processes that end by themselves, at the same time as rank 0."""
    deadline = time.monotonic() + 20
    while inhabitants(run.process.pid):
        assert time.monotonic() < deadline, run.output.read_text()
        time.sleep(0.05)


@pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGSTOP])
def test_rank_0_tells_which_child_was_lost_and_leaves_none_behind(
    tmp_path: Path, harm: signal.Signals
) -> None:
    # Lightning's observer ended rank 0 by SIGKILL before it could raise its own error.
    with training(tmp_path) as run:
        os.kill(run.pids["cloud"], harm)
        assert run.process.wait(40) == 1
        assert "tier 'device' lost tier 'cloud'" in (tmp_path / "device.error").read_text()
        assert "Traceback (most recent call last)" in run.output.read_text()
        assert inhabitants(run.process.pid) == []


def test_rank_0_goes_on_without_a_child_that_was_killed(tmp_path: Path) -> None:
    with training(tmp_path, "continue") as run:
        os.kill(run.pids["cloud"], signal.SIGKILL)
        assert run.process.wait(40) == 0, run.output.read_text()
        assert "tier 'cloud' is lost" in run.output.read_text()
        wait_for_the_others(run)


@pytest.mark.parametrize(("harm", "code"), [(signal.SIGINT, 1), (signal.SIGTERM, 0)])
def test_the_children_end_with_rank_0(tmp_path: Path, harm: signal.Signals, code: int) -> None:
    with training(tmp_path) as run:
        os.kill(run.process.pid, harm)
        assert run.process.wait(40) == code
        wait_for_the_others(run)


def test_a_child_that_fails_at_the_start_is_not_waited_for(tmp_path: Path) -> None:
    argv = [sys.executable, "tests/distributed/train_small.py", str(tmp_path), "1"]
    (end,) = run_processes([Command(argv=argv)], timeout_seconds=90)
    assert end.returncode == 1
    assert "this tier's machine is not set up" in end.output
    error = (tmp_path / "device.error").read_text()
    assert "lost tier 'edge'" in error
    assert "its process has ended with exit code 1" in error
