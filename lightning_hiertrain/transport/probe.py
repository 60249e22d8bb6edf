"""Whether a machine refuses connections to a port: the process has ended, not the link."""

from __future__ import annotations

import errno
import ipaddress
import select
import socket

_PATIENCE_SECONDS = 2.0


class RefusalProbe:
    """Dials a port again and again without ever waiting.

    Args:
        host: An IP address; a name is never looked up, because that may take long.
        port: The port.
    """

    def __init__(self, host: str, port: int) -> None:
        self._address: tuple[str, int] | None = None
        try:
            self._is_v6 = ipaddress.ip_address(host).version == 6
            self._address = (host, port)
        except ValueError:
            pass
        self._socket: socket.socket | None = None
        self._begun = 0.0
        self._refused_since: float | None = None

    def refused_seconds(self, now: float) -> float:
        """Takes the next step and returns for how long every attempt has been refused."""
        if self._address is None:
            return 0.0
        if self._socket is None:
            family = socket.AF_INET6 if self._is_v6 else socket.AF_INET
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.setblocking(False)
            self._begun = now
            self._finish(self._socket.connect_ex(self._address), now)
        elif _is_writable(self._socket):
            self._finish(self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR), now)
        elif now - self._begun > _PATIENCE_SECONDS:
            self._finish(errno.ETIMEDOUT, now)
        return 0.0 if self._refused_since is None else now - self._refused_since

    def reset(self) -> None:
        """Forgets what was found."""
        if self._socket is not None:
            self._socket.close()
        self._socket = self._refused_since = None

    def _finish(self, code: int, now: float) -> None:
        if code in (errno.EINPROGRESS, errno.EWOULDBLOCK):
            return
        since = self._refused_since
        self.reset()
        if code == errno.ECONNREFUSED:
            self._refused_since = now if since is None else since


def _is_writable(connecting: socket.socket) -> bool:
    poller = select.poll()  # `select.select` fails where a thousand files are open
    poller.register(connecting, select.POLLOUT)
    return bool(poller.poll(0))
