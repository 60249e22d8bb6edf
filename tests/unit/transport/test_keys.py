"""Keys, addresses and the meeting of local processes."""

import dataclasses
import errno
import os
import stat
import subprocess
import sys

import pytest
import zmq

from lightning_hiertrain.topology import Link, Tier, Topology
from lightning_hiertrain.transport import make_keys, read_private_key
from lightning_hiertrain.transport.addresses import check_secure, is_loopback, listen_addresses
from lightning_hiertrain.transport.rendezvous import Card, ProcessIdentity, Rendezvous

TWO = Topology(
    tiers=(Tier(name="device"), Tier(name="edge", address="192.0.2.1:5555")),
    links=(Link(between=("device", "edge")),),
)


def test_keys_are_pairs_and_private_ones_stay_in_private_files(tmp_path):
    topology = make_keys(TWO, tmp_path / "keys")

    for tier in topology.tiers:
        path = tmp_path / "keys" / f"{tier.name}.key"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        private = read_private_key(path)
        assert zmq.curve_public(private.encode()).decode() == tier.public_key
        topology.to_json(tmp_path / "topology.json")
        assert private not in (tmp_path / "topology.json").read_text()


def test_existing_keys_are_not_overwritten(tmp_path):
    (tmp_path / "edge.key").write_text("precious")
    with pytest.raises(ValueError, match=r"edge.key exists already; remove it"):
        make_keys(TWO, tmp_path)

    assert (tmp_path / "edge.key").read_text() == "precious"
    assert not (tmp_path / "device.key").exists()


def test_a_key_that_others_may_read_is_refused(tmp_path):
    make_keys(TWO, tmp_path)
    path = tmp_path / "edge.key"
    path.chmod(0o640)
    with pytest.raises(ValueError, match=r"mode 0640.*chmod 600"):
        read_private_key(path)


@pytest.mark.parametrize("text", ["", "short", "x" * 41, "é" * 20, '"' * 40, "\0" * 40])
def test_a_file_without_a_key_is_refused_and_not_shown(tmp_path, text):
    path = tmp_path / "edge.key"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ValueError, match=r"edge.key is not a CURVE key.*`hiertrain keys`"):
        read_private_key(path)


def test_a_missing_key_names_the_remedy(tmp_path):
    with pytest.raises(ValueError, match=r"cannot be read.*`hiertrain keys`"):
        read_private_key(tmp_path / "none.key")


def test_keys_of_all_neighbours_are_needed(tmp_path):
    topology = make_keys(TWO, tmp_path)
    lacking = dataclasses.replace(topology, tiers=(TWO.tiers[0], topology.tiers[1]))

    assert check_secure(topology, "edge", has_private_key=True)
    with pytest.raises(ValueError, match=r"lacks the public keys of \['device'\]"):
        check_secure(lacking, "edge", has_private_key=True)


@pytest.mark.parametrize(
    ("tier_address", "link_address", "expected"),
    [
        ("10.0.0.1:5555", None, [("10.0.0.1", 5555)]),
        (None, "10.0.0.1:5555", [("10.0.0.1", 5555)]),
        ("10.0.0.1:5555", "10.0.1.1:5555", [("10.0.0.1", 5555), ("10.0.1.1", 5555)]),
        ("10.0.0.1:5555", "127.0.0.1:7000", [("10.0.0.1", 5555)]),
    ],
    ids=["own", "of the link", "several networks", "behind a tunnel"],
)
def test_a_tier_listens_where_it_is_dialled(tier_address, link_address, expected):
    topology = Topology(
        tiers=(Tier(name="device"), Tier(name="edge", address=tier_address)),
        links=(Link(between=("device", "edge"), address=link_address),),
    )
    assert list(listen_addresses(topology, "edge")) == expected
    assert listen_addresses(topology, "device") == ()


def test_a_tier_that_is_dialled_needs_an_address():
    topology = Topology.local(["device", "edge"])
    with pytest.raises(ValueError, match="which has no address; give that tier"):
        listen_addresses(topology, "edge")


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("localhost.example.org", False),
    ],
)
def test_loopback_is_known(host, expected):
    assert is_loopback(host) is expected


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"hiertrain-{os.getuid()}" / "run"


def card(process: ProcessIdentity | None = None) -> Card:
    return Card(public_key="k" * 40, port=1, process=process or ProcessIdentity.current())


def test_cards_are_private_and_go_with_their_tiers(folder):
    device, edge = Rendezvous("run", "device"), Rendezvous("run", "edge")
    assert edge.read("device") is None
    device.publish(card())

    assert edge.read("device") == card()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "device.json").stat().st_mode) == 0o600
    device.leave()
    edge.leave()
    assert not folder.exists()


def test_cards_of_ended_processes_are_passed_over(folder):
    child = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    current = ProcessIdentity.current()
    gone = dataclasses.replace(current, pid=int(child.stdout))
    recycled = dataclasses.replace(current, start_time="1")
    place = Rendezvous("run", "device")
    for process in (gone, recycled):
        place.publish(card(process))
        assert process.has_ended()
        assert place.read("device") is None
    place.publish(card())
    assert place.read("device") == card()


def test_no_process_has_ended_because_this_one_cannot_look(monkeypatch):
    def fail(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    parent = ProcessIdentity.of(os.getppid())
    monkeypatch.setattr("pathlib.Path.read_text", fail)
    assert not parent.has_ended()


def test_what_ended_processes_left_is_removed(folder):
    current = ProcessIdentity.current()
    gone = dataclasses.replace(current, start_time="1")
    for run in ("old", "alive"):
        place = Rendezvous(run, "device")
        place.publish(card(gone if run == "old" else current))
        os.utime(place.directory, (1, 1))
    mine = Rendezvous("run", "edge")
    assert sorted(path.name for path in folder.parent.iterdir()) == ["alive", "run"]

    Rendezvous("run", "device").publish(card(gone))
    mine.publish(card())
    mine.leave()
    assert not folder.exists()


def test_a_second_process_of_a_tier_is_refused(folder):
    parent = ProcessIdentity.of(os.getppid())
    place, third = Rendezvous("run", "device"), Rendezvous("run", "edge")
    place.publish(card(parent))
    second = Rendezvous("run", "device")
    with pytest.raises(ValueError, match=f"claim to be tier 'device'.*process {os.getppid()};"):
        second.publish(card())
    second.leave()
    assert third.read("device") == card(parent)
    for waiting in (place, third):
        assert "two processes claim to be tier 'device'" in str(waiting.conflict())
    place.leave()
    assert "two processes claim to be tier 'device'" in str(third.conflict())
    for mark in folder.iterdir():  # as an earlier run would have left it
        os.utime(mark, (1, 1))
    assert third.conflict() is None
    third.leave()
    assert not folder.exists()


def test_a_tier_whose_place_is_taken_notices(folder):
    first, second = Rendezvous("run", "device"), Rendezvous("run", "device")
    first.publish(card())
    assert first.conflict() is None
    (folder / "device.json").unlink()  # as if both had looked at the same moment
    second.publish(card(ProcessIdentity.of(os.getppid())))
    assert "two processes claim to be tier 'device'" in str(first.conflict())


def test_strange_cards_are_passed_over(folder):
    place = Rendezvous("run", "edge")
    for text in ("", "{", "[]", "{}", '{"process": {"pid": "x"}}', '{"process": 3}'):
        (folder / "device.json").write_text(text)
        assert place.read("device") is None
    (folder / "device.json").unlink()
    (folder / "device.json").symlink_to("/etc/hostname")
    assert place.read("device") is None


def test_a_meeting_place_that_others_can_enter_is_refused(folder):
    folder.mkdir(parents=True, mode=0o700)
    folder.parent.chmod(0o755)
    with pytest.raises(ValueError, match="open to others; remove it"):
        Rendezvous("run", "edge")


@pytest.mark.parametrize("run_id", ["", "../x", "a/b", "a b", ".hidden"])
def test_a_run_id_is_a_word(run_id):
    with pytest.raises(ValueError, match="must be a word"):
        Rendezvous(run_id, "edge")
