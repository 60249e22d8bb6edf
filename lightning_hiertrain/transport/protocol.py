"""What a tier answers to frames and to time: meeting, relaying, acknowledging, losing.

Used by the network's own thread alone (`engine.py`). State that callers' threads share is changed
under the network's lock.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

from lightning_hiertrain.topology import Topology
from lightning_hiertrain.transport.admission import Credentials
from lightning_hiertrain.transport.goodput import GoodputMeter
from lightning_hiertrain.transport.liveness import Liveness
from lightning_hiertrain.transport.membership import Membership
from lightning_hiertrain.transport.packing import unpack
from lightning_hiertrain.transport.peers import Envelope, Peer, write_envelope
from lightning_hiertrain.transport.rendezvous import ProcessIdentity
from lightning_hiertrain.transport.sockets import Channel, Frame, Received, Sockets
from lightning_hiertrain.transport.wire import MalformedError, Message, Outgoing, encode

log = logging.getLogger(__name__)
_T = TypeVar("_T")

PROTOCOL = 3
_ORDERS = BYE, ABORT, LOST = "\0bye", "\0abort", "\0lost"
"""Tags of this layer's own messages."""
_HELLO_SECONDS = 0.2
_LITTLE_BYTES = 64 << 10


class Protocol:
    """The state of all peers of a tier and the frames exchanged with them.

    Args:
        tier: The tier of this process.
        topology: Tiers and links.
        credentials: Keys.
        changed: Guards what callers' threads share, and is notified when it changes.
        silence_seconds: After how long without a connection a peer is lost.
        meet: Called until it returns true; finds neighbours' keys and addresses, and dials them.
    """

    def __init__(
        self,
        tier: str,
        topology: Topology,
        credentials: Credentials,
        *,
        changed: threading.Condition,
        silence_seconds: float,
        meet: Callable[[Sockets], bool],
    ) -> None:
        self.tier = tier
        self.topology = topology
        self.session = secrets.token_hex(8)
        self.peers = {
            name: Peer(name=name, route=topology.route(tier, name))
            for name in topology.names
            if name != tier
        }
        self.membership = Membership(tier, self.peers)
        self.goodput = GoodputMeter(peers=self.peers)
        self.num_awaiting_arrival = 0
        """How many threads wait until all that was sent has arrived."""
        self._changed = changed
        heartbeat_seconds = min(5.0, max(0.5, silence_seconds / 2))
        self._beat_seconds = min(1.0, silence_seconds / 5)
        self._meet = meet
        self._met = False
        self._process = ProcessIdentity.current()
        self._links = sorted(link.name for link in topology.links)
        self._next_hello = self._next_beat = 0.0
        self.sockets = Sockets(
            credentials,
            num_links=len(topology.neighbours(tier)),
            heartbeat_seconds=heartbeat_seconds,
            on_up=self._on_up,
            on_unknown_key=self._try_to_meet,
        )
        self._liveness = Liveness(
            self.sockets, silence_seconds=silence_seconds, heartbeat_seconds=heartbeat_seconds
        )

    # What arrives

    def handle(self, item: Received) -> None:
        """Takes, relays or drops what has arrived."""
        try:
            envelope = Envelope.read(item.envelope)
            if envelope.source not in self.peers or envelope.target not in self.topology.names:
                raise MalformedError("an envelope that names an unknown tier")
            route = self.topology.route(envelope.source, envelope.target)
            place = route.index(self.tier) if self.tier in route else 0
            if place == 0 or route[place - 1] != item.neighbour:
                raise MalformedError("an envelope that should not have come this way")
            if envelope.target != self.tier:
                self._relay(item, self.peers[envelope.source], route[place + 1])
            else:
                self._take(self.peers[envelope.source], envelope, item)
        except MalformedError as error:
            self.sockets.warn_once(item.neighbour, error.kind, error.detail)

    def _relay(self, item: Received, source: Peer, next_hop: str) -> None:
        frames: list[Frame] = [item.envelope, *item.payload]
        if self.sockets.send(next_hop, item.channel, frames):
            source.bytes_relayed += sum(len(frame) for frame in item.payload)

    def _take(self, peer: Peer, envelope: Envelope, item: Received) -> None:
        if envelope.kind == "refuse":
            if envelope.target_session == self.session:
                reason = str(envelope.more.get("reason", ""))[:1000]
                self.lose(peer, reason, by_itself=True)
            return
        if peer.session is None and envelope.kind == "hello" and peer.lost is None:
            self._meet_peer(peer, envelope)
        if envelope.session != peer.session:
            if envelope.kind == "hello":
                self._refuse(peer, envelope)
            return
        if peer.lost is not None:
            if envelope.kind == "probe":  # it was given up, and does not know it
                reason = f"tier {self.tier!r} has gone on without it: {peer.lost}"
                self._send_control(peer, "refuse", envelope.session, reason=reason[:1000])
            return
        peer.last_heard = time.monotonic()
        if envelope.target_session != self.session:
            peer.unanswered = True
            return
        if not peer.established:
            peer.unanswered = True
            with self._changed:
                peer.established = True
                self._changed.notify_all()
        if envelope.kind == "ack":
            self._take_acknowledgement(peer, envelope)
        elif envelope.kind == "probe":
            peer.incoming[envelope.channel].probe(envelope.sequence, envelope.generation)
        elif envelope.kind == "chunk":
            self._take_chunk(peer, envelope, item)

    def _meet_peer(self, peer: Peer, envelope: Envelope) -> None:
        links, protocol = envelope.more.get("links"), envelope.more.get("protocol")
        if protocol != PROTOCOL or links != self._links:
            what = (
                f"its protocol is {protocol!r:.20}, this tier's {PROTOCOL}: "
                "install the same version on every tier"
                if protocol != PROTOCOL
                else f"its links are {links!r:.200}, this tier's {self._links}: "
                "give every tier the same topology"
            )
            reason = f"tier {peer.name!r} does not fit to tier {self.tier!r}: {what}"
            self._send_control(peer, "refuse", envelope.session, reason=reason)
            self.lose(peer, reason, by_itself=True)
            return
        peer.session = envelope.session
        peer.unanswered = True
        peer.process = ProcessIdentity.from_dict(envelope.more.get("process"))

    def _refuse(self, peer: Peer, envelope: Envelope) -> None:
        """Answers a process that came instead of one that was already known."""
        process = ProcessIdentity.from_dict(envelope.more.get("process"))
        if process is not None and process == peer.process:
            # It goes on to its next run; this one will follow, or has been told why it cannot.
            self.lose(peer, "it has left this run and begun another one", by_itself=True)
            return
        if peer.session is not None:
            self.lose(peer, "its process was started anew in the middle of the run")
        reason = (
            f"tier {self.tier!r} is in a run that began with another process of tier "
            f"{peer.name!r} ({peer.lost}); start all tiers anew"
        )
        self._send_control(peer, "refuse", envelope.session, reason=reason)

    def _take_acknowledgement(self, peer: Peer, envelope: Envelope) -> None:
        flow = peer.outgoing[envelope.channel]
        before = flow.in_flight_bytes
        num_messages, num_bytes = flow.acknowledge(envelope.sequence, envelope.echo)
        if envelope.channel is not Channel.CONTROL:
            self.goodput.acknowledged(peer, before - flow.in_flight_bytes)
        if num_messages:
            with self._changed:
                peer.queued_messages -= num_messages
                peer.queued_bytes[envelope.channel] -= num_bytes
                self._changed.notify_all()

    def _take_chunk(self, peer: Peer, envelope: Envelope, item: Received) -> None:
        if envelope.channel is not item.channel:
            raise MalformedError("a chunk on the connection of another channel")
        flow = peer.incoming[envelope.channel]
        pieces = [frame.buffer.cast("B") for frame in item.payload]
        before = flow.received
        messages = flow.accept(envelope.sequence, envelope.generation, envelope.lengths, pieces)
        if flow.received > before:
            peer.bytes_received += sum(piece.nbytes for piece in pieces)
        orders = [message for message in messages if message.tag in _ORDERS]
        values = [message for message in messages if message.tag not in _ORDERS]
        if values:
            with self._changed:
                for message in values:
                    peer.inbox[message.tag].append(message)
                peer.messages_received += len(values)
                self._changed.notify_all()
        for message in orders:
            self._obey(peer, message)
        if peer.closing_at is not None and peer.incoming[Channel.DATA].received >= peer.closing_at:
            self.lose(peer, "it has finished and closed its links", by_itself=True)

    def _obey(self, peer: Peer, message: Message) -> None:
        try:
            value = unpack(message.header, message.tensors)
            if message.tag == BYE:
                peer.closing_at = _checked(value, int)
                return
            said = _checked(value, dict)
            reason = _checked(said["reason"], str)
            if message.tag == LOST:
                gone = self.peers[_checked(said["tier"], str)]
                by_itself = _checked(said["by_itself"], bool)
                if peer.name in gone.route or self.membership.decides(peer.name, gone.name):
                    reason = f"tier {peer.name!r} reports: {reason}"
                    self.lose(gone, reason, by_itself=by_itself)
                return
            if said["culprit"] is None:
                reason = f"it ended with an error:\n{reason}"
            else:
                peer.culprit = self.topology.tier(_checked(said["culprit"], str)).name
                peer.through = f"as tier {peer.name!r} reports"
            # Who lost the way to another tier has not failed itself.
            self.lose(peer, reason, by_itself=peer.culprit is None)
        except (ValueError, KeyError) as error:
            raise MalformedError("a message of the link layer that cannot be read") from error

    # What leaves

    def enqueue(self, peer: Peer, message: Outgoing, channel: Channel) -> None:
        """Queues a message; any thread may call it that holds the lock."""
        peer.queued_bytes[channel] += message.total_bytes
        peer.queued_messages += 1
        peer.messages_sent += 1
        peer.bytes_sent += message.total_bytes
        peer.outgoing[channel].queue.append(message)

    def send_due(self) -> None:
        """Sends what may be sent now: greetings, chunks, acknowledgements."""
        for peer in self._living():
            if peer.unanswered:
                peer.unanswered = False
                self._greet(peer)
            if not peer.established:
                continue
            for channel in (Channel.CONTROL, Channel.DATA):
                self._send_chunks(peer, channel)
            if self.num_awaiting_arrival:
                self._ask_for_acknowledgement(peer)
            self._acknowledge(peer)
        self._send_ahead()

    def _send_ahead(self) -> None:
        """Sends what is needed later, on links that no tensors of the step are leaving by."""
        living = [peer for peer in self._living() if peer.established]
        taken = {peer.next_hop for peer in living if not peer.outgoing[Channel.DATA].is_idle}
        for peer in living:
            if peer.next_hop not in taken:
                self._send_chunks(peer, Channel.AHEAD)

    def _send_chunks(self, peer: Peer, channel: Channel) -> None:
        flow = peer.outgoing[channel]
        if not (flow.has_more and self.sockets.is_up(peer.next_hop, channel)):
            return
        while (chunk := flow.next_chunk()) is not None:
            more: dict[str, Any] = {"c": channel, "q": chunk.sequence, "g": flow.generation}
            if chunk.lengths is not None:
                more["l"] = chunk.lengths
            envelope = self._envelope(peer, "chunk", peer.session, **more)
            if not self.sockets.send(peer.next_hop, channel, [envelope, *chunk.views]):
                break  # a probe will find out
            if channel is not Channel.CONTROL:
                self.goodput.sent(peer)

    def _ask_for_acknowledgement(self, peer: Peer) -> None:
        """Asks whether small messages have arrived, once after the last one."""
        flow = peer.outgoing[Channel.CONTROL]
        if flow.unacknowledged and peer.asked_for < flow.sent:
            peer.asked_for = flow.sent
            self._probe(peer, Channel.CONTROL)

    def _acknowledge(self, peer: Peer, *, at_once: bool = False) -> None:
        """Acknowledges what has arrived; a few small messages wait until they are asked for."""
        for channel, flow in peer.incoming.items():
            is_little = flow.echo is None and flow.unanswered_bytes < _LITTLE_BYTES
            if channel is Channel.CONTROL and is_little and not at_once:
                continue
            if flow.acknowledgement_due:
                more: dict[str, Any] = {"c": channel, "q": flow.received}
                if flow.echo is not None:
                    more["p"] = flow.echo
                if self._send_control(peer, "ack", peer.session, **more):
                    flow.acknowledgement_due, flow.echo = False, None
                    flow.unanswered_bytes = 0

    def _greet(self, peer: Peer) -> None:
        if peer.established:
            self._probe(peer, Channel.CONTROL)
        else:
            process = asdict(self._process)
            more = {"protocol": PROTOCOL, "links": self._links, "process": process}
            self._send_control(peer, "hello", peer.session, **more)

    def _probe(self, peer: Peer, channel: Channel) -> None:
        flow = peer.outgoing[channel]
        more = {"c": channel, "q": flow.sent, "g": flow.generation}
        envelope = self._envelope(peer, "probe", peer.session, **more)
        self.sockets.send(peer.next_hop, channel, [envelope])

    def _send_control(self, peer: Peer, kind: str, session: str | None, **more: Any) -> bool:
        envelope = self._envelope(peer, kind, session, **more)
        return self.sockets.send(peer.next_hop, Channel.CONTROL, [envelope])

    def _envelope(self, peer: Peer, kind: str, session: str | None, **more: Any) -> bytes:
        return write_envelope(kind, self.tier, peer.name, self.session, session, **more)

    def _on_up(self, neighbour: str, channel: Channel) -> None:
        """A connection was made: what the old one held may be lost."""
        for peer in self._living():
            if peer.next_hop == neighbour:
                if channel is Channel.CONTROL:
                    self._liveness.connected(peer)
                    self._greet(peer)
                elif peer.established:
                    self._probe(peer, channel)

    # What time brings

    def tick(self, now: float) -> None:
        """Meets, greets, probes and looks after the peers; called every tenth of a second."""
        self._try_to_meet()
        hello, beat = now >= self._next_hello, now >= self._next_beat
        if hello:
            self._next_hello = now + _HELLO_SECONDS
        if beat:
            self._next_beat = now + self._beat_seconds
        for peer in self._living():
            if peer.lost is not None:
                continue  # with the one before it, which relayed to it
            if not peer.established:
                if hello:
                    self._greet(peer)
            elif beat:
                self._probe(peer, Channel.CONTROL)
                for channel in (Channel.DATA, Channel.AHEAD):
                    if peer.outgoing[channel].unacknowledged:
                        self._probe(peer, channel)
            reason = self._liveness.reason_to_lose(peer, now)
            if reason is not None:
                self.lose(peer, reason)

    def _try_to_meet(self) -> None:
        if not self._met:
            try:
                self._met = self._meet(self.sockets)
            except ValueError as error:
                for peer in self._living():
                    self.lose(peer, str(error))

    def _living(self) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.lost is None]

    def lose(self, peer: Peer, reason: str, *, by_itself: bool = False) -> None:
        """Marks a peer as lost, tells the tiers whom it concerns, and wakes waits.

        Args:
            peer: The tier.
            reason: What happened to it.
            by_itself: Whether it ended in order or with an error of its own.
        """
        if peer.lost is not None:
            return
        log.debug("tier %s lost tier %s: %s", self.tier, peer.name, reason)
        self._acknowledge(peer, at_once=True)  # it may be waiting for that to close
        with self._changed:
            peer.lost, peer.ended_by_itself = reason, by_itself
            peer.queued_messages = 0
            peer.queued_bytes = dict.fromkeys(Channel, 0)
            peer.outgoing = {}
            for other in self._living():
                relays = self.tier in self.topology.route(other.name, peer.name)
                if (other.is_neighbour and relays) or self.membership.decides(self.tier, peer.name):
                    told = {"tier": peer.name, "reason": reason, "by_itself": by_itself}
                    self.enqueue(other, encode(LOST, told), Channel.CONTROL)
            self._changed.notify_all()
        on_lost = self.membership.on_lost
        if on_lost is not None and self.membership.spares(peer.name):
            on_lost(peer.name)
        for other in self._living():
            if peer.name in other.route:
                other.culprit, other.through = peer.name, f"which relays to tier {other.name!r}"
                self.lose(other, reason, by_itself=by_itself)


def _checked(value: Any, kind: type[_T]) -> _T:
    if type(value) is not kind:
        raise MalformedError("a message of the link layer that cannot be read")
    return value
