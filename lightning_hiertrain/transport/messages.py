"""Values between this tier and the others: sent by peer and tag, received, waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from lightning_hiertrain.transport.engine import Engine
from lightning_hiertrain.transport.goodput import Goodput
from lightning_hiertrain.transport.membership import Membership
from lightning_hiertrain.transport.observing import Observer
from lightning_hiertrain.transport.peers import Peer, lost_error, timeout_error
from lightning_hiertrain.transport.sockets import Channel
from lightning_hiertrain.transport.wire import Outgoing, encode

MAX_QUEUED_BYTES = 256 << 20
"""How much may wait to be sent to one peer before `send` waits too."""
SMALL_BYTES = 64 << 10


class Messages:
    """What a tier says to the others over links that something else opens and closes.

    Args:
        tier: The tier of this process.
        timeout_seconds: How long a wait lasts unless it is told otherwise.
    """

    def __init__(self, tier: str, *, timeout_seconds: float) -> None:
        self.tier = tier
        self.timeout_seconds = timeout_seconds
        self.observer: Observer | None = None
        self.waited_seconds = 0.0
        """How long the thread that made this has waited for other tiers in all."""
        self._waiter = threading.get_ident()
        self._changed = threading.Condition()
        self._engine: Engine | None = None
        self._closed = False
        self._holding = 0
        self._holds_back = False
        """Whether something is queued of which the links' thread has not been told."""
        self._is_urgent = False
        """Whether some of that is to leave at once."""

    @property
    def membership(self) -> Membership:
        """Which tiers the run can do without, and which of them it has lost."""
        return self._running().protocol.membership

    def send(
        self,
        peer: str,
        tag: str,
        value: Any = None,
        *,
        control: bool | None = False,
        ahead: bool = False,
        at_once: bool = True,
    ) -> None:
        """Sends a value and returns at once; its tensors must not be changed any more.

        Args:
            peer: The tier that gets it.
            tag: The name under which it is received.
            value: What `pack` can take apart.
            control: Whether it is small and must not wait behind tensors; `None` for "if it is
                small".
            ahead: Whether it is needed later only: it leaves when no tensors do. Order holds within
                each kind, not between them.
            at_once: Whether it leaves now, rather than with what is sent next, when this thread has
                to wait, or a tenth of a second later: to hand over to the links' thread takes
                longer than a small message.

        Raises:
            TypeError: If the value holds something that cannot travel.
            PeerLostError: If the peer is gone.
            LinkTimeoutError: If too much waits to be sent already.
        """
        self.send_to((peer,), tag, value, control=control, ahead=ahead, at_once=at_once)

    def send_to(
        self,
        peers: Iterable[str],
        tag: str,
        value: Any = None,
        *,
        control: bool | None = False,
        ahead: bool = False,
        at_once: bool = True,
    ) -> None:
        """Sends a value to several peers, as `send` does to one; it is prepared once."""
        if tag.startswith("\0"):
            raise ValueError(f"the tag {tag!r} is reserved")
        message: Outgoing | None = None
        for peer in peers:
            state = self._peer(peer)
            if not self.membership.spares(peer):
                message = encode(tag, value) if message is None else message.again()
                small = message.total_bytes <= SMALL_BYTES if control is None else control
                channel = Channel.AHEAD if ahead else Channel.CONTROL if small else Channel.DATA
                self._queue(state, tag, message, channel)
        if at_once:
            self._is_urgent = True
            self.let_go()

    def _queue(self, state: Peer, tag: str, message: Outgoing, channel: Channel) -> None:
        """Queues a message as soon as there is room for it."""
        engine, peer = self._running(), state.name
        observer = self.observer
        started = perf_counter() if observer is not None else 0.0
        operation = f"send {tag}"

        def has_room() -> bool:
            if state.lost is not None:
                if self.membership.spares(peer):
                    return True
                raise lost_error(self.tier, state, operation, None)
            queued = state.queued_bytes[channel]
            return not queued or queued + message.total_bytes <= MAX_QUEUED_BYTES

        with self._changed:
            if not self._wait(has_room, self.timeout_seconds):
                raise timeout_error(
                    self.tier,
                    state,
                    operation,
                    self.timeout_seconds,
                    f"{state.queued_bytes[channel]} bytes wait to be sent",
                )
            if state.lost is not None:
                return
            if observer is not None:
                observer.sent(peer, tag, message.total_bytes, started, perf_counter())
            engine.protocol.enqueue(state, message, channel)
            self._holds_back = True

    @contextmanager
    def together(self) -> Iterator[None]:
        """A context at whose end all that is sent in it leaves, or when this thread has to wait."""
        self._holding += 1
        try:
            yield
        finally:
            self._holding -= 1
            self.let_go()

    def receive(
        self, peer: str, tag: str, *, timeout_seconds: float | None = None, operation: str = ""
    ) -> Any:
        """Returns the next value that a peer has sent under a tag, and waits for it if necessary.

        Args:
            peer: The tier that sends it.
            tag: Its name. Tags may be received in any order; values of one tag come in the order of
                sending.
            timeout_seconds: How long to wait; the network's timeout if not given.
            operation: What is being done, for error messages.

        Raises:
            PeerLostError: If the peer is gone and has left no such value.
            LinkTimeoutError: If it has not come in time.
        """
        timeout_seconds = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        operation = operation or f"receive {tag}"
        observer = self.observer
        started = perf_counter() if observer is not None else 0.0
        self._running()
        state = self._peer(peer)

        def is_here() -> bool:
            if tag in state.inbox:
                return True
            if state.lost is not None:
                raise lost_error(self.tier, state, operation, timeout_seconds)
            return False

        with self._changed:
            if not self._wait(is_here, timeout_seconds):
                raise timeout_error(self.tier, state, operation, timeout_seconds, "nothing came")
            message = state.inbox[tag].popleft()
            if not state.inbox[tag]:
                del state.inbox[tag]
        if observer is not None:
            observer.received(peer, message, operation, started, perf_counter())
        return message.value()

    def poll(self, peer: str, tag: str) -> bool:
        """Tells whether `receive` would return at once.

        Raises:
            PeerLostError: If the peer is gone and has left no such value.
        """
        self._running()
        state = self._peer(peer)
        with self._changed:
            if tag not in state.inbox and state.lost is not None:
                raise lost_error(self.tier, state, f"receive {tag}", None)
            return tag in state.inbox

    def flush(self, timeout_seconds: float | None = None, *, peer: str | None = None) -> None:
        """Waits until everything that was sent, or what was sent to one peer, has arrived.

        Raises:
            PeerLostError: If a peer is gone.
            LinkTimeoutError: If it takes longer.
        """
        timeout_seconds = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        engine = self._running()
        states = [self._peer(peer)] if peer is not None else list(engine.protocol.peers.values())

        def all_arrived() -> bool:
            for state in states:
                if state.lost is not None and peer is not None:
                    raise lost_error(self.tier, state, "flush", timeout_seconds)
            return not any(state.queued_messages for state in states)

        with engine.arrival_awaited():
            have_arrived = self._wait(all_arrived, timeout_seconds)
        if not have_arrived:
            state = next(state for state in states if state.queued_messages)
            raise timeout_error(
                self.tier,
                state,
                "flush",
                timeout_seconds,
                f"{state.queued_messages} messages have not been acknowledged",
            )

    def bytes_per_second(self, peer: str) -> float | None:
        """Returns how fast tensors went to a peer lately, `None` if too few did to tell."""
        state = self._peer(peer)
        with self._changed:
            flows = [flow for c, flow in state.outgoing.items() if c is not Channel.CONTROL]
        rates = [flow.bytes_per_second for flow in flows]
        return max((rate for rate in rates if rate is not None), default=None)

    def take_goodput(self) -> dict[str, Goodput]:
        """Returns what has arrived at each peer while links were busy, since the last call."""
        return self._running().protocol.goodput.take()

    def is_resting(self, peer: str) -> bool:
        """Whether no tensors wait to be sent to a peer or are on their way."""
        with self._changed:
            flows = [f for c, f in self._peer(peer).outgoing.items() if c is not Channel.CONTROL]
            return all(flow.is_idle for flow in flows)

    def stats(self) -> dict[str, dict[str, int]]:
        """Returns what was sent to and received from each peer."""
        peers = self._engine.protocol.peers if self._engine is not None else {}
        with self._changed:
            return {name: peer.stats() for name, peer in peers.items()}

    def _wait(self, condition: Callable[[], bool], timeout_seconds: float) -> bool:
        """Waits for a condition; a failure of the links' thread ends the wait."""

        def done() -> bool:
            self._running()
            return condition()

        started = perf_counter()
        try:
            with self._changed:
                if self._holds_back and not done():
                    self._wake()
                return self._changed.wait_for(done, min(timeout_seconds, threading.TIMEOUT_MAX))
        finally:
            if threading.get_ident() == self._waiter:
                self.waited_seconds += perf_counter() - started

    def let_go(self) -> None:
        """Lets what was held back leave if it is urgent and nothing is to leave with it."""
        if self._is_urgent and not self._holding:
            self._wake()

    def _wake(self) -> None:
        self._holds_back = self._is_urgent = False
        if self._engine is not None:
            self._engine.wake()

    def _running(self) -> Engine:
        if self._engine is None or self._closed:
            state = "closed" if self._closed else "not started"
            raise RuntimeError(f"the network of tier {self.tier!r} is {state}")
        if self._engine.failure is not None:
            raise RuntimeError(f"the links of tier {self.tier!r} failed") from self._engine.failure
        return self._engine

    def _peer(self, name: str) -> Peer:
        peers = self._running().protocol.peers
        if name not in peers:
            raise ValueError(
                f"tier {self.tier!r} has no peer {name!r}; its peers are {list(peers)}"
            )
        return peers[name]
