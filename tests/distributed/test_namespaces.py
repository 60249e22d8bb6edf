"""The three networks that the test with three hosts stands on."""

import subprocess
import sys

import pytest

from tests.distributed.namespaces import ETC, namespaces, namespaces_available

REASON = namespaces_available()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

LISTEN = (
    "import socket; s = socket.create_server(('{address}', 7777)); "
    "print('ready', flush=True); s.accept()[0].sendall(b'hello')"
)
DIAL = (
    "import socket, sys; s = socket.create_connection(('{address}', 7777), 5); "
    "sys.stdout.write(s.recv(5).decode())"
)


@pytest.fixture
def net():
    with namespaces() as made:
        yield made


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
def test_neighbours_reach_each_other_both_ways(net, source, target):
    upwards = _talk(net, source, target, net.address(target, seen_from=source))
    downwards = _talk(net, target, source, net.address(source, seen_from=target))

    assert (upwards.stdout, downwards.stdout) == ("hello", "hello"), upwards.stderr


def test_device_does_not_reach_the_cloud(net):
    reached = _talk(net, "device", "cloud", net.address("cloud", seen_from="edge"))

    assert reached.returncode != 0
    assert "Network is unreachable" in reached.stderr


def test_names_are_known_without_a_name_server(net):
    script = "import socket; print(socket.gethostbyname('edge'), socket.getfqdn() != '')"

    done = net.run("device", [sys.executable, "-c", script], timeout_seconds=5)

    assert done.stdout.split() == [net.address("edge", seen_from="device"), "True"]


def test_a_link_that_is_down_carries_nothing_until_it_is_up(net):
    address = net.address("edge", seen_from="device")
    net.set_link("device", "edge", up=False)
    reached = _talk(net, "device", "edge", address)
    assert "Network is unreachable" in reached.stderr

    net.set_link("device", "edge", up=True)
    assert _talk(net, "device", "edge", address).stdout == "hello"


def test_a_limited_link_carries_no_more(net):
    net.limit_rate("device", "edge", bytes_per_second=1e6)
    address = net.address("edge", seen_from="device")
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
        net.command("edge", [sys.executable, "-c", receive]), stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout.readline() == "ready\n"
        assert net.run("device", [sys.executable, "-c", send]).returncode == 0
        rate = float(server.communicate(timeout=20)[0])
    finally:
        server.kill()
        server.wait()

    assert 0.5e6 < rate < 1.1e6


def test_everything_is_removed_after_a_failure():
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
