"""A tier that dies, stops or is cut off ends the others with an error that names it."""

from __future__ import annotations

import json
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


def run_scenarios(folder: Path, scenarios: list[dict[str, Any]]) -> list[dict[str, Any]]:
    asked, told = folder / "scenarios.json", folder / "reports.json"
    asked.write_text(json.dumps(scenarios))
    process = subprocess.run(
        [sys.executable, "-m", "tests.distributed.killed_cases", asked, told],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    reports: list[dict[str, Any]] = json.loads(told.read_text())
    return reports


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


def test_harm_to_a_local_process_ends_all(tmp_path: Path) -> None:
    for scenario, report in zip(LOCAL, run_scenarios(tmp_path, LOCAL), strict=True):
        harm, code = scenario["harm"], report[scenario["victim"]]["exit"]
        # A stopped one hears, when it goes on, that it has been given up.
        assert code == {"SIGKILL": -9, "SIGSTOP": 1, "SIGINT": 1, "SIGTERM": 0}[harm], scenario
        limit = 2 * SILENCE_SECONDS if harm == "SIGSTOP" else 2.0
        check(scenario, report, noticed_seconds=limit)


def test_harm_to_one_of_three_hosts_ends_all(three_hosts: Namespaces, tmp_path: Path) -> None:
    topology = Topology(
        tiers=(
            Tier(name="device"),
            Tier(name="edge", address=f"{three_hosts.address('edge', seen_from='device')}:5700"),
            Tier(name="cloud", address=f"{three_hosts.address('cloud', seen_from='edge')}:5700"),
        ),
        links=(Link(between=("device", "edge")), Link(between=("edge", "cloud"))),
    )
    make_keys(topology, tmp_path).to_json(tmp_path / "topology.json")
    where = {"topology": str(tmp_path / "topology.json"), "namespaces": three_hosts.names}
    reports = run_scenarios(tmp_path, [{**scenario, **where} for scenario in HOSTS])
    for scenario, report in zip(HOSTS, reports, strict=True):
        check(scenario, report, noticed_seconds=2 * SILENCE_SECONDS)


# Processes that Lightning's launcher has started


class Run(NamedTuple):
    """A script that is training."""

    process: subprocess.Popen[bytes]
    pids: dict[str, int]
    output: Path


@contextmanager
def training(folder: Path) -> Iterator[Run]:
    output = folder / "output.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "tests/distributed/train_small.py", str(folder)],
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


@pytest.mark.parametrize(("harm", "code"), [(signal.SIGINT, 1), (signal.SIGTERM, 0)])
def test_the_children_end_with_rank_0(tmp_path: Path, harm: signal.Signals, code: int) -> None:
    with training(tmp_path) as run:
        os.kill(run.process.pid, harm)
        assert run.process.wait(40) == code
        deadline = time.monotonic() + 20
        while inhabitants(run.process.pid):
            assert time.monotonic() < deadline, run.output.read_text()
            time.sleep(0.05)


def test_a_child_that_fails_at_the_start_is_not_waited_for(tmp_path: Path) -> None:
    argv = [sys.executable, "tests/distributed/train_small.py", str(tmp_path), "1"]
    (end,) = run_processes([Command(argv=argv)], timeout_seconds=90)
    assert end.returncode == 1
    assert "this tier's machine is not set up" in end.output
    error = (tmp_path / "device.error").read_text()
    assert "lost tier 'edge'" in error
    assert "its process has ended with exit code 1" in error
