"""The three networks that the test with three hosts stands on."""

import subprocess
import sys

import pytest

from tests.distributed.launch import Case, observe_cases
from tests.distributed.namespaces import ETC, TIERS, namespaces

LISTEN = (
    "import socket; s = socket.create_server(('{address}', 7777)); "
    "print('ready', flush=True); s.accept()[0].sendall(b'hello')"
)
DIAL = (
    "import socket, sys; s = socket.create_connection(('{address}', 7777), 5); "
    "sys.stdout.write(s.recv(5).decode())"
)


def _talk(net, source: str, target: str, address: str) -> subprocess.CompletedProcess[str]:
    listen = net.command(target, [sys.executable, "-c", LISTEN.format(address=address)])
    server = subprocess.Popen(listen, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout.readline() == "ready\n"
        return net.run(source, [sys.executable, "-c", DIAL.format(address=address)])
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize(("source", "target"), [("device", "edge"), ("edge", "cloud")])
def test_neighbours_reach_each_other_both_ways(three_hosts, source, target):
    upwards = _talk(three_hosts, source, target, three_hosts.address(target, seen_from=source))
    downwards = _talk(three_hosts, target, source, three_hosts.address(source, seen_from=target))

    assert (upwards.stdout, downwards.stdout) == ("hello", "hello"), upwards.stderr


def test_device_does_not_reach_the_cloud(three_hosts):
    reached = _talk(three_hosts, "device", "cloud", three_hosts.address("cloud", seen_from="edge"))

    assert reached.returncode != 0
    assert "Network is unreachable" in reached.stderr


def test_names_are_known_without_a_name_server(three_hosts):
    script = "import socket; print(socket.gethostbyname('edge'), socket.getfqdn() != '')"

    done = three_hosts.run("device", [sys.executable, "-c", script], timeout_seconds=5)

    assert done.stdout.split() == [three_hosts.address("edge", seen_from="device"), "True"]


def test_a_link_that_is_down_carries_nothing_until_it_is_up(three_hosts):
    address = three_hosts.address("edge", seen_from="device")
    three_hosts.set_link("device", "edge", up=False)
    reached = _talk(three_hosts, "device", "edge", address)
    assert "Network is unreachable" in reached.stderr

    three_hosts.set_link("device", "edge", up=True)
    assert _talk(three_hosts, "device", "edge", address).stdout == "hello"


def test_a_limited_link_carries_no_more(three_hosts):
    three_hosts.limit_rate("device", "edge", bytes_per_second=1e6)
    address = three_hosts.address("edge", seen_from="device")
    receive = (
        f"import socket, time; s = socket.create_server(('{address}', 7777)); "
        "print('ready', flush=True); c = s.accept()[0]; t = time.perf_counter(); n = 0\n"
        "while d := c.recv(65536): n += len(d)\n"
        "print(n / (time.perf_counter() - t))"
    )
    send = (
        f"import socket; s = socket.create_connection(('{address}', 7777), 5); "
        "s.sendall(bytes(1_000_000))"
    )
    server = subprocess.Popen(
        three_hosts.command("edge", [sys.executable, "-c", receive]),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout.readline() == "ready\n"
        assert three_hosts.run("device", [sys.executable, "-c", send]).returncode == 0
        rate = float(server.communicate(timeout=20)[0])
    finally:
        server.kill()
        server.wait()

    assert 0.5e6 < rate < 1.1e6


def test_each_rank_can_run_in_a_network_of_its_own(three_hosts):
    outcomes = observe_cases(
        [Case(target="tests.distributed.launch_cases:interfaces")],
        layout="nodes",
        wrap=lambda rank, argv: three_hosts.command(TIERS[rank], argv),
        timeout_seconds=60,
    )

    assert [outcome.results for outcome in outcomes] == [
        [["lo", "to-edge"]],
        [["lo", "to-cloud", "to-device"]],
        [["lo", "to-edge"]],
    ]


def test_everything_is_removed_after_a_failure(namespaces_reason):
    if namespaces_reason is not None:
        pytest.skip(namespaces_reason)

    def fail() -> None:
        with namespaces() as made:
            kept.append(made)
            sleep = made.command("edge", ["sh", "-c", "echo ready; exec sleep 1000"])
            kept.append(subprocess.Popen(sleep, stdout=subprocess.PIPE, text=True))
            assert kept[1].stdout.readline() == "ready\n"
            raise RuntimeError("on purpose")

    kept: list = []
    with pytest.raises(RuntimeError, match="on purpose"):
        fail()

    made, sleeper = kept
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert not any(name in left.stdout for name in made.names.values())
    assert not any((ETC / name).exists() for name in made.names.values())
    assert sleeper.wait(timeout=10) == -9
