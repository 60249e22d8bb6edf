"""The `hiertrain` command, called as its entry point is."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from lightning_hiertrain.cli import main
from lightning_hiertrain.planning import POLICIES, plan
from lightning_hiertrain.profiles import Profile
from lightning_hiertrain.schedule import Schedule
from lightning_hiertrain.topology import Topology
from tests.unit.planning.instances import random_profile


@pytest.fixture
def profile(tmp_path: Path) -> str:
    path = tmp_path / "profile.json"
    random_profile(2, num_layers=4, mesh=0.0).to_json(path)
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Runs a command that must work; returns what it prints."""
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert (status, captured.err) == (0, "")
    return captured.out


def test_plan_prints_grid_phases_and_every_policy(
    profile: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "schedule.json"
    text = run(capsys, "plan", profile, "--batch_size", 64, "--out", out)
    schedule = Schedule.from_json(out)
    assert schedule == plan(Profile.from_json(profile), batch_size=64)
    assert schedule.grid() in text
    assert "backward" in text
    assert "lower bound of any schedule" in text
    for policy in POLICIES:
        assert f"\n{policy} " in text


def test_plan_takes_options(
    profile: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "schedule.json"
    options = ["--policy", "jointdnn", "--overlap", "false", "--bandwidth", "edge-cloud=10Mbit"]
    text = run(capsys, "plan", profile, *options, "--out", out)
    assert text.startswith("policy jointdnn for random, mini-batch of 128")
    assert Schedule.from_json(out).policy == "jointdnn"


def test_bandwidth_replaces_the_measured_one(
    profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = run(capsys, "plan", profile, "--bandwidth", "cloud-edge=10kbit", "--policy", "all-cloud")
    fast = run(capsys, "plan", profile, "--bandwidth", "edge-cloud=10Gbit", "--policy", "all-cloud")
    assert slow != fast


def test_plan_of_all_policies_shows_each_and_keeps_the_fastest(
    profile: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "schedule.json"
    text = run(capsys, "plan", profile, "--policy", "all", "--compression", "true", "--out", out)
    assert text.count("predicted step:") == len(POLICIES)
    assert Schedule.from_json(out).policy == "hiertrain"


def test_policies_that_privacy_forbids_say_so_in_the_table(
    profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = run(capsys, "plan", profile, "--keep_inputs_on_data_tier", "true", "--least_depth", 2)
    line = next(line for line in text.splitlines() if line.startswith("all-edge"))
    assert "sends raw samples away from the data tier" in line


def test_sweep_prints_a_line_for_each_bandwidth_and_draws(
    profile: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    figure = tmp_path / "figure.png"
    ends = ["--link", "edge-cloud", "--from", "1Mbit", "--to", "100Mbit"]
    text = run(capsys, "sweep", profile, *ends, "--points", 3, "--plot", figure)
    lines = [line.split("  ")[0] for line in text.splitlines() if "Mbit/s" in line]
    assert lines == ["1 Mbit/s", "10 Mbit/s", "100 Mbit/s"]
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_show_prints_each_kind_of_file(
    profile: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    schedule = plan(Profile.from_json(profile))
    schedule.to_json(tmp_path / "schedule.json")
    Topology.local(("device", "edge")).to_json(tmp_path / "topology.json")
    assert "profile of random: 4 layers" in run(capsys, "show", profile)
    assert schedule.grid() in run(capsys, "show", tmp_path / "schedule.json")
    assert "device-edge" in run(capsys, "show", tmp_path / "topology.json")


def test_keys_go_into_the_topology_and_into_private_files(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "topology.json"
    Topology.local(("device", "edge")).to_json(path)
    text = run(capsys, "keys", path, "--out", tmp_path / "keys")
    assert all(tier.public_key for tier in Topology.from_json(path).tiers)
    assert "device.key: copy it to the host of tier device alone" in text
    private = tmp_path / "keys" / "edge.key"
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    again = main(["keys", str(path), "--out", str(tmp_path / "keys")])
    assert (again, capsys.readouterr().err.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "/nowhere.json"], "No such file"),
        (["plan", "PROFILE", "--bandwidth", "edge-cloud=10"], "'10' is not a bandwidth"),
        (["plan", "PROFILE", "--bandwidth", "edge-cloud"], "write it as edge-cloud=10Mbit"),
        (["plan", "PROFILE", "--bandwidth", "edge-moon=1Mbit"], "there is no link 'edge-moon'"),
        (["plan", "PROFILE", "--batch_size", "many"], "batch_size"),
        (["plan", "PROFILE", "--batch_size", "1"], "has 1 samples and there are 3 tiers"),
        (["plan", "PROFILE", "--policy", "best"], "there is no policy 'best'"),
        (["plan", "PROFILE", "--topology", "PROFILE"], "this is not a topology"),
        (["plan", "PROFILE", "--out", "/nowhere/s.json"], "No such file"),
        (["plan", "BROKEN"], "is not a profile file"),
        (["plan", "OTHER"], "it lacks the field 'model'"),
        (["show", "BROKEN"], "is not a profile, schedule or topology file"),
        (["show", "OTHER"], "has none of the fields"),
        (["show"], "file"),
        (["dance"], "invalid choice: 'dance'"),
        ([], "subcommand"),
        (["keys", "OTHER"], "this is not a topology"),
        (
            ["sweep", "PROFILE", "--link", "edge-cloud", "--from", "1", "--to", "9Mbit"],
            "'1' is not a bandwidth",
        ),
        (
            ["sweep", "PROFILE", "--link=a-b", "--from=1Mbit", "--to=9Mbit"],
            "there is no link 'a-b'",
        ),
        (
            ["sweep", "PROFILE", "--link=edge-cloud", "--from=1Mbit", "--to=9Mbit", "--points=1"],
            "needs at least 2",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line_with_status_2(
    arguments: list[str],
    message: str,
    profile: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "other.json").write_text('{"format": 1}')
    files = {
        "PROFILE": profile,
        "BROKEN": str(tmp_path / "broken.json"),
        "OTHER": str(tmp_path / "other.json"),
    }
    status = main([files.get(argument, argument) for argument in arguments])
    captured = capsys.readouterr()
    assert status == 2
    assert captured.err.startswith("hiertrain: error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err
