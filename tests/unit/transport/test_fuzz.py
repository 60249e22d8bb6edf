"""Ten thousand malformed frames: none ends a thread, takes memory or a genuine message's place."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_hiertrain.topology import Topology
from lightning_hiertrain.transport import packing
from lightning_hiertrain.transport.admission import Credentials
from lightning_hiertrain.transport.protocol import ABORT, BYE, LOST, Protocol
from lightning_hiertrain.transport.sockets import Channel, Received
from lightning_hiertrain.transport.wire import Incoming, MalformedError, encode
from tests.unit.transport.helpers import TIERS, make_topology, send_raw, started

SIDE = 10
"""An example crosses so many envelopes with so many payloads."""
EXAMPLES = 100
SOCKET_EXAMPLES = 5
THEIR_SESSION, OUR_SESSION = "5e55104e", "0e55104e"

words = st.one_of(
    st.sampled_from(["device", "edge", "cloud", "moon", "chunk", "ack", "probe", THEIR_SESSION]),
    st.text(max_size=8),
)
numbers = st.one_of(
    st.integers(-2, 6), st.sampled_from([2**31, 2**53, 2**63 - 1, 2**63, 2**80, -(2**63), 1 << 36])
)
junk = st.recursive(
    st.none() | st.booleans() | numbers | st.floats() | words,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=4),
    max_leaves=8,
)
FIELDS = {
    "k": st.sampled_from(["chunk", "ack", "probe", "bye", ""]) | junk,  # `refuse` would be sound
    "s": words | junk,
    "t": words | junk,
    "e": words | junk,
    "te": words | junk,
    "c": st.sampled_from([0, 1, 2, True]) | junk,
    "q": numbers | junk,
    "g": numbers | junk,
    "l": st.lists(numbers, max_size=3) | junk,
    "p": st.lists(numbers, max_size=3) | junk,
}
dtypes = st.sampled_from(
    sorted(name for name in vars(torch) if isinstance(getattr(torch, name), torch.dtype))
)
heads = st.fixed_dictionaries(
    {
        "tag": words | st.sampled_from([ABORT, LOST]) | junk,
        "value": st.fixed_dictionaries({"$": words}, optional={"at": numbers, "items": junk})
        | st.fixed_dictionaries({"$": st.just("tensor"), "at": numbers})
        | junk,
        "tensors": st.lists(
            st.tuples(dtypes | words, st.lists(numbers, max_size=4) | junk), max_size=3
        )
        | junk,
    }
)


WHOLE = {"k": "chunk", "s": "device", "t": "edge", "e": THEIR_SESSION, "te": OUR_SESSION}
WHOLE |= {"c": 1, "q": 0, "g": 0, "l": [10, 20]}


@st.composite
def envelopes(draw: st.DrawFn) -> bytes:
    """What a tier with the right key sends instead of an envelope."""
    kind = draw(st.sampled_from(["bytes", "json", "changed", "cut", "first"]))
    if kind == "bytes":
        return draw(st.binary(max_size=60))
    if kind == "json":
        return json.dumps(draw(junk)).encode()
    if kind == "first":
        return json.dumps({**WHOLE, "q": "next", "l": "whole"}).encode()
    names = draw(st.sets(st.sampled_from(list(FIELDS)), min_size=1, max_size=2))
    changes = {name: draw(FIELDS[name]) for name in names}
    text = json.dumps({**WHOLE, **changes}).encode()
    return text[: draw(st.integers(0, len(text)))] if kind == "cut" else text


payloads = st.one_of(
    heads.map(lambda head: [json.dumps(head).encode()]), st.lists(st.binary(max_size=40))
)


@st.composite
def many_frames(draw: st.DrawFn) -> list[list[bytes]]:
    """Every envelope with every payload; some announce its true length and are `"next"`."""
    several = draw(st.lists(envelopes(), min_size=SIDE, max_size=SIDE))
    bodies = draw(st.lists(payloads, min_size=SIDE, max_size=SIDE))
    lengths = []
    for number, times in enumerate(draw(st.lists(st.integers(1, 2), min_size=SIDE, max_size=SIDE))):
        whole = b"".join(bodies[number])
        lengths.append(str([len(whole)] * 2 * times).encode())
        if times == 2:  # two messages in one frame
            bodies[number] = [whole * 2]
    return [
        [envelope.replace(b'"whole"', length), *body]
        for envelope in several
        for body, length in zip(bodies, lengths, strict=True)
    ]


def fuzzed(examples: int, check: Callable[[list[list[bytes]]], None]) -> int:
    """Makes frames, lets them be checked, and returns how many there were."""
    count = 0

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(many_frames())
    def fuzz(many: list[list[bytes]]) -> None:
        nonlocal count
        count += len(many)
        check(many)

    fuzz()
    return count


@pytest.fixture
def edge() -> Iterator[Protocol]:
    """The edge of three tiers, after it has met the device; nothing is connected."""
    protocol = Protocol(
        "edge",
        Topology.local(TIERS),
        Credentials(public_key="", private_key=""),
        changed=threading.Condition(),
        silence_seconds=10.0,
        meet=lambda _: True,
    )
    protocol.session = OUR_SESSION
    peer = protocol.peers["device"]
    peer.session, peer.established = THEIR_SESSION, True
    yield protocol
    protocol.sockets.close()


def test_ten_thousand_malformed_frames_change_nothing(
    edge: Protocol, caplog: pytest.LogCaptureFixture
) -> None:
    peer = edge.peers["device"]

    def check(many: list[list[bytes]]) -> None:
        for envelope, *payload in many:
            number = peer.incoming[Channel.DATA].received + 1
            envelope = envelope.replace(b'"next"', str(number).encode())
            edge.handle(_received(envelope, payload))
        # The genuine stream goes on where it was, whatever was claimed in between.
        _say(edge, "genuine", torch.arange(3))
        assert peer.inbox.pop("genuine")[0].value().tolist() == [0, 1, 2]
        assert peer.lost is None
        assert edge.peers["cloud"].lost is None
        peer.inbox.clear()

    before = _resident_bytes()
    with caplog.at_level(logging.WARNING):
        assert fuzzed(EXAMPLES, check) >= EXAMPLES * SIDE**2 == 10_000
    assert _resident_bytes() - before < 200 << 20  # what was claimed are terabytes
    kinds = [message.split(" (")[0] for message in caplog.messages]
    assert len(kinds) > 5
    assert len(kinds) == len(set(kinds))


def _received(envelope: bytes, payload: list[bytes]) -> Received:
    return Received(
        neighbour="device",
        channel=Channel.DATA,
        envelope=envelope,
        payload=[zmq.Frame(piece) for piece in payload],
    )


def _say(edge: Protocol, tag: str, value: Any) -> None:
    """Lets the edge receive a sound message of one chunk from the device."""
    flow = edge.peers["device"].incoming[Channel.DATA]
    flow._incoming = None  # what was forged may have begun a message
    message = encode(tag, value)
    lengths = [message.head_bytes, message.total_bytes]
    envelope = json.dumps({**WHOLE, "q": flow.received + 1, "l": lengths}).encode()
    edge.handle(_received(envelope, [bytes(view) for view in message.views]))


def test_malformed_frames_over_a_real_link_leave_its_traffic_undisturbed(tmp_path) -> None:
    topology = make_topology(tmp_path)
    with started(tmp_path, topology) as networks:
        device, edge = networks["device"], networks["edge"]
        protocol = device._engine.protocol
        number = 0

        def check(many: list[list[bytes]]) -> None:
            nonlocal number
            number += 1
            real = {THEIR_SESSION: protocol.session, OUR_SESSION: protocol.peers["edge"].session}
            for forged in many:
                forged[0] = forged[0].replace(b'"next"', b"0")
                # A sound chunk that is in order would be the device's own word.
                if b'"k": "chunk"' not in forged[0] or b'"q": 0' in forged[0]:
                    for written, session in real.items():
                        forged[0] = forged[0].replace(written.encode(), str(session).encode())
            send_raw(device, many)
            device.send("edge", "up", number)
            edge.send("device", "down", number)
            device.send("cloud", "through", torch.full((1000,), number))
            assert edge.receive("device", "up") == number
            assert device.receive("edge", "down") == number
            assert networks["cloud"].receive("device", "through").unique().tolist() == [number]

        assert fuzzed(SOCKET_EXAMPLES, check) >= SOCKET_EXAMPLES * SIDE**2


# One thing at a time


@pytest.mark.parametrize("tag", [BYE, ABORT, LOST])
@pytest.mark.parametrize(
    "value",
    [float("inf"), "text", None, [1], torch.ones(2), {"tier": [1], "reason": "", "culprit": 1}],
)
def test_strange_words_of_the_link_layer_end_nothing(
    edge: Protocol, tag: str, value: Any, caplog: Any
) -> None:
    # `int(inf)` and the index of a tensor raised what was not expected, and ended the thread.
    _say(edge, tag, value)
    _say(edge, tag, {"tier": "moon", "reason": "x", "culprit": "moon"})
    assert [peer.lost for peer in edge.peers.values()] == [None, None]
    (warning,) = caplog.messages
    assert "a message of the link layer that cannot be read" in warning


def test_a_chunk_that_does_not_fit_takes_no_other_s_place(edge: Protocol) -> None:
    incoming = edge.peers["device"].incoming[Channel.DATA]
    genuine = encode("x", torch.arange(100))
    lengths = [genuine.head_bytes, genuine.total_bytes]
    first, rest = genuine.take(genuine.head_bytes + 100), genuine.take(10_000)
    for sequence, claimed, pieces, match in (
        (1, None, [b"x"], "a message that was dropped"),
        (1, [2, 2], [b"xx"], "a head that cannot be read"),
        (1, [2, 2], [b"xxx"], "more bytes than the message announced"),
        (1, lengths, first, None),
        (2, lengths, [b"x"], "in the middle of another one"),
        (2, None, [bytes(2000)], "more bytes than the message announced"),
    ):
        views = [memoryview(piece) for piece in pieces]
        if match is None:
            assert incoming.accept(sequence, 0, claimed, views) == []
        else:
            with pytest.raises(MalformedError, match=match):
                incoming.accept(sequence, 0, claimed, views)
    (message,) = incoming.accept(2, 0, None, rest)
    assert message.value().tolist() == list(range(100))


def test_what_is_left_of_a_message_with_a_bad_head_is_thrown_away(edge: Protocol) -> None:
    incoming = edge.peers["device"].incoming[Channel.DATA]
    assert incoming.accept(1, 0, [4, 10], [memoryview(b"xx")]) == []
    with pytest.raises(MalformedError, match="a head that cannot be read"):
        incoming.accept(2, 0, None, [memoryview(b"xxyy")])
    assert incoming.accept(3, 0, None, [memoryview(b"yyyy")]) == []
    whole = encode("x", 5)
    (message,) = incoming.accept(4, 0, [whole.head_bytes, whole.total_bytes], whole.views)
    assert message.value() == 5


@pytest.mark.parametrize(
    ("lengths", "specs"),
    [
        ((100, 60 << 30), None),
        (None, [["float32", [1 << 40]]]),
        (None, [["int64", [1 << 20, 1 << 20]]]),
        (None, [["int8", [1 << 30]], ["int8", [0, 1 << 47]]]),
    ],
)
def test_what_a_frame_claims_takes_no_memory(lengths: Any, specs: Any) -> None:
    before = _resident_bytes()
    if lengths is not None:
        Incoming(*lengths).feed([memoryview(b"x" * 50)])
    else:
        head = json.dumps({"tag": "x", "value": 0, "tensors": specs}).encode()
        with pytest.raises(MalformedError, match="do not fill the message"):
            Incoming(len(head), len(head) + 64).feed([memoryview(head)])
    assert _resident_bytes() - before < 4 << 20


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize("dtype", ["U0", "S0", "V0", "O", "V8"])
def test_an_array_for_which_no_bytes_came_is_refused(dtype: str) -> None:
    # NumPy makes `U0` to an array of one character an item: a terabyte for eight bytes of frame.
    skeleton = {"$": "array", "dtype": dtype, "shape": [1 << 40], "at": 0}
    with pytest.raises(ValueError, match="not a packed value: an array of dtype"):
        packing.unpack(skeleton, [torch.zeros(0, dtype=torch.uint8)])
