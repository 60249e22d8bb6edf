"""Who may come in: the keys of the neighbouring tiers, and nobody else.

ZeroMQ asks here about every key that has proved itself in the CURVE handshake (ZAP,
rfc.zeromq.org/spec/27). Who does not get as far as that, because it has no key, encrypts for
another tier's key or says nothing at all, is known from the listening socket's monitor. Each kind
of stranger is logged once: who scans ports must not fill the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

log = logging.getLogger(__name__)

ZAP_DOMAIN = b"hiertrain"
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_MONITOR_ADDRESS = "inproc://hiertrain.listening"
_FAILURES = zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
"""Not `ACCEPT_FAILED`, which comes without end while this process has too many files open."""
_OPEN_FILES = 4096
"""Strangers' connections are files too; each is closed when it has not shown a key within 10 s."""
_UNENCRYPTED = zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH


@dataclass(kw_only=True)
class Credentials:
    """This tier's keys and those of its neighbours, as they become known."""

    public_key: str
    private_key: str = field(repr=False)
    neighbours: dict[str, str] = field(default_factory=dict)
    """Public key by name."""

    def owner_of(self, public_key: str) -> str | None:
        """Returns the neighbour whose key this is."""
        return next((name for name, key in self.neighbours.items() if key == public_key), None)


class Admission:
    """Lets neighbours in and logs who else has tried.

    Args:
        context: The context of the sockets.
        poller: Told what to look at; `serve` is then called with what is ready.
        credentials: The keys.
        on_unknown_key: Called when a key that is not listed asks to come in, before it is refused;
            may list more keys.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        poller: zmq.Poller,
        credentials: Credentials,
        on_unknown_key: Callable[[], None],
    ) -> None:
        self._context = context
        self._poller = poller
        self._credentials = credentials
        self._on_unknown_key = on_unknown_key
        self._warned: set[str] = set()
        self._zap = context.socket(zmq.REP)
        self._zap.bind(_ZAP_ADDRESS)
        poller.register(self._zap, zmq.POLLIN)
        self._listening: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None

    def guard(self, listening: zmq.Socket[bytes]) -> None:
        """Demands keys on a listening socket, before it is bound."""
        _allow_open_files(_OPEN_FILES)
        listening.setsockopt(zmq.CURVE_SERVER, 1)
        listening.setsockopt(zmq.CURVE_SECRETKEY, self._credentials.private_key.encode())
        listening.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        listening.monitor(_MONITOR_ADDRESS, _FAILURES)
        self._listening, self._monitor = listening, self._context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.RCVHWM, 0)  # else a flood of them holds up all connections
        self._monitor.connect(_MONITOR_ADDRESS)
        self._poller.register(self._monitor, zmq.POLLIN)

    def serve(self, ready: Collection[object]) -> None:
        """Answers who asks to come in, and notes who has given up."""
        if self._zap in ready:
            self._answer()
        while self._monitor is not None and self._monitor in ready and self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            self._note(event["event"], event["value"])

    def close(self) -> None:
        """Closes the sockets, while the listening one is still open."""
        if self._listening is not None and self._monitor is not None:
            self._listening.disable_monitor()
            self._monitor.close(linger=0)
        self._zap.close(linger=200)

    def _answer(self) -> None:
        request = self._zap.recv_multipart()
        version, request_id, domain, address = (*request, b"", b"", b"", b"")[:4]
        neighbour = None
        if len(request) == 7 and domain == ZAP_DOMAIN and request[5] == b"CURVE":
            key = z85.encode(request[6]).decode()
            if self._credentials.owner_of(key) is None:
                self._on_unknown_key()
            neighbour = self._credentials.owner_of(key)
        if neighbour is None:
            where = address.decode(errors="replace")
            why = "its key is not that of a neighbouring tier"
            self._warn(f"refused a connection from {where}", why)
            self._zap.send_multipart([version, request_id, b"400", b"not on the list", b"", b""])
        else:
            self._zap.send_multipart([version, request_id, b"200", b"OK", neighbour.encode(), b""])

    def _note(self, event: int, value: int) -> None:
        if event == zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:
            self._warn("lost a connection", "it had shown no key, as a port scan or a broken link")
        elif value == _UNENCRYPTED:
            self._warn("refused a connection", "it was not encrypted")
        else:
            self._warn("refused a connection", "it was not encrypted with this tier's key")

    def _warn(self, what: str, why: str) -> None:
        level = logging.DEBUG if why in self._warned else logging.WARNING
        self._warned.add(why)
        log.log(level, "%s: %s; more of this kind go unsaid", what, why)


def _allow_open_files(count: int) -> None:
    """Raises this process's limit, as far as it may: the usual one is 1024."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
