"""The ZeroMQ side of a tier: a listening socket, three dialled ones for each tier above, keys.

    lower tier                                        higher tier
    DEALER control  ----- one TCP connection ----->   ROUTER (one port for all the tiers below)
    DEALER data     ----- one TCP connection ----->
    DEALER ahead    ----- one TCP connection ----->

Small messages never wait behind tensors because each channel has a connection of its own. The
object belongs to one thread; encryption and TCP run in ZeroMQ's own threads. A connection that
breaks is made anew with nothing left in it: what it held is lost, and `flow.py` sends it again.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import zmq

# Its exit handler ends all sending without copies; imported here, it runs after those registered
# later, which may close a network in order.
import zmq.utils.garbage
from zmq.utils.monitor import recv_monitor_message

from lightning_hiertrain.transport.admission import Admission, Credentials
from lightning_hiertrain.transport.dialled import (
    BROKEN,
    MAX_ENVELOPE_BYTES,
    DialledConnection,
    explain,
    set_common_options,
    tcp_host,
)

log = logging.getLogger(__name__)

MAX_FRAMES = 256
_BATCH = 16
_MAX_WARNINGS = 1000

Frame = zmq.Frame | memoryview | bytes


class Channel(IntEnum):
    """The connections of a pair of neighbours, most urgent first."""

    CONTROL = 0
    """Small messages."""
    DATA = 1
    """Tensors that the step waits for."""
    AHEAD = 2
    """What is needed later: it leaves when no tensors of `DATA` are on their way."""


@dataclass(frozen=True, kw_only=True)
class Received:
    """A message of frames with the neighbour and the channel on which it came."""

    neighbour: str
    channel: Channel
    envelope: bytes
    payload: list[zmq.Frame]


class Sockets:
    """All sockets of a tier.

    Args:
        credentials: Keys; neighbours may be added later.
        num_links: How many neighbours there will be.
        heartbeat_seconds: How long a dialled connection may be silent before it counts as broken.
        on_up: Called with neighbour and channel when a connection has been made.
        on_unknown_key: Called when a key that is not listed asks to come in, before it is refused;
            may list more keys.
    """

    def __init__(
        self,
        credentials: Credentials,
        *,
        num_links: int,
        heartbeat_seconds: float,
        on_up: Callable[[str, Channel], None],
        on_unknown_key: Callable[[], None],
    ) -> None:
        self._credentials = credentials
        self._heartbeat_seconds = heartbeat_seconds
        self._on_up = on_up
        self._context = zmq.Context(io_threads=max(2, min(2 * num_links, 6)))
        self._context.set(zmq.MAX_SOCKETS, 1023)
        self._poller = zmq.Poller()
        self._admission = Admission(self._context, self._poller, credentials, on_unknown_key)
        self._router: zmq.Socket[bytes] | None = None
        self._dialled: dict[tuple[str, Channel], DialledConnection] = {}
        self._routing_ids: dict[tuple[str, Channel], bytes] = {}
        self._sources: dict[bytes, tuple[str, Channel]] = {}
        self._warned: set[tuple[str, str]] = set()
        self.closed = False

    def listen(self, host: str, port: int | None) -> int:
        """Opens the listening socket on one more address and returns the port.

        Raises:
            zmq.ZMQError: If the address cannot be had.
        """
        if self._router is None:
            router = self._context.socket(zmq.ROUTER)
            set_common_options(router)
            router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._admission.guard(router)
            self._set_heartbeat(router)
            self._router = router
            self._poller.register(router, zmq.POLLIN)
        address = f"tcp://{tcp_host(host)}"
        if port is None:
            return int(self._router.bind_to_random_port(address))
        self._router.bind(f"{address}:{port}")
        return port

    def dial(self, neighbour: str, host: str, port: int) -> None:
        """Starts to connect to a tier above; its key must be known."""
        for channel in Channel:
            self._dialled[neighbour, channel] = DialledConnection(host, port)
            self._open(neighbour, channel)

    def watch(self, descriptor: int) -> None:
        """Lets `poll` return when a file descriptor is readable."""
        self._poller.register(descriptor, zmq.POLLIN)

    def is_up(self, neighbour: str, channel: Channel) -> bool:
        """Tells whether a connection stands, as far as is known."""
        dialled = self._dialled.get((neighbour, channel))
        return dialled.up if dialled is not None else (neighbour, channel) in self._routing_ids

    def failure(self, neighbour: str) -> str:
        """Says what was last wrong with the connection to a dialled neighbour."""
        dialled = self._dialled.get((neighbour, Channel.CONTROL))
        return dialled.failure if dialled is not None else ""

    def refused_seconds(self, neighbour: str, now: float) -> float:
        """Returns for how long a dialled neighbour's machine has refused connections."""
        dialled = self._dialled.get((neighbour, Channel.CONTROL))
        return dialled.probe.refused_seconds(now) if dialled is not None else 0.0

    def send(self, neighbour: str, channel: Channel, frames: Sequence[Frame]) -> bool:
        """Sends frames, or returns false if there is no connection."""
        try:
            dialled = self._dialled.get((neighbour, channel))
            if dialled is not None:
                if not dialled.up or dialled.socket is None:
                    return False
                dialled.socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=False)
                return True
            routing_id = self._routing_ids.get((neighbour, channel))
            if routing_id is None or self._router is None:
                return False
            self._router.send_multipart([routing_id, *frames], flags=zmq.NOBLOCK, copy=False)
            return True
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN, errno.ECONNRESET):
                raise
            if error.errno == zmq.EHOSTUNREACH:
                self._forget(neighbour, channel)
            return False

    def poll(self, timeout_seconds: float) -> list[Received]:
        """Waits for frames, at most so long, and deals with keys and connections meanwhile."""
        now = time.monotonic()
        for (neighbour, channel), dialled in self._dialled.items():
            if dialled.socket is None:
                if now >= dialled.retry_at:
                    self._open(neighbour, channel)
                else:
                    timeout_seconds = min(timeout_seconds, dialled.retry_at - now)
        ready = dict(self._poller.poll(max(0, int(timeout_seconds * 1000 + 0.999))))
        received: list[Received] = []
        self._admission.serve(ready)
        if self._router is not None and self._router in ready:
            self._receive_from_below(received)
        for (neighbour, channel), dialled in self._dialled.items():
            if dialled.socket is not None and dialled.socket in ready:
                for frames in _drain(dialled.socket):
                    self._append(received, neighbour, channel, frames)
        for (neighbour, channel), dialled in self._dialled.items():
            if dialled.monitor is not None and dialled.monitor in ready:
                self._watch_connection(neighbour, channel, dialled)
        return received

    def warn_once(self, neighbour: str, what: str, detail: str = "") -> None:
        """Logs that frames of a neighbour were dropped, the first time for each kind."""
        if (neighbour, what) not in self._warned and len(self._warned) < _MAX_WARNINGS:
            self._warned.add((neighbour, what))
            said = f"{what} {detail}".strip()
            log.warning(
                "dropped frames from tier %s: %s; more of this kind go unsaid", neighbour, said
            )

    def close(self) -> None:
        """Closes every socket; what has been handed to them gets a moment to leave."""
        if self.closed:
            return
        self.closed = True
        for dialled in self._dialled.values():
            dialled.close(self._poller, linger_milliseconds=200)
        self._admission.close()
        if self._router is not None:
            self._router.close(linger=200)
        self._context.term()

    def _open(self, neighbour: str, channel: Channel) -> None:
        dialled = self._dialled[neighbour, channel]
        socket = self._context.socket(zmq.DEALER)
        set_common_options(socket)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._credentials.public_key.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._credentials.private_key.encode())
        socket.setsockopt(zmq.CURVE_SERVERKEY, self._credentials.neighbours[neighbour].encode())
        if channel is Channel.CONTROL:  # the other connections are made anew with it
            self._set_heartbeat(socket)
        dialled.monitor = socket.get_monitor_socket(zmq.EVENT_ALL)
        dialled.socket = socket
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(dialled.monitor, zmq.POLLIN)
        socket.connect(dialled.address)

    def _set_heartbeat(self, socket: zmq.Socket[bytes]) -> None:
        milliseconds = int(self._heartbeat_seconds * 1000)
        socket.setsockopt(zmq.HEARTBEAT_IVL, max(100, milliseconds // 4))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, milliseconds)

    def _watch_connection(
        self, neighbour: str, channel: Channel, dialled: DialledConnection
    ) -> None:
        while dialled.monitor is not None and dialled.monitor.poll(0):
            event = recv_monitor_message(dialled.monitor)["event"]
            if event == zmq.Event.HANDSHAKE_SUCCEEDED and dialled.socket is not None:
                dialled.up, dialled.num_failures, dialled.failure = True, 0, ""
                dialled.probe.reset()
                dialled.socket.send_multipart(
                    [b"link", str(int(channel)).encode()], flags=zmq.NOBLOCK
                )
                self._on_up(neighbour, channel)
            elif event in BROKEN:
                self._break(neighbour, channel, explain(event))
                if channel is Channel.CONTROL:
                    for other in (Channel.DATA, Channel.AHEAD):
                        self._break(neighbour, other, explain(event))

    def _break(self, neighbour: str, channel: Channel, failure: str) -> None:
        dialled = self._dialled[neighbour, channel]
        log.debug(
            "the %s connection to tier %s broke: %s", channel.name.lower(), neighbour, failure
        )
        dialled.close(self._poller, linger_milliseconds=0)
        dialled.failure = failure
        dialled.retry_at = time.monotonic() + min(1.0, 0.05 * 2**dialled.num_failures)
        dialled.num_failures = min(dialled.num_failures + 1, 5)

    def _receive_from_below(self, received: list[Received]) -> None:
        assert self._router is not None
        for frames in _drain(self._router):
            if len(frames) < 2:
                continue
            routing_id = frames[0].bytes
            neighbour = _user_id(frames[1])
            if frames[1].bytes == b"link" and len(frames) == 3:
                self._enter(neighbour, frames[2].bytes, routing_id)
                continue
            source = self._sources.get(routing_id)
            if source is None or source[0] != neighbour:
                self.warn_once(neighbour, "frames on a connection that was not announced")
                continue
            self._append(received, *source, frames[1:])

    def _enter(self, neighbour: str, channel_text: bytes, routing_id: bytes) -> None:
        if channel_text not in [str(int(channel)).encode() for channel in Channel]:
            self.warn_once(neighbour, "an unknown channel")
            return
        key = (neighbour, Channel(int(channel_text)))
        self._sources.pop(self._routing_ids.get(key, b""), None)
        self._routing_ids[key] = routing_id
        self._sources[routing_id] = key
        self._on_up(*key)

    def _forget(self, neighbour: str, channel: Channel) -> None:
        self._sources.pop(self._routing_ids.pop((neighbour, channel), b""), None)

    def _append(
        self, received: list[Received], neighbour: str, channel: Channel, frames: list[zmq.Frame]
    ) -> None:
        envelope, *payload = frames
        if len(envelope) > MAX_ENVELOPE_BYTES or len(payload) > MAX_FRAMES:
            self.warn_once(neighbour, "too many or too long frames")
            return
        received.append(
            Received(neighbour=neighbour, channel=channel, envelope=envelope.bytes, payload=payload)
        )


def _drain(socket: zmq.Socket[bytes]) -> list[list[zmq.Frame]]:
    messages: list[list[zmq.Frame]] = []
    try:
        while len(messages) < _BATCH:
            messages.append(socket.recv_multipart(flags=zmq.NOBLOCK, copy=False))
    except zmq.Again:
        pass
    return messages


def _user_id(frame: zmq.Frame) -> str:
    """Returns the tier whose key the sender of a frame has."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""
