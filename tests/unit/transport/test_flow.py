"""Sequence numbers, acknowledgement and replay without any socket."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hiertrain.transport import flow
from lightning_hiertrain.transport.flow import InFlow, OutFlow
from lightning_hiertrain.transport.wire import MalformedError, encode


def send_all(out: OutFlow) -> list:
    chunks = []
    while (chunk := out.next_chunk()) is not None:
        chunks.append((chunk, out.generation))
    return chunks


def deliver(incoming: InFlow, chunks) -> list:
    messages = []
    for chunk, generation in chunks:
        lengths = None if chunk.lengths is None else list(chunk.lengths)
        arrived = incoming.accept(chunk.sequence, generation, lengths, chunk.views)
        messages += [message.value() for message in arrived]
    return messages


def acknowledge(out: OutFlow, incoming: InFlow) -> tuple[int, int]:
    result = out.acknowledge(incoming.received, incoming.echo)
    incoming.echo = None
    return result


def test_what_was_lost_is_sent_again_and_only_that():
    out, incoming = OutFlow(), InFlow()
    for number in range(4):
        out.queue.append(encode("x", bytes([number]) * 20_000))
    first, _lost, third, fourth = send_all(out)

    assert [content[0] for content in deliver(incoming, [first, third, fourth])] == [0]
    assert acknowledge(out, incoming)[0] == 1
    again = send_all(out)
    assert [chunk.sequence for chunk, _ in again] == [2, 3, 4]
    assert [content[0] for content in deliver(incoming, again)] == [1, 2, 3]
    assert acknowledge(out, incoming)[0] == 3
    assert not out.unacknowledged


def test_small_messages_travel_together_and_are_acknowledged_one_by_one():
    out, incoming = OutFlow(), InFlow()
    values = [0, torch.arange(3), "two", torch.arange(20_000), {"four": [4]}]
    for value in values:
        out.queue.append(encode("x", value))
    num_bytes = sum(message.total_bytes for message in out.queue)
    chunks = send_all(out)

    assert [(chunk.num_messages, len(chunk.views)) for chunk, _ in chunks] == [
        (3, 1),
        (0, 2),
        (1, 1),
        (1, 1),
    ]
    arrived = deliver(incoming, chunks)
    assert (arrived[0], arrived[2], arrived[4]) == (0, "two", {"four": [4]})
    assert (arrived[1].tolist(), arrived[3].tolist()) == ([0, 1, 2], list(range(20_000)))
    assert acknowledge(out, incoming) == (5, num_bytes)
    assert not out.unacknowledged


def test_as_many_messages_as_one_envelope_holds_travel_together():
    out, incoming = OutFlow(), InFlow()
    for number in range(flow.MAX_TOGETHER + 1):
        out.queue.append(encode("x", number))
    chunks = send_all(out)

    assert [chunk.num_messages for chunk, _ in chunks] == [flow.MAX_TOGETHER, 1]
    assert deliver(incoming, chunks) == list(range(flow.MAX_TOGETHER + 1))


def test_of_messages_that_travel_together_all_arrive_or_none():
    incoming = InFlow()
    sound, broken = bytes(encode("x", 1).views[0]), b'{"tag": 1}'
    for whole in (sound + broken, broken + sound, sound + sound + b"x"):
        first = len(sound if whole.startswith(sound) else broken)
        lengths = [first, first, len(whole) - first, len(whole) - first]
        with pytest.raises(MalformedError):
            incoming.accept(1, 0, lengths, [memoryview(whole)])
    assert incoming.received == 0

    lengths = [len(sound)] * 4
    arrived = incoming.accept(1, 0, lengths, [memoryview(sound + sound)])
    assert [message.value() for message in arrived] == [1, 1]


def test_a_lost_end_is_found_by_a_probe():
    out, incoming = OutFlow(), InFlow()
    out.queue.append(encode("x", "only"))
    send_all(out)
    acknowledge(out, incoming)
    assert send_all(out) == []

    incoming.probe(out.sent, out.generation)
    acknowledge(out, incoming)
    assert deliver(incoming, send_all(out)) == ["only"]


def test_answers_to_old_probes_start_no_second_replay():
    out, incoming = OutFlow(), InFlow()
    out.queue.append(encode("x", "only"))
    send_all(out)
    echo = (out.sent, out.generation)
    out.acknowledge(0, echo)
    assert len(send_all(out)) == 1

    out.acknowledge(0, echo)
    assert send_all(out) == []
    assert incoming.received == 0


def test_duplicates_are_dropped_and_acknowledged():
    out, incoming = OutFlow(), InFlow()
    out.queue.append(encode("x", "once"))
    chunks = send_all(out)

    assert deliver(incoming, chunks) == ["once"]
    incoming.acknowledgement_due = False
    assert deliver(incoming, chunks) == []
    assert incoming.acknowledgement_due
    assert incoming.num_doubled == 1


def test_the_window_bounds_what_is_on_its_way():
    out = OutFlow()
    out.queue.append(encode("x", torch.zeros(20_000_000)))
    sent = sum(chunk.num_bytes for chunk, _ in send_all(out))

    assert sent <= flow.MAX_WINDOW_BYTES + flow.MIN_WINDOW_BYTES


def test_chunks_shrink_on_a_slow_link_and_grow_on_a_fast_one(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(flow.time, "monotonic", lambda: now[0])
    out, incoming = OutFlow(), InFlow()
    out.queue.append(encode("x", torch.zeros(50_000_000)))

    def largest_chunk(bytes_per_second: float, rounds: int) -> int:
        for _ in range(rounds):
            chunks = send_all(out)
            num_bytes = sum(chunk.num_bytes for chunk, _ in chunks)
            deliver(incoming, chunks)
            now[0] += num_bytes / bytes_per_second
            acknowledge(out, incoming)
        return max(chunk.num_bytes for chunk, _ in chunks)

    assert largest_chunk(125e3, 4) == 32 << 10
    assert largest_chunk(1e9, 8) == 1 << 20


@settings(max_examples=50)
@given(st.data())
def test_any_pattern_of_loss_and_doubling_delivers_each_once_in_order(data):
    out, incoming = OutFlow(), InFlow()
    total = data.draw(st.integers(1, 8))
    sizes = [data.draw(st.sampled_from([0, 10, 300_000])) for _ in range(total)]
    for number, size in enumerate(sizes):
        out.queue.append(encode(str(number), torch.full((size,), number, dtype=torch.uint8)))
    arrived = []
    for attempt in range(200):
        chunks = send_all(out)
        if attempt < 20:
            faults = data.draw(
                st.lists(
                    st.sampled_from(["lose", "pass", "double"]),
                    min_size=len(chunks),
                    max_size=len(chunks),
                )
            )
        else:
            faults = ["pass"] * len(chunks)
        for chunk, fault in zip(chunks, faults, strict=True):
            times = {"lose": 0, "pass": 1, "double": 2}[fault]
            arrived += deliver(incoming, [chunk] * times)
        incoming.probe(out.sent, out.generation)
        acknowledge(out, incoming)
        if not out.unacknowledged and not out.queue:
            break
    assert [tensor.unique().tolist() or tensor.tolist() for tensor in arrived] == [
        [number] if size else [] for number, size in enumerate(sizes)
    ]


def test_a_head_is_plain_json():
    outgoing = encode("x", {"a": torch.zeros(2, 3)})
    head = json.loads(bytes(outgoing.views[0]))

    assert head["tag"] == "x"
    assert head["tensors"] == [["float32", [2, 3]]]


def test_the_rate_is_what_was_acknowledged_in_the_time_it_took(monkeypatch):
    clock = iter(x / 4 for x in range(100))
    monkeypatch.setattr(flow.time, "monotonic", lambda: next(clock))
    out, incoming = OutFlow(), InFlow()
    assert out.bytes_per_second is None
    message = encode("x", torch.zeros(900_000, dtype=torch.uint8))
    out.queue.append(message)
    deliver(incoming, send_all(out))
    acknowledge(out, incoming)
    assert out.bytes_per_second == message.total_bytes / 0.25
