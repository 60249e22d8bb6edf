"""The thread that owns a tier's sockets.

One thread for all links, because the tiers below dial a single port and a ZeroMQ socket belongs to
one thread. It only moves pointers and fills tensors: encryption and TCP, which take the time, run
in ZeroMQ's own threads, and packing and unpacking in the callers'.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator

from lightning_hiertrain.transport.protocol import Protocol

log = logging.getLogger(__name__)

_TICK_SECONDS = 0.1


class Engine:
    """Runs a protocol until it is stopped.

    Args:
        protocol: What to run; its sockets belong to the thread once it has started.
        changed: Notified when the thread ends.
    """

    def __init__(self, protocol: Protocol, changed: threading.Condition) -> None:
        self.protocol = protocol
        self.failure: BaseException | None = None
        self._changed = changed
        self._stopping = self._is_told = False
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        protocol.sockets.watch(self._wake_receiver.fileno())
        name = f"hiertrain-links-{protocol.tier}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self, timeout_seconds: float) -> None:
        """Ends the thread and closes the sockets."""
        self._stopping = True
        self.wake()
        if self._thread.ident is None:
            self.protocol.sockets.close()
        else:
            self._thread.join(timeout_seconds)
        if not self._thread.is_alive():
            self._wake_receiver.close()
            self._wake_sender.close()

    def wake(self) -> None:
        """Tells the thread that there is something to send, once until it looks."""
        if self._is_told:
            return
        self._is_told = True
        with contextlib.suppress(OSError):  # it has been told already, or has ended
            self._wake_sender.send(b"\0")

    @contextlib.contextmanager
    def arrival_awaited(self) -> Iterator[None]:
        """Lets peers say at once, rather than at the next beat, what has arrived."""
        with self._changed:
            self.protocol.num_awaiting_arrival += 1
        self.wake()
        try:
            yield
        finally:
            with self._changed:
                self.protocol.num_awaiting_arrival -= 1

    def _run(self) -> None:
        protocol, next_tick = self.protocol, 0.0
        try:
            while not self._stopping:
                received = protocol.sockets.poll(max(0.0, next_tick - time.monotonic()))
                with contextlib.suppress(BlockingIOError):
                    while self._wake_receiver.recv(4096):
                        pass
                self._is_told = False  # from here on it sees what is queued
                for item in sorted(received, key=lambda item: item.channel):
                    protocol.handle(item)
                now = time.monotonic()
                if now >= next_tick:
                    next_tick = now + _TICK_SECONDS
                    protocol.tick(now)
                protocol.send_due()
        except BaseException as error:
            log.debug("the links of tier %s failed", protocol.tier, exc_info=True)
            self.failure = error
        finally:
            try:
                protocol.sockets.close()
            finally:
                with self._changed:
                    self._changed.notify_all()
