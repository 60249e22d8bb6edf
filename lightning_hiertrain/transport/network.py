"""The links of one tier to all others: nested values of tensors, sent by peer and tag."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path
from time import perf_counter
from traceback import format_exception
from types import TracebackType
from typing import Any

from lightning_hiertrain.errors import LinkTimeoutError
from lightning_hiertrain.topology import KEY_CHARACTERS, Topology
from lightning_hiertrain.transport.addresses import check_secure
from lightning_hiertrain.transport.connect import Connector
from lightning_hiertrain.transport.engine import Engine
from lightning_hiertrain.transport.farewell import Farewell
from lightning_hiertrain.transport.keys import check_private_key, check_tier_key, read_private_key
from lightning_hiertrain.transport.observing import Observer
from lightning_hiertrain.transport.peers import Peer, lost_error, timeout_error
from lightning_hiertrain.transport.protocol import Protocol
from lightning_hiertrain.transport.sockets import Channel
from lightning_hiertrain.transport.wire import encode

MAX_QUEUED_BYTES = 256 << 20
"""How much may wait to be sent to one peer before `send` waits too."""
SMALL_BYTES = 64 << 10
_STOP_SECONDS = 5.0


class Network:
    """The links of one tier; made by `Network.local` or `Network.from_topology`.

    Attributes:
        tier: The tier of this process.
        topology: Tiers and links.
        timeout_seconds: How long a wait lasts unless it is told otherwise.
        observer: Who is told what is sent and waited for; `None` for nobody.
    """

    def __init__(
        self,
        tier: str,
        topology: Topology,
        *,
        private_key: str | None,
        run_id: str | None,
        timeout_seconds: float,
        silence_seconds: float,
    ) -> None:
        topology.tier(tier)
        for name, seconds in (
            ("timeout_seconds", timeout_seconds),
            ("silence_seconds", silence_seconds),
        ):
            if not seconds > 0:
                raise ValueError(f"`{name}` must be above 0, got {seconds!r}")
        self.tier = tier
        self.topology = topology
        self.timeout_seconds = timeout_seconds
        self.observer: Observer | None = None
        self._silence_seconds = silence_seconds
        self._private_key = private_key
        self._run_id = run_id
        self._changed = threading.Condition()
        self._connector: Connector | None = None
        self._engine: Engine | None = None
        self._aborted = self._closed = False

    @classmethod
    def local(
        cls,
        tier: str,
        names: Iterable[str],
        *,
        run_id: str,
        timeout_seconds: float = 120.0,
        silence_seconds: float = 10.0,
    ) -> Network:
        """The links between processes of one user on this machine; needs no configuration.

        Args:
            tier: The tier of this process.
            names: All tiers, in order of rank.
            run_id: The same word on all tiers, and another one for every run.
            timeout_seconds: How long a wait lasts unless it is told otherwise.
            silence_seconds: After how long without a connection a peer counts as lost.
        """
        return cls(
            tier,
            Topology.local(names),
            private_key=None,
            run_id=run_id,
            timeout_seconds=timeout_seconds,
            silence_seconds=silence_seconds,
        )

    @classmethod
    def from_topology(
        cls,
        tier: str,
        topology: Topology,
        *,
        private_key: str | Path | None,
        timeout_seconds: float = 120.0,
        silence_seconds: float = 10.0,
    ) -> Network:
        """The links between machines.

        Args:
            tier: The tier of this process.
            topology: Tiers with their addresses and public keys, and links; the same on all tiers.
            private_key: This tier's private key or the file that holds it. `None` is allowed if no
                tier has keys and all addresses are this machine's own: then keys are made for the
                run.
            timeout_seconds: How long a wait lasts unless it is told otherwise.
            silence_seconds: After how long without a connection a peer counts as lost.

        Raises:
            ValueError: If keys or addresses are missing or do not fit.
        """
        if private_key is not None:
            is_key = (
                isinstance(private_key, str)
                and len(private_key) == KEY_CHARACTERS
                and not os.path.exists(private_key)
            )
            private_key = (
                check_private_key(str(private_key)) if is_key else read_private_key(private_key)
            )
        topology.tier(tier)
        secure = check_secure(topology, tier, has_private_key=private_key is not None)
        if secure and private_key is not None:
            check_tier_key(tier, topology, private_key)
        run = sha256(repr(topology.to_dict()).encode()).hexdigest()[:32]
        return cls(
            tier,
            topology,
            private_key=private_key,
            run_id=None if secure else f"topology-{run}",
            timeout_seconds=timeout_seconds,
            silence_seconds=silence_seconds,
        )

    def __enter__(self) -> Network:
        if self._engine is None:
            self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.abort("".join(format_exception(error)))
        self.close()

    @property
    def is_usable(self) -> bool:
        """Whether all peers can still be reached."""
        engine = self._engine
        return (
            engine is not None
            and engine.failure is None
            and not self._closed
            and not self._aborted
            and all(peer.lost is None for peer in engine.protocol.peers.values())
        )

    def start(self) -> None:
        """Listens for the tiers below, dials those above, and returns without waiting for them.

        Raises:
            LinkError: If an address to listen on cannot be had.
            ValueError: If the local run is already under way, or others can enter its directory.
        """
        if self._engine is not None or self._closed:
            raise RuntimeError(
                f"the network of tier {self.tier!r} was started before; make a new one"
            )
        connector = Connector(
            self.tier, self.topology, private_key=self._private_key, run_id=self._run_id
        )
        protocol = Protocol(
            self.tier,
            self.topology,
            connector.credentials,
            changed=self._changed,
            silence_seconds=self._silence_seconds,
            meet=connector.meet,
        )
        engine = Engine(protocol, self._changed)
        try:
            connector.listen(protocol.sockets)
        except BaseException:
            engine.stop(_STOP_SECONDS)
            connector.leave()
            raise
        self._connector, self._engine = connector, engine
        engine.start()

    def wait_for_peers(self, timeout_seconds: float | None = None) -> None:
        """Waits until this tier and every other one have heard from each other.

        Raises:
            LinkTimeoutError: If one is missing; the message names it and its address.
            PeerLostError: If one came and is gone.
        """
        timeout_seconds = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        peers = self._running().protocol.peers

        def all_here() -> bool:
            for peer in peers.values():
                if peer.lost is not None:
                    raise lost_error(self.tier, peer, "wait for all tiers", timeout_seconds)
            return all(peer.established for peer in peers.values())

        if not self._wait(all_here, timeout_seconds):
            missing = [peer for peer in peers.values() if not peer.established]
            raise LinkTimeoutError(
                f"tier {self.tier!r} waited {timeout_seconds:g} s for all tiers: "
                + "; ".join(self._describe_missing(peer) for peer in missing)
                + ". Start the missing tiers, and check addresses, firewalls and keys",
                tier=self.tier,
                peer=missing[0].name,
                operation="wait for all tiers",
                timeout_seconds=timeout_seconds,
            )

    def send(self, peer: str, tag: str, value: Any = None, *, control: bool | None = False) -> None:
        """Sends a value and returns at once; its tensors must not be changed any more.

        Args:
            peer: The tier that gets it.
            tag: The name under which it is received.
            value: What `pack` can take apart.
            control: Whether it is small and must not wait behind tensors; `None` for "if it is
                small". Order holds within each kind, not between them.

        Raises:
            TypeError: If the value holds something that cannot travel.
            PeerLostError: If the peer is gone.
            LinkTimeoutError: If too much waits to be sent already.
        """
        if tag.startswith("\0"):
            raise ValueError(f"the tag {tag!r} is reserved")
        engine, state, message = self._running(), self._peer(peer), encode(tag, value)
        observer = self.observer
        started = perf_counter() if observer is not None else 0.0
        small = message.total_bytes <= SMALL_BYTES if control is None else control
        channel, operation = Channel.CONTROL if small else Channel.DATA, f"send {tag}"

        def has_room() -> bool:
            if state.lost is not None:
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
            if observer is not None:
                observer.sent(peer, tag, message.total_bytes, started, perf_counter())
            engine.protocol.enqueue(state, message, channel)
        engine.wake()

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

        if not self._wait(all_arrived, timeout_seconds):
            state = next(state for state in states if state.queued_messages)
            raise timeout_error(
                self.tier,
                state,
                "flush",
                timeout_seconds,
                f"{state.queued_messages} messages have not been acknowledged",
            )

    def give_up(self, peer: str, reason: str) -> None:
        """Ends waits for a peer that has not come yet and, as is known elsewhere, never will."""
        state = self._peer(peer)
        with self._changed:
            if not state.established and state.lost is None:
                state.lost = reason
                self._changed.notify_all()

    def abort(self, reason: str, *, culprit: str | None = None) -> None:
        """Tells all peers that this tier ends with an error, which ends their waits too.

        Args:
            reason: What happened.
            culprit: The tier that failed first, if it is not this one.
        """
        if (
            self._engine is None
            or self._closed
            or self._aborted
            or self._engine.failure is not None
        ):
            return
        self._aborted = True
        Farewell(self._engine, self._wait).abort(reason, culprit)

    def close(self) -> None:
        """Sends what is still queued, says goodbye and closes the links."""
        if self._closed:
            return
        engine = self._engine
        if engine is not None and engine.failure is None and not self._aborted:
            Farewell(engine, self._wait).finish(self.timeout_seconds)
        self._closed = True
        if engine is not None:
            engine.stop(_STOP_SECONDS)
        if self._connector is not None:
            self._connector.leave()

    def bytes_per_second(self, peer: str) -> float | None:
        """Returns how fast tensors went to a peer lately, `None` if too few did to tell."""
        state = self._peer(peer)
        with self._changed:
            flow = state.outgoing.get(Channel.DATA)  # a lost peer has none
        return None if flow is None else flow.bytes_per_second

    def stats(self) -> dict[str, dict[str, int]]:
        """Returns what was sent to and received from each peer."""
        peers = self._engine.protocol.peers if self._engine is not None else {}
        with self._changed:
            return {
                name: {
                    "bytes_sent": peer.bytes_sent,
                    "bytes_received": peer.bytes_received,
                    "messages_sent": peer.messages_sent,
                    "messages_received": peer.messages_received,
                    "bytes_relayed": peer.bytes_relayed,
                    "chunks_replayed": sum(flow.num_replayed for flow in peer.outgoing.values()),
                    "chunks_doubled": sum(flow.num_doubled for flow in peer.incoming.values()),
                }
                for name, peer in peers.items()
            }

    # Waiting and ending

    def _wait(self, condition: Callable[[], bool], timeout_seconds: float) -> bool:
        """Waits for a condition; a failure of the links' thread ends the wait."""

        def done() -> bool:
            self._running()
            return condition()

        with self._changed:
            return self._changed.wait_for(done, min(timeout_seconds, threading.TIMEOUT_MAX))

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

    def _describe_missing(self, peer: Peer) -> str:
        assert self._connector is not None
        return self._connector.describe_missing(peer, self._running().protocol.sockets)
