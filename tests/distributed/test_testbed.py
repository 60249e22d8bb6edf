"""The testbed itself, with few steps of a small model; needs root."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.testbed import set_rate
from benchmarks.testbed.config import parse_config, read_config
from benchmarks.testbed.network import namespaces_with
from benchmarks.testbed.quota import find_controllers, groups_with
from benchmarks.testbed.testbed import PREFIX, ROOT, MissingError, Testbed

LAYERS = 12


def left_by(pid: int) -> list[str]:
    name = f"{PREFIX}{pid}"
    return namespaces_with(name) + [str(path) for path in groups_with(find_controllers(), name)]


@pytest.fixture(scope="module", autouse=True)
def _possible():
    try:
        with Testbed(read_config()):
            pass
    except (MissingError, OSError) as error:
        pytest.skip(f"no testbed can be made here: {error}")
    assert left_by(os.getpid()) == []


def schedule(owner, **shares):
    return {
        "format": 1,
        "owner": owner,
        "shares": {
            tier: {"num_layers": layers, "num_samples": samples}
            for tier, (layers, samples) in shares.items()
        },
    }


@pytest.mark.timeout(200)
def test_lenet_trains_under_two_schedules_and_two_link_rates(tmp_path):
    cases = [
        {"name": "first", "schedule": schedule("device", device=(LAYERS, 128))},
        {
            "name": "second",
            "rates_mbit": {"edge-cloud": 20},
            "schedule": schedule("edge", device=(3, 16), edge=(LAYERS, 48), cloud=(6, 64)),
        },
    ]
    (tmp_path / "cases.json").write_text(json.dumps({"cases": cases}))
    argv = [sys.executable, "-m", "benchmarks.workloads.hiertrain", "--steps", "3"]
    argv += ["--cases", str(tmp_path / "cases.json")]
    said = []
    with Testbed(read_config(), say=said.append) as bed:
        ended = bed.run(argv, tmp_path / "out", timeout_seconds=180)
        rates = dict(bed.network.rates)

    log = (tmp_path / "out" / "device.log").read_text()
    assert [end.returncode for end in ended.values()] == [0, 0, 0], "\n".join(said)
    assert all(end.joined_quota for end in ended.values())
    assert rates == {"device-edge": 50e6 / 8, "edge-cloud": 20e6 / 8}
    written = json.loads((tmp_path / "out" / "device" / "hiertrain.json").read_text())
    assert [(result["name"], result["num_steps"]) for result in written["results"]] == [
        ("first", 3),
        ("second", 3),
    ]
    assert all(result["median_seconds"] > 0 for result in written["results"])
    assert "second" in log
    assert left_by(os.getpid()) == []


@pytest.mark.timeout(100)
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_everything_is_removed_when_a_signal_ends_it(tmp_path, number, status):
    argv = [sys.executable, "-m", "benchmarks.testbed", "run", "--no-calibration"]
    argv += ["--output", str(tmp_path), "--", "sh", "-c", "echo started; exec sleep 1000"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        lines = [process.stdout.readline() for _ in range(3)]
        assert sorted(lines) == [f"[{tier}] started\n" for tier in ("cloud", "device", "edge")]
        assert len(left_by(process.pid)) >= 4
        process.send_signal(number)
        process.send_signal(number)

        assert process.wait(timeout=60) == status
    assert left_by(process.pid) == []


@pytest.mark.timeout(100)
def test_a_killed_testbed_is_removed_by_the_next(tmp_path):
    argv = [sys.executable, "-m", "benchmarks.testbed", "run", "--no-calibration"]
    argv += ["--output", str(tmp_path), "--", "sh", "-c", "echo started; exec sleep 1000"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert all("started" in process.stdout.readline() for _ in range(3))
        process.kill()
        process.wait(timeout=60)
        assert len(left_by(process.pid)) >= 4
        with Testbed(read_config()):
            assert left_by(process.pid) == []
    assert left_by(os.getpid()) == []


@pytest.mark.timeout(100)
def test_when_one_host_fails_the_others_are_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.testbed.testbed.GRACE_SECONDS", 0.2)
    script = '[ "$HIERTRAIN_TIER" = edge ] && exit 3; exec sleep 1000'
    with Testbed(read_config()) as bed:
        ended = bed.run(["sh", "-c", script], tmp_path, timeout_seconds=60)

    assert {tier: end.returncode for tier, end in ended.items()} == {
        "device": None,
        "edge": 3,
        "cloud": None,
    }
    assert not any(end.joined_quota for end in ended.values())


SENDER = """
import os, pathlib, socket, sys
folder = pathlib.Path(sys.argv[1])
if os.environ["HIERTRAIN_TIER"] == "high":
    with socket.create_server(("0.0.0.0", 5800)) as server:
        (folder / "listens").touch()
        connection, _ = server.accept()
        size = 0
        while data := connection.recv(1 << 16):
            size += len(data)
            if size > 2 << 20 and not (folder / "flows").exists():
                (folder / "flows").touch()
        (folder / "size").write_text(str(size))
else:
    while not (folder / "listens").exists():
        pass
    with socket.create_connection(("high", 5800)) as connection:
        connection.sendall(bytes(12 << 20))
"""


@pytest.mark.timeout(100)
def test_a_link_made_slower_in_mid_transfer_still_carries(tmp_path):
    data = {
        "tiers": [{"name": "low", "cores": 0.4}, {"name": "high", "cores": 0.4}],
        "links": [{"between": ["low", "high"], "bandwidth_mbit": 100}],
    }
    with Testbed(parse_config(data)) as bed, ThreadPoolExecutor(1) as pool:
        argv = [sys.executable, "-c", SENDER, str(tmp_path)]
        run = pool.submit(bed.run, argv, tmp_path / "out", timeout_seconds=60)
        while not (tmp_path / "flows").exists():
            assert not run.done(), run.result()
        # Packets as large as the faster link's bucket wait in its queue.
        set_rate("low-high", 40, control=str(bed.folder / "control"))
        assert {tier: end.returncode for tier, end in run.result().items()} == {"low": 0, "high": 0}
    assert int((tmp_path / "size").read_text()) == 12 << 20


@pytest.mark.timeout(120)
def test_links_carry_what_was_asked_for_and_what_is_asked_for_later():
    data = {
        "tiers": [{"name": "low", "cores": 0.2}, {"name": "high", "cores": 0.2}],
        "links": [{"between": ["low", "high"], "bandwidth_mbit": 4, "latency_ms": 15}],
    }
    with Testbed(parse_config(data)) as bed:
        before = bed.calibrate().links["low-high"]
        set_rate("low-high", 16, control=str(bed.folder / "control"))
        after = bed.calibrate().links["low-high"]
        with pytest.raises(RuntimeError, match="no link 'low-moon'"):
            set_rate("low-moon", 1, control=str(bed.folder / "control"))

    assert 0.03 <= before.round_trip_seconds < 0.06
    for measured, mbit in ((before, 4), (after, 16)):
        assert measured.nominal_bytes_per_second == mbit * 1e6 / 8
        for rate in (measured.up_bytes_per_second, measured.down_bytes_per_second):
            assert 0.75 * mbit < 8e-6 * rate < 1.05 * mbit
