"""Networks of one process over real sockets, and a TCP proxy that breaks their connections."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import zmq

from lightning_hiertrain import topology as data
from lightning_hiertrain.transport import Network, make_keys
from lightning_hiertrain.transport.sockets import Channel
from tests.distributed.launch import free_ports

TIERS = ("device", "edge", "cloud")
CHAIN = (("device", "edge"), ("edge", "cloud"))


def make_topology(
    folder: Path, links=CHAIN, *, through: dict[tuple[str, str], int] | None = None
) -> data.Topology:
    """A topology with keys on free ports; `through` gives links the port of a proxy."""
    names = [name for name in TIERS if any(name in link for link in links)]
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    through = through or {}
    topology = data.Topology(
        tiers=tuple(data.Tier(name=name, address=f"127.0.0.1:{ports[name]}") for name in names),
        links=tuple(
            data.Link(
                between=link,
                address=f"127.0.0.1:{through[link]}" if link in through else None,
            )
            for link in links
        ),
    )
    return make_keys(topology, folder)


@contextlib.contextmanager
def started(folder: Path, topology: data.Topology, **options) -> Iterator[dict[str, Network]]:
    """All tiers of a topology in this process, met."""
    options = {"timeout_seconds": 20.0, **options}
    networks = {
        name: Network.from_topology(name, topology, private_key=folder / f"{name}.key", **options)
        for name in topology.names
    }
    with contextlib.ExitStack() as stack:
        for network in networks.values():
            network.start()
            stack.callback(network.close)
        for network in networks.values():
            network.wait_for_peers(20.0)
        yield networks
        closing = [threading.Thread(target=network.close) for network in networks.values()]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(30.0)


class Proxy:
    """Passes TCP connections on to a port of this machine until told to break them.

    Args:
        bytes_per_second: What it passes on at most, both directions together. A pause that took
            too long is made up for, so that this is the rate also where the processor is busy.
    """

    _CATCH_UP_SECONDS = 0.05

    def __init__(self, bytes_per_second: float | None = None) -> None:
        self._bytes_per_second = bytes_per_second
        self._free_at = 0.0
        self.target = 0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._wake, self._waker = socket.socketpair()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._other: dict[socket.socket, socket.socket] = {}
        self._lock = threading.Lock()
        self._accepting = self._passing = True
        self._open = True
        self.num_cut = 0
        self.heard: dict[socket.socket, bytearray] = {}
        """By connection, what those who dial have sent."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._open = False
        self._waker.send(b"x")
        self._thread.join(10.0)
        self.cut()
        for each in (self._server, self._wake, self._waker):
            each.close()
        self._selector.close()

    def cut(self, *, accepting: bool = True) -> None:
        """Closes all connections, with what is in them."""
        with self._lock:
            self._accepting = accepting
            for each in list(self._other):
                self.num_cut += 1
                self._drop(each)

    def inject(self) -> None:
        """Puts what was heard on each connection into it once more."""
        with self._lock:
            for client in list(self._other):
                if client in self.heard:
                    self._other[client].sendall(bytes(self.heard[client]))

    def block(self, blocked: bool) -> None:
        """Passes nothing on while blocked, as a cable that was pulled out."""
        with self._lock:
            self._passing = not blocked
        self._waker.send(b"x")

    def _run(self) -> None:
        while self._open:
            events = self._selector.select(0.05)
            with self._lock:
                for key, _ in events:
                    self._serve(key.fileobj)

    def _serve(self, ready: socket.socket) -> None:
        if ready is self._wake:
            self._wake.recv(100)
        elif not self._passing:
            threading.Event().wait(0.01)
        elif ready is self._server:
            client, _ = self._server.accept()
            if not self._accepting:
                client.close()
                return
            try:
                upstream = socket.create_connection(("127.0.0.1", self.target), 5)
            except OSError:
                client.close()
                return
            self._other.update({client: upstream, upstream: client})
            self.heard[client] = bytearray()
            for each in (client, upstream):
                self._selector.register(each, selectors.EVENT_READ)
        elif ready in self._other:
            try:
                piece = ready.recv(1 << (14 if self._bytes_per_second else 18))
                if not piece:
                    raise ConnectionError
                if ready in self.heard:
                    self.heard[ready] += piece
                self._other[ready].settimeout(5)
                self._other[ready].sendall(piece)
                if self._bytes_per_second:
                    self._pause(len(piece) / self._bytes_per_second)
            except OSError:
                self._drop(ready)

    def _pause(self, seconds: float) -> None:
        now = time.monotonic()
        self._free_at = max(self._free_at, now - self._CATCH_UP_SECONDS) + seconds
        threading.Event().wait(max(0.0, self._free_at - now))

    def _drop(self, end: socket.socket) -> None:
        for each in (end, self._other.get(end)):
            if each is not None and self._other.pop(each, None) is not None:
                self._selector.unregister(each)
                each.close()


def plain_client(port: int, **options: bytes) -> str:
    """Tries to get in with a client of one's own; returns what became of it."""
    context = zmq.Context()
    client = context.socket(zmq.DEALER)
    try:
        for name, value in options.items():
            client.setsockopt(getattr(zmq, name.upper()), value)
        client.setsockopt(zmq.LINGER, 0)
        monitor = client.get_monitor_socket()
        client.connect(f"tcp://127.0.0.1:{port}")
        bad = ("HANDSHAKE_FAILED", "DISCONNECTED", "HANDSHAKE_SUCCEEDED")
        from zmq.utils.monitor import recv_monitor_message

        while monitor.poll(5000):
            name = zmq.Event(recv_monitor_message(monitor)["event"]).name
            if name.startswith(bad):
                return name
        return "no answer"
    finally:
        client.disable_monitor()
        client.close()
        context.destroy(linger=0)


def send_raw(network: Network, messages: list[list[bytes]]) -> None:
    """Lets the thread that owns the sockets send frames as they are."""
    protocol, tick, done = (
        network._engine.protocol,
        network._engine.protocol.tick,
        threading.Event(),
    )

    def tick_and_send(now: float) -> None:
        if not done.is_set():
            for frames in messages:
                protocol.sockets.send("edge", Channel.DATA, frames)
            done.set()
        tick(now)

    protocol.tick = tick_and_send
    assert done.wait(5.0)
    protocol.tick = tick
