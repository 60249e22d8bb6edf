"""Holds packets back: the latency of a link whose kernel has no netem.

    python relay.py SECONDS /run/netns/NAME:INTERFACE /run/netns/NAME:INTERFACE

makes a TUN interface in each of two network namespaces and hands every packet that leaves through
one to the other, SECONDS later. It ends when its standard input closes. Needs nothing installed.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress

CLONE_NEWNET = 0x40000000
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
TUNSETIFF = 0x400454CA
LARGEST_PACKET = 65_536
AT_A_TIME = 64
"""Packets read from one side before the other has its turn."""


def open_tun(namespace: str, interface: str) -> int:
    """Makes a TUN interface inside a network namespace and returns its descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    inside = os.open(namespace, os.O_RDONLY)
    if libc.setns(inside, CLONE_NEWNET) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{namespace} cannot be entered: {os.strerror(error)}")
    os.close(inside)
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH22x", interface.encode(), IFF_TUN | IFF_NO_PI)
    fcntl.ioctl(tun, TUNSETIFF, request)
    return tun


def relay(first: int, second: int, seconds: float, stop: int) -> None:
    """Carries packets both ways until `stop` closes."""
    targets = {first: second, second: first}
    waiting: deque[tuple[float, int, bytes]] = deque()
    read, write, now = os.read, os.write, time.monotonic
    while True:
        patience = max(0.0, waiting[0][0] - now()) if waiting else None
        readable, _, _ = select.select([first, second, stop], [], [], patience)
        for source in readable:
            if source == stop:
                return
            target, due = targets[source], now() + seconds
            with suppress(BlockingIOError):
                for _ in range(AT_A_TIME):
                    waiting.append((due, target, read(source, LARGEST_PACKET)))
        time_now = now()
        while waiting and waiting[0][0] <= time_now:
            _, target, packet = waiting.popleft()
            with suppress(OSError):  # a full queue or an interface that is down loses it
                write(target, packet)


def main() -> None:
    """Runs the relay."""
    seconds, *places = sys.argv[1:]
    first, second = (open_tun(*place.rsplit(":", 1)) for place in places)
    with suppress(OSError):
        os.nice(-10)  # a late packet is a slower link
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    relay(first, second, float(seconds), sys.stdin.fileno())


if __name__ == "__main__":
    main()
