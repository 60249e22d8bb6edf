"""Networks of one process over real sockets: routes, faults, strangers and malformed frames."""

import json
import logging
import os
import re
import threading
import time

import pytest
import torch
import zmq

from lightning_hiertrain.errors import LinkError, LinkTimeoutError, PeerLostError
from lightning_hiertrain.topology import Link, Tier, Topology
from lightning_hiertrain.transport import Collectives, Network
from lightning_hiertrain.transport.admission import Credentials
from lightning_hiertrain.transport.protocol import Protocol
from lightning_hiertrain.transport.rendezvous import ProcessIdentity
from lightning_hiertrain.transport.sockets import Channel
from lightning_hiertrain.transport.wire import encode
from tests.distributed.launch import free_ports
from tests.unit.transport.helpers import (
    TIERS,
    Proxy,
    make_topology,
    plain_client,
    send_raw,
    started,
)

PAIR = (("device", "edge"),)


def test_values_come_by_tag_in_order(tmp_path):
    with started(tmp_path, make_topology(tmp_path, PAIR)) as networks:
        device, edge = networks["device"], networks["edge"]
        for number in range(3):
            device.send("edge", "a", number)
        device.send("edge", "b", {"x": torch.arange(3)}, control=True)

        assert edge.receive("device", "b")["x"].tolist() == [0, 1, 2]
        assert [edge.receive("device", "a") for _ in range(3)] == [0, 1, 2]
        assert not edge.poll("device", "a")
        edge.send("device", "none")
        assert device.receive("edge", "none") is None


def test_a_relay_passes_messages_on_both_ways(tmp_path):
    with started(tmp_path, make_topology(tmp_path)) as networks:
        tensor = torch.randn(3_000_000)
        networks["device"].send("cloud", "x", tensor)
        networks["cloud"].send("device", "y", [tensor, "text"])

        assert torch.equal(networks["cloud"].receive("device", "x"), tensor)
        assert torch.equal(networks["device"].receive("cloud", "y")[0], tensor)
        assert networks["edge"].stats()["device"]["bytes_relayed"] > 12_000_000


def test_a_single_tier_has_nobody_to_wait_for(tmp_path):
    with Network.local("only", ["only"], run_id="single") as network:
        network.wait_for_peers(1.0)
        together = Collectives(network, ["only"])
        together.barrier()
        assert together.all_gather(3) == together.gather(3, "only") == [3]
        assert together.broadcast("x", "only") == "x"
        assert (together.any(True), together.all(False)) == (True, False)
        network.flush()


def test_collectives_name_every_tier_once(tmp_path):
    with started(tmp_path, make_topology(tmp_path, PAIR)) as networks:
        with pytest.raises(ValueError, match="must name every tier once"):
            Collectives(networks["edge"], ["edge", "edge"])
        with pytest.raises(ValueError, match="tier 'moon' takes no part"):
            Collectives(networks["edge"], TIERS[:2]).broadcast(1, "moon")


def test_a_failure_of_the_links_ends_the_next_call(tmp_path):
    with started(tmp_path, make_topology(tmp_path, PAIR)) as networks:

        def fail(now: float) -> None:
            raise OSError("no more sockets")

        networks["edge"]._engine.protocol.tick = fail
        with pytest.raises(RuntimeError, match="links of tier 'edge' failed") as caught:
            networks["edge"].receive("device", "x")
        assert "no more sockets" in repr(caught.value.__cause__)


def test_flush_returns_when_all_has_arrived(tmp_path):
    with started(tmp_path, make_topology(tmp_path)) as networks:
        networks["device"].send("cloud", "x", torch.zeros(5_000_000))
        networks["device"].flush(10.0)

        assert networks["cloud"].poll("device", "x")


def test_a_peer_that_has_met_and_left_at_once_was_there(tmp_path):
    with started(tmp_path, make_topology(tmp_path, PAIR)) as networks:
        networks["edge"].close()
        deadline = time.monotonic() + 10.0
        while networks["device"].is_usable and time.monotonic() < deadline:
            threading.Event().wait(0.01)
        networks["device"].wait_for_peers(5.0)
        with pytest.raises(PeerLostError, match="has finished and closed"):
            networks["device"].receive("edge", "x", timeout_seconds=5.0)


def test_what_was_held_back_leaves_with_the_next_message_or_before_a_wait(tmp_path):
    with started(tmp_path, make_topology(tmp_path, PAIR)) as networks:
        device, edge = networks["device"], networks["edge"]
        woken = []
        wake = device._engine.wake
        device._engine.wake = lambda: (woken.append(1), wake())
        with device.together():
            for number in range(3):
                device.send("edge", "x", number, control=True)
            device.send("edge", "x", 3, control=True, at_once=False)
            assert not woken
        assert [edge.receive("device", "x") for _ in range(4)] == [0, 1, 2, 3]
        assert len(woken) == 1

        device.send("edge", "y", 4, control=True, at_once=False)
        assert len(woken) == 1
        edge.send("device", "z", edge.receive("device", "y", timeout_seconds=5.0), control=True)
        assert device.receive("edge", "z") == 4

        told = len(woken)
        with device.together():
            device.send("edge", "z", 6, control=True, at_once=False)
        assert len(woken) == told
        assert edge.receive("device", "z", timeout_seconds=5.0) == 6

        with device.together():
            device.send("edge", "y", 5, control=True)
            answer = threading.Thread(
                target=lambda: edge.send("device", "z", edge.receive("device", "y"), control=True)
            )
            answer.start()
            assert device.receive("edge", "z", timeout_seconds=5.0) == 5
            answer.join()


def test_what_is_needed_later_leaves_after_the_tensors_of_the_step(tmp_path):
    with Proxy(bytes_per_second=4e6) as proxy:
        topology = make_topology(tmp_path, PAIR, through={PAIR[0]: proxy.port})
        proxy.target = int(topology.tier("edge").address.rpartition(":")[2])
        with started(tmp_path, topology) as networks:
            device, edge = networks["device"], networks["edge"]
            device.send("edge", "later", torch.full((1_000_000,), 7), ahead=True)  # 2 s
            for number in range(3):
                device.send("edge", f"now {number}", torch.full((50_000,), number))
            for number in range(3):
                assert edge.receive("device", f"now {number}").unique().tolist() == [number]
            assert not edge.poll("device", "later")
            assert edge.receive("device", "later").unique().tolist() == [7]


@pytest.mark.parametrize("links", [PAIR, (*PAIR, ("edge", "cloud"))])
def test_connections_that_break_lose_and_double_nothing(tmp_path, links):
    with Proxy() as proxy:
        topology = make_topology(tmp_path, links, through={links[-1]: proxy.port})
        proxy.target = int(topology.tier(links[-1][1]).address.rpartition(":")[2])
        with started(tmp_path, topology, timeout_seconds=90.0) as networks:
            low, high = networks["device"], networks[links[-1][1]]
            stop = threading.Event()

            def cut() -> None:
                while not stop.wait(0.4):
                    proxy.cut()

            threading.Thread(target=cut, daemon=True).start()
            try:
                for number in range(40):
                    low.send(high.tier, "up", {"n": number, "x": torch.full((500_000,), number)})
                    high.send("device", "down", number, control=True)
                    high.send("device", "big", torch.full((200_000,), number))
                    low.send(high.tier, "later", torch.full((100_000,), number), ahead=True)
                for number in range(40):
                    up = high.receive("device", "up")
                    assert (up["n"], up["x"].unique().tolist()) == (number, [number])
                    assert low.receive(high.tier, "down") == number
                    assert low.receive(high.tier, "big").unique().tolist() == [number]
                    assert high.receive("device", "later").unique().tolist() == [number]
            finally:
                stop.set()
            assert not high.poll("device", "up")
            assert proxy.num_cut > 0


def test_a_silent_link_is_remade_within_the_silence_that_is_allowed(tmp_path):
    with Proxy() as proxy:
        topology = make_topology(tmp_path, PAIR, through={PAIR[0]: proxy.port})
        proxy.target = int(topology.tier("edge").address.rpartition(":")[2])
        with started(tmp_path, topology, silence_seconds=6.0) as networks:
            device, edge = networks["device"], networks["edge"]
            proxy.block(True)
            device.send("edge", "x", torch.ones(100_000))
            edge.send("device", "y", 1, control=True)
            threading.Event().wait(4.0)
            proxy.cut()
            proxy.block(False)

            assert edge.receive("device", "x", timeout_seconds=5.0).sum() == 100_000
            assert device.receive("edge", "y", timeout_seconds=5.0) == 1


def test_a_link_that_stays_silent_loses_the_peer_on_both_ends(tmp_path):
    with Proxy() as proxy:
        topology = make_topology(tmp_path, PAIR, through={PAIR[0]: proxy.port})
        proxy.target = int(topology.tier("edge").address.rpartition(":")[2])
        with started(tmp_path, topology, silence_seconds=2.0) as networks:
            proxy.block(True)
            begun = time.monotonic()
            with pytest.raises(PeerLostError, match=r"'edge'.*'weights'.*no connection for"):
                networks["device"].receive("edge", "x", operation="weights")
            with pytest.raises(PeerLostError, match=r"'device'.*no connection for"):
                networks["edge"].receive("device", "x")
            assert time.monotonic() - begun < 5.0


def test_a_peer_that_closes_leaves_what_it_has_sent(tmp_path):
    with started(tmp_path, make_topology(tmp_path, PAIR)) as networks:
        networks["device"].send("edge", "last", torch.zeros(2_000_000))
        networks["device"].close()
        networks["device"].close()

        assert networks["edge"].receive("device", "last").numel() == 2_000_000
        with pytest.raises(PeerLostError, match=r"'device'.*has finished and closed"):
            networks["edge"].receive("device", "more")
        with pytest.raises(PeerLostError, match=r"'device'.*has finished and closed"):
            networks["edge"].send("device", "x", 1)
        with pytest.raises(RuntimeError, match="network of tier 'device' is closed"):
            networks["device"].receive("edge", "x")


def test_an_error_ends_the_waits_of_all_tiers_also_of_routed_ones(tmp_path):
    with started(tmp_path, make_topology(tmp_path)) as networks:
        threading.Timer(0.3, networks["device"].abort, args=("ValueError: too bad",)).start()
        begun = time.monotonic()
        for name in ("edge", "cloud"):
            with pytest.raises(PeerLostError, match=r"(?s)'device'.*with an error.*too bad"):
                networks[name].receive("device", "x")
        assert time.monotonic() - begun < 3.0


def test_a_wait_ends_with_peer_operation_and_timeout(tmp_path):
    with started(tmp_path, make_topology(tmp_path, PAIR)) as networks:
        pattern = "'edge' waited 0.2 s for tier 'device' during 'activations': nothing came"
        with pytest.raises(LinkTimeoutError, match=pattern) as caught:
            networks["edge"].receive("device", "x", timeout_seconds=0.2, operation="activations")
        assert (caught.value.tier, caught.value.peer) == ("edge", "device")
        with pytest.raises(ValueError, match="no peer 'moon'"):
            networks["edge"].receive("moon", "x")
        with pytest.raises(TypeError, match="value is a"):
            networks["edge"].send("device", "x", object())


def test_back_pressure_waits_and_gives_up(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_hiertrain.transport.messages.MAX_QUEUED_BYTES", 1 << 20)
    with Proxy() as proxy:
        topology = make_topology(tmp_path, PAIR, through={PAIR[0]: proxy.port})
        proxy.target = int(topology.tier("edge").address.rpartition(":")[2])
        with started(tmp_path, topology, timeout_seconds=1.0) as networks:
            proxy.block(True)
            networks["device"].send("edge", "x", torch.zeros(5_000_000))
            with pytest.raises(LinkTimeoutError, match="bytes wait to be sent"):
                networks["device"].send("edge", "x", torch.zeros(1_000))
            proxy.block(False)
            networks["edge"].receive("device", "x", timeout_seconds=10.0)
            networks["device"].send("edge", "x", torch.zeros(1_000))


def test_missing_tiers_are_named_with_their_addresses(tmp_path):
    topology = make_topology(tmp_path)
    with (
        Network.from_topology("edge", topology, private_key=tmp_path / "edge.key") as edge,
        pytest.raises(LinkTimeoutError) as caught,
    ):
        edge.wait_for_peers(0.5)

    text = str(caught.value)
    assert "tier 'device' is missing (it should dial this tier at 127.0.0.1:" in text
    assert f"'cloud' is missing (dialled at {topology.tier('cloud').address}: no answer)" in text


def test_a_tier_that_is_started_anew_is_told_and_reported(tmp_path, monkeypatch):
    topology = make_topology(tmp_path, PAIR)
    with started(tmp_path, topology) as networks:
        other = Network.from_topology("device", topology, private_key=tmp_path / "device.key")
        parent = ProcessIdentity.of(os.getppid())
        monkeypatch.setattr(ProcessIdentity, "current", lambda: parent)
        with other:
            with pytest.raises(PeerLostError, match="began with another process"):
                other.wait_for_peers(5.0)
            with pytest.raises(PeerLostError, match="started anew"):
                networks["edge"].receive("device", "x")


def test_tiers_meet_again_whichever_goes_on_to_the_next_run_first(tmp_path):
    topology = make_topology(tmp_path, PAIR)
    with started(tmp_path, topology) as networks:
        networks["device"].abort("the first run failed")
        networks["device"].close()
        again = Network.from_topology("device", topology, private_key=tmp_path / "device.key")
        with again:
            with pytest.raises(LinkTimeoutError, match="tier 'edge' is missing"):
                again.wait_for_peers(0.5)
            networks["edge"].close()
            edge = Network.from_topology("edge", topology, private_key=tmp_path / "edge.key")
            with edge:
                again.send("edge", "x", 1)
                assert edge.receive("device", "x", timeout_seconds=10) == 1
                again.wait_for_peers(5.0)


def test_a_tier_that_goes_on_to_its_next_run_unheard_ends_this_one(tmp_path):
    topology = make_topology(tmp_path, PAIR)
    with started(tmp_path, topology) as networks:
        other = Network.from_topology("device", topology, private_key=tmp_path / "device.key")
        with other, pytest.raises(PeerLostError, match="has left this run and begun another"):
            networks["edge"].receive("device", "x", timeout_seconds=5.0)


def test_the_error_names_the_tier_that_failed_first(tmp_path):
    with started(tmp_path, make_topology(tmp_path)) as networks:
        networks["edge"].abort("no answer", culprit="cloud")
        with pytest.raises(
            PeerLostError, match=r"lost tier 'cloud'.*'edge' reports: no answer"
        ) as a:
            networks["device"].receive("edge", "x", timeout_seconds=5.0)
        assert a.value.peer == "cloud"
        with pytest.raises(
            PeerLostError, match=r"'edge'.* because of tier 'cloud': no answer"
        ) as b:
            networks["cloud"].receive("edge", "x", timeout_seconds=5.0)
        assert b.value.peer == "edge"


def test_a_tier_known_to_have_ended_is_not_waited_for(tmp_path):
    topology = make_topology(tmp_path, PAIR)
    with Network.from_topology("device", topology, private_key=tmp_path / "device.key") as network:
        assert network.is_usable
        network.give_up("edge", "its process has ended with exit code 3")
        with pytest.raises(PeerLostError, match=r"lost tier 'edge'.*exit code 3"):
            network.wait_for_peers(5.0)
        assert not network.is_usable


def test_tiers_with_other_topologies_refuse_each_other(tmp_path):
    topology = make_topology(tmp_path)
    smaller = Topology(tiers=topology.tiers[:2], links=topology.links[:1])
    edge = Network.from_topology("edge", smaller, private_key=tmp_path / "edge.key")
    device = Network.from_topology("device", topology, private_key=tmp_path / "device.key")
    with edge, device:
        for network in (device, edge):
            with pytest.raises(PeerLostError, match="give every tier the same topology"):
                network.wait_for_peers(5.0)


def test_an_address_in_use_is_refused_with_the_remedy(tmp_path):
    topology = make_topology(tmp_path, PAIR)
    key = tmp_path / "edge.key"
    with (
        Network.from_topology("edge", topology, private_key=key),
        pytest.raises(LinkError, match=r"cannot listen on 127.0.0.1.*end the run that uses it"),
    ):
        Network.from_topology("edge", topology, private_key=key).start()


# Strangers


def port_of(topology: Topology, tier: str) -> int:
    return int(topology.tier(tier).address.rpartition(":")[2])


def test_a_stranger_is_refused_whatever_its_keys(tmp_path, caplog):
    topology = make_topology(tmp_path, PAIR)
    edge_key = topology.tier("edge").public_key.encode()
    public, private = zmq.curve_keypair()
    wrong = zmq.curve_keypair()[0]
    with started(tmp_path, topology) as networks, caplog.at_level(logging.WARNING):
        port = port_of(topology, "edge")
        assert plain_client(port).startswith(("HANDSHAKE_FAILED", "DISCONNECTED"))
        own = {"curve_publickey": public, "curve_secretkey": private}
        refused = plain_client(port, **own, curve_serverkey=edge_key)
        assert refused == "HANDSHAKE_FAILED_AUTH"
        assert not plain_client(port, **own, curve_serverkey=wrong).endswith("SUCCEEDED")

        networks["device"].send("edge", "x", 1)
        assert networks["edge"].receive("device", "x") == 1
    assert "its key is not that of a neighbouring tier" in caplog.text


def test_a_tier_dials_nobody_who_lacks_the_right_key(tmp_path):
    """An impostor at the edge's address, admitted by nobody's topology."""
    topology = make_topology(tmp_path, PAIR)
    (tmp_path / "impostor").mkdir()
    impostor = make_topology(tmp_path / "impostor", PAIR)
    false_edge = Topology(
        tiers=(
            topology.tiers[0],
            Tier(
                name="edge",
                address=topology.tiers[1].address,
                public_key=impostor.tier("edge").public_key,
            ),
        ),
        links=topology.links,
    )
    key = tmp_path / "impostor" / "edge.key"
    device = Network.from_topology("device", topology, private_key=tmp_path / "device.key")
    with Network.from_topology("edge", false_edge, private_key=key) as edge, device:
        with pytest.raises(LinkTimeoutError, match="tier 'edge' is missing"):
            device.wait_for_peers(1.5)
        with pytest.raises(LinkTimeoutError, match="tier 'device' is missing"):
            edge.wait_for_peers(0.1)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.7", "edge.example.org", "*", "[::]"])
def test_listening_beyond_this_machine_needs_keys(host):
    topology = Topology(
        tiers=(Tier(name="device"), Tier(name="edge", address=f"{host}:5555")),
        links=(Link(between=PAIR[0]),),
    )
    for tier in topology.names:
        with pytest.raises(ValueError, match=r"without keys.*`hiertrain keys`"):
            Network.from_topology(tier, topology, private_key=None)


def test_a_private_key_must_be_that_of_the_tier(tmp_path):
    topology = make_topology(tmp_path, PAIR)
    with pytest.raises(ValueError, match=r"does not match.*that of tier 'edge'"):
        Network.from_topology("device", topology, private_key=tmp_path / "edge.key")
    with pytest.raises(ValueError, match="given no private key; make keys"):
        Network.from_topology("device", topology, private_key=None)
    text = (tmp_path / "device.key").read_text().strip()
    network = Network.from_topology("device", topology, private_key=text)
    assert text not in repr(vars(network)["topology"])


def test_topologies_without_keys_work_on_this_machine():
    ports = free_ports(1)
    topology = Topology(
        tiers=(Tier(name="device"), Tier(name="edge", address=f"127.0.0.1:{ports[0]}")),
        links=(Link(between=PAIR[0]),),
    )
    device, edge = (
        Network.from_topology(tier, topology, private_key=None) for tier in topology.names
    )
    with device, edge:
        device.wait_for_peers(10.0)
        assert plain_client(ports[0]).startswith(("HANDSHAKE_FAILED", "DISCONNECTED"))
        device.send("edge", "x", 1)
        assert edge.receive("device", "x") == 1


# Malformed frames from a neighbour that has the right key


def envelope(network: Network, **changes) -> bytes:
    protocol = network._engine.protocol
    session = protocol.peers["edge"].session
    data = {"k": "chunk", "s": "device", "t": "edge", "e": protocol.session, "te": session}
    return json.dumps({**data, "c": 1, "q": 1, "g": 0, "l": [10, 20], **changes}).encode()


@pytest.mark.parametrize(
    ("make_frames", "warning"),
    [
        (lambda n: [b"\xff\xfe"], "an envelope that cannot be read"),
        (lambda n: [b"[" * 50_000], "an envelope that cannot be read"),
        (lambda n: [b"{}"], "an envelope that cannot be read"),
        (lambda n: [b"x" * 100_000], "too many or too long frames"),
        (lambda n: [b"x"] * 400, "too many or too long frames"),
        (lambda n: [envelope(n, k="evil")], "unknown kind"),
        (lambda n: [envelope(n, s="moon")], "names an unknown tier"),
        (lambda n: [envelope(n, s="edge", t="device")], "unknown tier|not have come this way"),
        (lambda n: [envelope(n, c=7)], "cannot be read"),
        (lambda n: [envelope(n, c=0), b"x"], "connection of another channel"),
        (lambda n: [envelope(n, q=-1)], "impossible number"),
        (lambda n: [envelope(n, q=2**80)], "impossible number"),
        (lambda n: [envelope(n, q="1")], "impossible number"),
        (lambda n: [envelope(n, l=[10])], "impossible lengths"),
        (lambda n: [envelope(n, l=[])], "impossible lengths"),
        (lambda n: [envelope(n, l=[10] * 400)], "impossible lengths"),
        (lambda n: [envelope(n, l="1020")], "impossible lengths"),
        (lambda n: [envelope(n, l=[10] * 4), b"x" * 30], "do not fill their chunk"),
        (lambda n: [envelope(n, l=[10] * 4), b"x" * 10, b"x" * 10], "do not fill their chunk"),
        (lambda n: [envelope(n, l=[10] * 4), b"x" * 20], "a head that cannot be read"),
        (lambda n: [envelope(n, l=[10, 2**40, 10, 0]), b"x" * 20], "do not fill their chunk"),
        (lambda n: [envelope(n, l=[2**50, 2**51]), b"x"], "impossible lengths"),
        (lambda n: [envelope(n, l=[10, 2**55]), b"x"], "impossible lengths"),
        (lambda n: [envelope(n, l=None), b"x"], "a message that was dropped"),
        (lambda n: [envelope(n), b"x" * 30], "more bytes than the message announced"),
        (lambda n: [envelope(n), b"x" * 10], "a head that cannot be read"),
        (lambda n: head(n, {"tag": 1, "value": 0, "tensors": []}), "a tag that is no text"),
        (lambda n: head(n, specs=[["float32", [4]]]), "do not fill the message"),
        (lambda n: head(n, specs=[["float32", [2**60]]]), "an impossible shape"),
        (lambda n: head(n, specs=[["float32", [-1]]]), "an impossible shape"),
        (lambda n: head(n, specs=[["object", [1]]]), "a head that cannot be read"),
        (lambda n: head(n, specs=[["int8", [0] * 70]]), "more than 64 dimensions"),
        (lambda n: head(n, specs=[["int8", [0, 2**47, 2**47]]]), "too large for this tier"),
    ],
)
def test_malformed_frames_are_dropped_with_a_warning(tmp_path, caplog, make_frames, warning):
    topology = make_topology(tmp_path, PAIR)
    with started(tmp_path, topology) as networks, caplog.at_level(logging.WARNING):
        device, edge = networks["device"], networks["edge"]
        frames = make_frames(device)
        send_raw(device, [frames, frames])
        device.send("edge", "control", 1, control=True)
        edge.send("device", "data", torch.ones(3))

        assert edge.receive("device", "control") == 1
        assert device.receive("edge", "data").tolist() == [1, 1, 1]
        send_raw(device, [[b"the end"]])
        wait_until(
            lambda: any("an envelope that cannot be read" in message for message in caplog.messages)
        )
        dropped = [text for text in caplog.messages if text.startswith("dropped frames")]
    assert re.search(warning, dropped[0])
    assert len(dropped) == (1 if "envelope that cannot be read" in dropped[0] else 2)


def wait_until(condition) -> None:
    deadline = time.monotonic() + 5.0
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def head(network: Network, text: dict | None = None, specs=()) -> list[bytes]:
    data = json.dumps(text or {"tag": "x", "value": 0, "tensors": specs}).encode()
    return [envelope(network, l=[len(data), len(data)]), data]


def test_a_relay_that_dies_takes_those_behind_it_along():
    protocol = Protocol(
        "device",
        Topology(
            tiers=tuple(Tier(name=name) for name in ("device", "edge", "cloud")),
            links=(Link(between=("device", "edge")), Link(between=("edge", "cloud"))),
        ),
        Credentials(public_key="", private_key=""),
        changed=threading.Condition(),
        silence_seconds=1.0,
        meet=lambda _: True,
    )
    for peer in protocol.peers.values():
        peer.session, peer.established = "theirs", True
        peer.outgoing[Channel.DATA].queue.append(encode("x", torch.zeros(10)))
        peer.outgoing[Channel.DATA].next_chunk()
    protocol.peers["edge"].down_since = time.monotonic() - 5.0
    protocol.tick(time.monotonic())
    protocol.send_due()
    assert all(peer.lost for peer in protocol.peers.values())
    assert protocol.peers["cloud"].culprit == "edge"
    protocol.sockets.close()
