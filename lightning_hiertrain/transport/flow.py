"""Sequence numbers, acknowledgement and replay between two tiers: nothing is lost or doubled.

A flow is one direction of one channel between a source and a target tier, with or without relays
between them. Frames of a flow stay in order as long as no connection breaks, so losses are found
without guessing at round trips:

    source                                   target
      | chunk 7, 8, 9  --(9 lost)-->            |  expects 9
      | probe "sent up to 9, generation 0" -->  |
      | <-- ack "received up to 8", echoing that probe
      | chunk 9 again, generation 1 -->         |

Whatever was sent before a probe has arrived before it, or never will. The generation counts the
replays, so that an answer to an old probe starts no second replay. A gap in the numbers is answered
like a probe, at once.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass

from lightning_hiertrain.transport.wire import (
    Incoming,
    MalformedError,
    Message,
    Outgoing,
)

MIN_WINDOW_BYTES = 256 << 10
MAX_WINDOW_BYTES = 16 << 20
_FIRST_WINDOW_BYTES = 1 << 20
_WINDOW_SECONDS = 1.0
"""How much of what a link carries is on its way at once, beyond what fills the round trip."""
_CHUNKS_PER_WINDOW = 8
LARGEST_CHUNK_BYTES = 1 << 20
_SMALL_BYTES = 16 << 10
"""Messages up to this size travel together."""
MAX_TOGETHER = 64
_MEASURED_SECONDS = 0.5
_KEPT_RATES = 5


@dataclass(kw_only=True)
class Chunk:
    """A numbered piece of a message, or several small messages."""

    sequence: int
    views: list[memoryview]
    num_bytes: int
    lengths: tuple[int, ...] | None
    """Of the messages that begin in it the bytes of the head and of the whole, one after the other;
    `None` if it goes on with one."""
    num_messages: int
    """How many messages end in it."""
    message_bytes: int
    """The bytes that its acknowledgement frees in the queue, those of the messages that end."""


class OutFlow:
    """The sender's end; any thread fills `queue`, the rest is the network's own thread's.

    Args:
        window_seconds: How long what is on its way may take a link; others wait behind it so long.
        min_window_bytes: How much may be on its way in any case.
        max_chunk_bytes: How much leaves as one at most.
    """

    def __init__(
        self,
        *,
        window_seconds: float = _WINDOW_SECONDS,
        min_window_bytes: int = MIN_WINDOW_BYTES,
        max_chunk_bytes: int = LARGEST_CHUNK_BYTES,
    ) -> None:
        self.queue: deque[Outgoing] = deque()
        self.generation = 0
        self.sent = 0
        """The sequence number of the last chunk that was sent, 0 for none."""
        self.num_replayed = 0
        self.num_acknowledged = 0
        self._unacknowledged: deque[Chunk] = deque()
        self._in_flight_bytes = 0
        self._window_seconds = window_seconds
        self._min_window_bytes = min_window_bytes
        self._max_chunk_bytes = max_chunk_bytes
        self._window_bytes = int(max(_FIRST_WINDOW_BYTES * window_seconds, min_window_bytes))
        self._left_alone_at: float | None = None
        """When a chunk left that had the link to itself, until its acknowledgement."""
        self._round_trip_seconds = math.inf
        self._measured_bytes = 0
        self._measured_since = 0.0
        self._rates: deque[float] = deque(maxlen=_KEPT_RATES)
        self._cut_message: Outgoing | None = None
        self._left_bytes = 0
        self._replay_from: int | None = None

    @property
    def unacknowledged(self) -> bool:
        return bool(self._unacknowledged)

    @property
    def in_flight_bytes(self) -> int:
        """How much was sent and is not acknowledged."""
        return self._in_flight_bytes

    @property
    def has_more(self) -> bool:
        """Whether anything is left to send, now or when the window opens."""
        return bool(self.queue) or self._cut_message is not None or self._replay_from is not None

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits to be sent or is on its way."""
        return not (self.queue or self._unacknowledged or self._cut_message)

    @property
    def bytes_per_second(self) -> float | None:
        """The fastest of the last measurements, `None` before the first; others were disturbed."""
        return max(tuple(self._rates), default=None)

    def next_chunk(self) -> Chunk | None:
        """Returns what to send next, or `None` if there is nothing or the window is full."""
        if self._replay_from is not None:
            if self._unacknowledged and self._replay_from <= self._unacknowledged[-1].sequence:
                chunk = self._unacknowledged[
                    max(0, self._replay_from - self._unacknowledged[0].sequence)
                ]
                self._replay_from = chunk.sequence + 1
                self.num_replayed += 1
                return chunk
            self._replay_from = None
        if self._in_flight_bytes >= self._window_bytes:
            return None
        new = self._cut()
        if new is not None:
            if not self._in_flight_bytes:
                self._measured_bytes, self._measured_since = 0, time.monotonic()
                self._left_alone_at = self._measured_since
            self.sent = new.sequence
            self._in_flight_bytes += new.num_bytes
            self._unacknowledged.append(new)
        return new

    def acknowledge(self, received: int, echo: tuple[int, int] | None) -> tuple[int, int]:
        """Takes an acknowledgement.

        Args:
            received: The last sequence number that the target has received without a gap.
            echo: What the target answers: a probe's or a gap's sequence number and generation.

        Returns:
            How many messages are now wholly acknowledged, and their bytes.
        """
        num_messages = num_bytes = 0
        if received > self.sent:
            return 0, 0
        while self._unacknowledged and self._unacknowledged[0].sequence <= received:
            chunk = self._unacknowledged.popleft()
            self._in_flight_bytes -= chunk.num_bytes
            self._measured_bytes += chunk.num_bytes
            self.num_acknowledged += 1
            num_messages += chunk.num_messages
            num_bytes += chunk.message_bytes
        now = time.monotonic()
        if self._left_alone_at is not None:
            self._round_trip_seconds = min(now - self._left_alone_at, self._round_trip_seconds)
            self._left_alone_at = None
        self._adapt_window(now)
        if echo is not None and echo[1] == self.generation and received < min(echo[0], self.sent):
            self.generation += 1
            self._replay_from = received + 1
        return num_messages, num_bytes

    def _adapt_window(self, now: float) -> None:
        elapsed = now - self._measured_since
        enough = self._measured_bytes >= self._window_bytes // 4
        if not enough and not (self._unacknowledged and elapsed > _MEASURED_SECONDS):
            return  # a flow with little to send tells nothing about the link
        rate = self._measured_bytes / max(elapsed, 1e-4)
        if enough:
            self._rates.append(rate)
        round_trip = min(self._round_trip_seconds, self._window_seconds)
        window = int((self._window_seconds + round_trip) * rate)
        self._window_bytes = min(max(window, self._min_window_bytes), MAX_WINDOW_BYTES)
        self._measured_bytes, self._measured_since = 0, now

    def _cut(self) -> Chunk | None:
        max_bytes = min(self._window_bytes // _CHUNKS_PER_WINDOW, self._max_chunk_bytes)
        lengths = None
        if self._cut_message is None:
            small = self._take_small(max_bytes)
            if small:
                return self._joined(small)
            if not self.queue:
                return None
            self._cut_message = self.queue.popleft()
            self._left_bytes = self._cut_message.total_bytes
            lengths = (self._cut_message.head_bytes, self._left_bytes)
        message = self._cut_message
        views = message.take(max_bytes)
        num_bytes = sum(view.nbytes for view in views)
        self._left_bytes -= num_bytes
        if not self._left_bytes:
            self._cut_message = None
        return Chunk(
            sequence=self.sent + 1,
            views=views,
            num_bytes=num_bytes,
            lengths=lengths,
            num_messages=0 if self._left_bytes else 1,
            message_bytes=0 if self._left_bytes else message.total_bytes,
        )

    def _take_small(self, max_bytes: int) -> list[Outgoing]:
        """Takes the small messages at the head of the queue, as many as one chunk may hold."""
        taken: list[Outgoing] = []
        while self.queue and len(taken) < MAX_TOGETHER:
            size = self.queue[0].total_bytes
            if size > _SMALL_BYTES or size > max_bytes:
                break
            max_bytes -= size
            taken.append(self.queue.popleft())
        return taken

    def _joined(self, messages: list[Outgoing]) -> Chunk:
        """Returns small messages as one frame: to copy them takes less time than a frame each."""
        content = b"".join(view for message in messages for view in message.views)
        return Chunk(
            sequence=self.sent + 1,
            views=[memoryview(content)],
            num_bytes=len(content),
            lengths=tuple(n for m in messages for n in (m.head_bytes, m.total_bytes)),
            num_messages=len(messages),
            message_bytes=len(content),
        )


class InFlow:
    """The receiver's end."""

    def __init__(self) -> None:
        self.received = 0
        """The last sequence number that arrived without a gap."""
        self.acknowledgement_due = False
        self.unanswered_bytes = 0
        """Bytes that arrived since the last acknowledgement."""
        self.echo: tuple[int, int] | None = None
        """What the next acknowledgement answers."""
        self.num_doubled = 0
        self._gap_generation = -1
        self._incoming: Incoming | None = None

    def probe(self, sent: int, generation: int) -> None:
        """Takes the source's word on what it has sent."""
        self.echo = (sent, generation)
        self.acknowledgement_due = True

    def accept(
        self, sequence: int, generation: int, lengths: list[int] | None, pieces: list[memoryview]
    ) -> list[Message]:
        """Takes a chunk.

        Returns:
            The messages that end in it.

        Raises:
            MalformedError: If the chunk does not fit its message, which is then dropped.
        """
        if sequence > self.received + 1:
            if generation > self._gap_generation:
                self._gap_generation = generation
                self.probe(sequence, generation)
            return []
        self.acknowledgement_due = True
        if sequence <= self.received:
            self.num_doubled += 1
            return []
        if (lengths is None) != (self._incoming is not None):
            raise MalformedError(
                "a chunk in the middle of a message that was dropped"
                if lengths is None
                else "a message in the middle of another one"
            )
        if lengths is not None and len(lengths) > 2:
            messages = _split(lengths, pieces)
            self._take(sequence, None, pieces)
            return messages
        incoming = self._incoming or Incoming(*(lengths or ()))
        try:
            message = incoming.feed(pieces)
        except MalformedError:
            if lengths is None and incoming.is_broken:
                self._take(sequence, incoming, pieces)
            raise  # else it leaves no trace: the right chunk may still come in its place
        self._take(sequence, incoming, pieces)
        return [] if message is None else [message]

    def _take(self, sequence: int, incoming: Incoming | None, pieces: list[memoryview]) -> None:
        self.received = sequence
        self.unanswered_bytes += sum(piece.nbytes for piece in pieces)
        self._incoming = incoming if incoming is not None and incoming.missing_bytes else None


def _split(lengths: list[int], pieces: list[memoryview]) -> list[Message]:
    """Takes apart a chunk of several messages: all of them, or none if one is malformed."""
    wholes = lengths[1::2]
    if len(pieces) != 1 or pieces[0].nbytes != sum(wholes):
        raise MalformedError("messages that do not fill their chunk")
    messages, start = [], 0
    for head, whole in zip(lengths[::2], wholes, strict=True):
        message = Incoming(head, whole).feed([pieces[0][start : start + whole]])
        assert message is not None, "it is whole"
        messages.append(message)
        start += whole
    return messages
