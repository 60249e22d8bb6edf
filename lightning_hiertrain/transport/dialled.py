"""One dialled ZeroMQ connection, and the options that all connections share."""

from __future__ import annotations

from typing import Any

import zmq

from lightning_hiertrain.transport.probe import RefusalProbe
from lightning_hiertrain.transport.wire import MAX_CHUNK_BYTES

MAX_ENVELOPE_BYTES = 64 << 10
BROKEN = (
    zmq.Event.DISCONNECTED,
    zmq.Event.HANDSHAKE_FAILED_AUTH,
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL,
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL,
)


class DialledConnection:
    """One connection to a tier above, or the plan to make it."""

    def __init__(self, host: str, port: int) -> None:
        self.address = f"tcp://{tcp_host(host)}:{port}"
        self.probe = RefusalProbe(host, port)
        self.socket: zmq.Socket[bytes] | None = None
        self.monitor: zmq.Socket[bytes] | None = None
        self.up = False
        self.failure = ""
        self.retry_at = 0.0
        self.num_failures = 0

    def close(self, poller: zmq.Poller, *, linger_milliseconds: int) -> None:
        self.up = False
        self.probe.reset()
        if self.socket is None or self.monitor is None:
            return
        poller.unregister(self.socket)
        poller.unregister(self.monitor)
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=linger_milliseconds)
        self.socket = self.monitor = None


def set_common_options(socket: zmq.Socket[bytes]) -> None:
    """Sets what holds for listening and for dialled sockets."""
    options: dict[int, Any] = {
        zmq.MAXMSGSIZE: MAX_CHUNK_BYTES + MAX_ENVELOPE_BYTES,
        zmq.SNDHWM: 0,  # `flow.py` bounds what is on its way
        zmq.RCVHWM: 0,
        zmq.LINGER: 0,
        zmq.IPV6: 1,
        zmq.HANDSHAKE_IVL: 10_000,
        zmq.CONNECT_TIMEOUT: 2_000,
        zmq.RECONNECT_IVL: 100,
        zmq.RECONNECT_IVL_MAX: 1_000,
        zmq.TCP_KEEPALIVE: 1,
        zmq.TCP_KEEPALIVE_IDLE: 10,
        zmq.TCP_KEEPALIVE_INTVL: 5,
        zmq.TCP_KEEPALIVE_CNT: 3,
        zmq.TCP_MAXRT: 15_000,
    }
    for option, value in options.items():
        socket.setsockopt(option, value)


def explain(event: int) -> str:
    """Says what the end of a connection means."""
    if event == zmq.Event.HANDSHAKE_FAILED_AUTH:
        return "it refused this tier's key"
    if event in BROKEN[1:]:
        return "what answered there does not hold that tier's key"
    return "the connection was closed"


def tcp_host(host: str) -> str:
    """Returns a host as a ZeroMQ address has it."""
    return f"[{host}]" if ":" in host else host
