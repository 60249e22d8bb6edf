"""What a tier notes of its steps, and what acknowledgements say of a link."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_hiertrain.drift import reports
from lightning_hiertrain.drift.reports import Report, StepNotes
from lightning_hiertrain.transport import goodput as goodput_module
from lightning_hiertrain.transport.goodput import Goodput, GoodputMeter
from lightning_hiertrain.transport.packing import pack, unpack
from lightning_hiertrain.transport.peers import Peer
from lightning_hiertrain.transport.sockets import Channel
from lightning_hiertrain.transport.wire import encode


class Clock:
    """A clock that is set by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (reports, goodput_module):
        times = SimpleNamespace(perf_counter=made, monotonic=made)
        monkeypatch.setattr(module, "time", times)
    return made


def notes_of(clock: Clock) -> tuple[StepNotes, Any]:
    network: Any = SimpleNamespace(waited_seconds=0.0)
    notes = StepNotes(network)

    def step(seconds: float, waited: float = 0.0, *, batches: int = 1, whole: bool = True) -> None:
        for _ in range(batches):
            notes.batch_dealt(is_whole=whole)
        clock.now += seconds
        network.waited_seconds += waited
        notes.step_ended()

    return notes, step


def test_a_tier_is_busy_when_it_does_not_wait_for_others(clock: Clock):
    notes, step = notes_of(clock)
    for _ in range(4):
        step(1.0)
    step(2.0, waited=1.5)
    assert notes.step_seconds == pytest.approx(2.0)
    assert notes.take({}).busy_seconds == pytest.approx((1.0, 0.5))
    assert notes.take({}).busy_seconds == ()


def test_steps_with_something_else_in_them_are_left_out(clock: Clock):
    notes, step = notes_of(clock)
    for _ in range(3):
        step(1.0)
    notes.take({})
    step(1.0, whole=False)
    assert notes.step_seconds is None
    notes.disturb()  # a validation or a checkpoint
    step(9.0)
    assert notes.take({}).busy_seconds == ()
    step(1.0)
    assert notes.take({}).busy_seconds == pytest.approx((1.0,))


def test_accumulated_mini_batches_count_one_by_one(clock: Clock):
    notes, step = notes_of(clock)
    for _ in range(4):
        step(3.0, batches=3)
    assert notes.step_seconds == pytest.approx(1.0)
    assert notes.take({}).busy_seconds == pytest.approx((1.0,))


def test_the_first_steps_under_a_schedule_are_left_out(clock: Clock):
    notes, step = notes_of(clock)
    for _ in range(5):
        step(1.0)
    notes.switched()
    for _ in range(3):
        step(1.0)
    assert notes.take({}) == Report(schedule=1)
    step(1.0)
    assert notes.take({}) == Report(schedule=1, busy_seconds=(pytest.approx(1.0),))


def test_a_report_arrives_as_it_was_sent():
    report = Report(
        schedule=3,
        busy_seconds=(0.1, 0.2),
        goodput={"edge": Goodput(num_bytes=5.0, seconds=0.5, least_bytes_per_second=7.0)},
    )
    assert Report.from_dict(unpack(*pack(report.to_dict()))) == report


def flowing(meter: GoodputMeter, peer: Peer, num_bytes: int) -> None:
    """Lets so many bytes be on their way to a peer."""
    flow = peer.outgoing[Channel.DATA]
    flow.queue.append(encode("x", torch.zeros(num_bytes, dtype=torch.uint8)))
    while flow.next_chunk() is not None:
        meter.sent(peer)


def acknowledge(meter: GoodputMeter, peer: Peer, chunks: int) -> int:
    """Acknowledges the next chunks and returns their bytes."""
    flow = peer.outgoing[Channel.DATA]
    before = flow.in_flight_bytes
    flow.acknowledge(min(flow.num_acknowledged + chunks, flow.sent), None)
    meter.acknowledged(peer, before - flow.in_flight_bytes)
    return before - flow.in_flight_bytes


def peers(*routes: tuple[str, ...]) -> dict[str, Peer]:
    return {route[-1]: Peer(name=route[-1], route=route) for route in routes}


def test_the_rate_of_a_link_is_what_arrives_behind_the_first_acknowledgement(clock: Clock):
    known = peers(("device", "edge"))
    meter = GoodputMeter(peers=known)
    flowing(meter, known["edge"], 1 << 20)
    clock.now += 5.0  # the round trip
    acknowledge(meter, known["edge"], 1)
    carried = 0
    while known["edge"].outgoing[Channel.DATA].in_flight_bytes:
        clock.now += 0.1
        carried += acknowledge(meter, known["edge"], 1)
    (seen,) = meter.take().values()
    assert carried - (1 << 17) <= seen.num_bytes <= carried
    assert seen.num_bytes / seen.seconds == pytest.approx((1 << 17) / 0.1, rel=0.05)
    assert meter.take() == {}


def test_little_on_the_way_tells_nothing(clock: Clock):
    known = peers(("device", "edge"))
    meter = GoodputMeter(peers=known)
    for _ in range(10):
        flowing(meter, known["edge"], 1000)
        flowing(meter, known["edge"], 1000)
        clock.now += 1.0
        acknowledge(meter, known["edge"], 1)
        acknowledge(meter, known["edge"], 1)
    assert meter.take() == {}


def test_what_is_relayed_behind_a_neighbour_counts_apart_unless_both_are_busy(clock: Clock):
    known = peers(("device", "edge"), ("device", "edge", "cloud"))
    meter = GoodputMeter(peers=known)
    flowing(meter, known["cloud"], 1 << 20)
    acknowledge(meter, known["cloud"], 1)
    clock.now += 1.0
    relayed = acknowledge(meter, known["cloud"], 1)
    assert meter.take() == {"cloud": Goodput(num_bytes=relayed, seconds=pytest.approx(1.0))}

    flowing(meter, known["edge"], 1 << 18)
    acknowledge(meter, known["cloud"], 1)
    meter.take()
    clock.now += 1.0
    both = acknowledge(meter, known["edge"], 1)
    clock.now += 1.0
    both += acknowledge(meter, known["cloud"], 1)
    assert meter.take() == {"edge": Goodput(num_bytes=both, seconds=pytest.approx(2.0))}


def test_a_neighbours_link_is_not_blamed_for_what_is_held_up_behind_it(clock: Clock):
    known = peers(("device", "edge"), ("device", "edge", "cloud"))
    meter = GoodputMeter(peers=known)
    flowing(meter, known["cloud"], 1 << 20)
    flowing(meter, known["edge"], 1 << 10)
    acknowledge(meter, known["cloud"], 1)
    clock.now += 1.0
    acknowledge(meter, known["cloud"], 1)
    assert meter.take() == {}


def test_what_is_acknowledged_at_once_tells_what_a_link_carries_at_least(clock: Clock):
    known = peers(("device", "edge"))
    meter = GoodputMeter(peers=known)
    flowing(meter, known["edge"], 64 << 10)
    clock.now += 0.1
    acknowledge(meter, known["edge"], 100)
    (seen,) = meter.take().values()
    assert seen.num_bytes == 0
    assert seen.bytes_per_second == pytest.approx((32 << 10) / 0.1, rel=0.01)
