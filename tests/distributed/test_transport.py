"""The transport between three real processes, on one host and on three."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lightning_hiertrain.topology import Link, Tier, Topology
from lightning_hiertrain.transport import make_keys
from tests.distributed.launch import Case, observe_cases, run_cases
from tests.distributed.transport_cases import TIERS
from tests.unit.transport.helpers import make_topology

CASES = "tests.distributed.transport_cases"


@pytest.fixture
def chain(tmp_path) -> str:
    """A folder with keys and a topology in which device and cloud have no link."""
    make_topology(tmp_path).to_json(tmp_path / "topology.json")
    return str(tmp_path)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What one set of three processes returned for every case that ends well."""
    folder = tmp_path_factory.mktemp("chain")
    make_topology(folder).to_json(folder / "topology.json")
    abort = {"victim": "cloud", "how": "abort"}
    cases = {
        "exchange": Case(target=f"{CASES}:exchange"),
        "exchange through the edge": Case(
            target=f"{CASES}:exchange", kwargs={"folder": str(folder)}
        ),
        "overtake": Case(target=f"{CASES}:overtake"),
        "overtake through the edge": Case(
            target=f"{CASES}:overtake", kwargs={"folder": str(folder)}
        ),
        "abort": Case(target=f"{CASES}:lose", kwargs=abort),
        "abort through the edge": Case(
            target=f"{CASES}:lose", kwargs={**abort, "folder": str(folder)}
        ),
        "speed": Case(target=f"{CASES}:speed"),
        "measure": Case(target=f"{CASES}:measure", kwargs={"seconds": 0.5}),
        "hold the lock": Case(target=f"{CASES}:hold_the_gil", kwargs={"seconds": 4.0}),
    }
    return dict(zip(cases, run_cases(cases.values(), timeout_seconds=120), strict=True))


@pytest.mark.parametrize("case", ["exchange", "exchange through the edge"])
def test_all_tiers_exchange_tensors_and_agree(results, case):
    for tier, result in zip(TIERS, results[case], strict=True):
        assert result["intact"]
        assert result["broadcast"] == "from edge"
        assert result["gather"] == ([0, 1, 2] if tier == "cloud" else None)
        assert result["all_gather"] == [0, 1, 2]
        assert (result["any"], result["all"]) == ([True, False], [False, True])


def test_a_relay_carries_what_device_and_cloud_exchange(results):
    direct, routed = (results[case][1] for case in ("exchange", "exchange through the edge"))

    assert direct["stats"]["device"]["bytes_relayed"] == 0
    assert routed["stats"]["device"]["bytes_relayed"] >= 50_000_000
    assert routed["stats"]["cloud"]["bytes_relayed"] >= 50_000_000


@pytest.mark.parametrize("case", ["overtake", "overtake through the edge"])
def test_a_control_message_overtakes_tensors(results, case):
    assert results[case][2] == {"overtook": True, "intact": True}


def test_loopback_is_fast_enough_to_show_that_nothing_waits(results, capsys):
    speed = results["speed"][0]
    with capsys.disabled():
        print(
            f"\nloopback with keys: {speed['bytes_per_second'] / 1e6:.0f} MB/s for 4 MB messages, "
            f"{speed['round_trip_seconds'] * 1e6:.0f} us round trip for 1 KB"
        )

    assert speed["bytes_per_second"] > 50e6
    assert speed["round_trip_seconds"] < 0.02


def test_links_are_measured_the_same_on_all_tiers(results):
    first, *others = ([link[:3] for link in rank] for rank in results["measure"])

    assert [link[0] for link in first] == [
        ("device", "edge"), ("device", "cloud"), ("edge", "cloud")
    ]  # fmt: skip
    assert all(other == first for other in others)
    assert all(rate > 20e6 and 0 < latency < 0.02 for _, rate, latency in first)
    assert all(took < 6.0 for rank in results["measure"] for *_, took in rank)


def test_a_tier_whose_interpreter_is_busy_is_not_lost(results):
    assert results["hold the lock"] == [3, 3, 3]


def assert_named(outcome, tier: str, victim: str, limit: float) -> str:
    kind, text, seconds = outcome[victim]
    assert kind == "PeerLostError"
    assert f"tier {tier!r} lost tier {victim!r} during 'gradients' (timeout 10 s)" in text
    assert seconds < limit, text
    return text


@pytest.mark.parametrize("case", ["abort", "abort through the edge"])
def test_a_tier_that_ends_with_an_error_tells_it_to_all(results, case):
    for tier, outcome in zip(TIERS[:2], results[case], strict=False):
        text = assert_named(outcome, tier, "cloud", 1.5)
        assert "ValueError: a bad batch" in text
        assert "Traceback" in text


@pytest.mark.parametrize(
    ("victim", "how", "routed", "limit"),
    [
        ("edge", "kill", False, 3.0),
        ("edge", "kill", True, 3.0),
        ("cloud", "kill", True, 3.0),
        ("device", "exit", True, 3.0),
        ("cloud", "stop", True, 8.0),
    ],
)
def test_a_tier_that_ends_is_named_within_seconds(chain, victim, how, routed, limit):
    kwargs = {"victim": victim, "how": how, "folder": chain if routed else None}
    outcomes = observe_cases([Case(target=f"{CASES}:lose", kwargs=kwargs)], timeout_seconds=120)

    for tier, outcome in zip(TIERS, outcomes, strict=True):
        if tier != victim:
            assert outcome.results, outcome.error or outcome.exit.output
            assert_named(outcome.results[0], tier, victim, limit)


# Three hosts


@pytest.fixture
def hosts(three_hosts, tmp_path):
    """The three networks, and a folder with keys and their topology."""
    edge = three_hosts.address("edge", seen_from="device")
    cloud = three_hosts.address("cloud", seen_from="edge")
    topology = Topology(
        tiers=(
            Tier(name="device"),
            Tier(name="edge", address=f"{edge}:5555"),
            Tier(name="cloud", address=f"{cloud}:5555"),
        ),
        links=(Link(between=("device", "edge")), Link(between=("edge", "cloud"))),
    )
    make_keys(topology, tmp_path).to_json(tmp_path / "topology.json")
    return three_hosts, str(tmp_path)


def on_hosts(hosts, case: Case, timeout_seconds: float = 60):
    outcomes = observe_cases(
        [case],
        timeout_seconds=timeout_seconds,
        layout="nodes",
        stop_on_failure=True,
        wrap=lambda rank, argv: hosts.command(TIERS[rank], argv),
    )
    for outcome in outcomes:
        assert outcome.results, outcome.error or outcome.exit.output
    return [outcome.results[0] for outcome in outcomes]


def test_three_hosts_lose_and_double_nothing_while_a_link_is_down(hosts):
    networks, folder = hosts
    stop = threading.Event()

    def flap() -> None:
        while not stop.wait(3.0):
            networks.set_link("edge", "cloud", up=False)
            stop.wait(2.0)
            networks.set_link("edge", "cloud", up=True)

    flapping = threading.Thread(target=flap)
    flapping.start()
    try:
        case = Case(target=f"{CASES}:stream", kwargs={"folder": folder, "num_messages": 400})
        results = on_hosts(networks, case, 90)
    finally:
        stop.set()
        flapping.join()

    assert results[2] == list(range(400))


def test_measured_bandwidth_is_that_of_the_link(hosts):
    networks, folder = hosts
    networks.limit_rate("device", "edge", bytes_per_second=6.25e6)
    networks.limit_rate("edge", "cloud", bytes_per_second=0.625e6)
    case = Case(target=f"{CASES}:measure", kwargs={"folder": folder, "seconds": 1.5})
    results = on_hosts(networks, case)

    first, *others = ([link[:3] for link in rank] for rank in results)
    assert all(other == first for other in others)
    (_, fast, near, took), (_, slow, far, _) = results[0]
    assert fast == pytest.approx(6.25e6, rel=0.15)
    assert slow == pytest.approx(0.625e6, rel=0.15)
    assert 0 < near < 0.02
    assert 0 < far < 0.02
    assert took < 12.0


def test_a_host_that_is_killed_is_noticed_by_its_refusal(hosts):
    networks, folder = hosts
    kwargs = {"victim": "cloud", "how": "kill", "folder": folder, "silence": 9.0}
    kwargs["other_machines"] = True
    outcomes = observe_cases(
        [Case(target=f"{CASES}:lose", kwargs=kwargs)],
        timeout_seconds=120,
        layout="nodes",
        wrap=lambda rank, argv: networks.command(TIERS[rank], argv),
    )

    for outcome in outcomes[:2]:
        assert outcome.results, outcome.error or outcome.exit.output
        kind, text, seconds = outcome.results[0]["cloud"]
        assert (kind, seconds < 5.0) == ("PeerLostError", True), text


@pytest.mark.parametrize("last", ["n.close()", "pass"])
def test_local_processes_leave_nothing_behind(last):
    """The folder in which they met is gone with the last of them, also if they do not close."""
    script = (
        "import sys; from lightning_hiertrain.transport import Network\n"
        "n = Network.local(sys.argv[1], ['a', 'b'], run_id='leave-nothing')\n"
        f"n.start(); n.wait_for_peers(20.0); {last}"
    )
    root = Path(__file__).parents[2]
    running = [
        subprocess.Popen([sys.executable, "-c", script, name], cwd=root) for name in ("a", "b")
    ]
    try:
        assert [process.wait(120) for process in running] == [0, 0]
    finally:
        for process in running:
            process.kill()
    folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"hiertrain-{os.getuid()}"
    assert not (folder / "leave-nothing").exists()
