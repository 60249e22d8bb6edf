"""All who might knock at a tier's port and must stay outside; a module to attack runs with."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterable, Iterator

import zmq

from tests.unit.transport.helpers import plain_client

NOT_LISTED = "its key is not that of a neighbouring tier"
UNENCRYPTED = "it was not encrypted;"
OTHER_KEY = "it was not encrypted with this tier's key"
NO_KEY = "it had shown no key"


def knock(port: int, public_key: str) -> dict[str, str]:
    """Lets each kind of client without a listed key try to come in.

    Args:
        port: Where a tier listens.
        public_key: That tier's.

    Returns:
        By kind, how ZeroMQ says that it ended.
    """
    public, private = zmq.curve_keypair()
    own = {"curve_publickey": public, "curve_secretkey": private}
    return {
        "a wrong key": plain_client(port, **own, curve_serverkey=public_key.encode()),
        "a wrong key of the tier": plain_client(
            port, **own, curve_serverkey=zmq.curve_keypair()[0]
        ),
        "no key": plain_client(port),
        "a password": plain_client(port, plain_username=b"device", plain_password=b"device"),
    }


def scan(port: int) -> None:
    """Does what port scanners do: looks whether a port is open, and what answers to a few words."""
    for words in (None, b"", b"GET / HTTP/1.0\r\n\r\n", b"\x16\x03\x01\x00\xa5\x01", b"\xff" * 64):
        with socket.create_connection(("127.0.0.1", port), 5) as client:
            if words is not None:
                client.settimeout(0.2)
                with contextlib.suppress(OSError):  # it may be shown the door at any moment
                    client.sendall(words)
                    client.shutdown(socket.SHUT_WR)
                    while client.recv(4096):
                        pass


def replay(port: int, recordings: Iterable[bytes]) -> None:
    """Sends what connections of a listed tier have sent before, once more."""
    for recording in recordings:
        with socket.create_connection(("127.0.0.1", port), 5) as client:
            client.settimeout(1.0)
            with contextlib.suppress(OSError):
                # ZeroMQ's greeting and the client's first word are answered, the rest is refused.
                client.sendall(recording)
                while client.recv(4096):
                    pass


@contextlib.contextmanager
def idle_connections(port: int, count: int) -> Iterator[Callable[[], int]]:
    """Opens connections that say nothing; the function that it gives tells how many stand."""
    clients: list[socket.socket] = []
    try:
        for _ in range(count):
            clients.append(socket.create_connection(("127.0.0.1", port), 5))
        yield lambda: len(clients)
    finally:
        for client in clients:
            client.close()
