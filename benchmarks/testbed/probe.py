"""What calibration runs on the hosts: raw TCP between two of them, a matrix product on each.

    python probe.py serve HOST PORT SECONDS     the upper end of a link
    python probe.py dial HOST PORT SECONDS      the lower end
    python probe.py matmul SECONDS              joins the quota, waits for a line, multiplies

Each prints "ready" if others have to wait for it, and its result as one line of JSON. Needs nothing
but NumPy, and that for `matmul` alone.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import time
from contextlib import suppress

PATIENCE_SECONDS = 60.0
ROUND_TRIPS = 30
SKIPPED = 0.25
"""Part of a transfer that is not counted: TCP begins slowly."""
SIZE = 256
"""Rows and columns of the matrices."""


def serve(host: str, port: int, seconds: float) -> dict[str, float]:
    """Echoes, receives and sends, and returns the rate at which data came up, bytes a second."""
    with socket.create_server((host, port)) as listener:
        listener.settimeout(PATIENCE_SECONDS)
        _say("ready")
        with _accept(listener) as connection:
            while data := connection.recv(64):
                connection.sendall(data)
        with _accept(listener) as connection:
            up = _receive(connection, seconds)
        with _accept(listener) as connection:
            _send(connection, seconds)
    return {"up_bytes_per_second": up}


def dial(host: str, port: int, seconds: float) -> dict[str, float]:
    """Pings, sends and receives, and returns round trip and the rate down."""
    with _connect(host, port) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = []
        for _ in range(ROUND_TRIPS):
            start = time.perf_counter()
            connection.sendall(b"x")
            connection.recv(64)
            trips.append(time.perf_counter() - start)
    with _connect(host, port) as connection:
        _send(connection, seconds)
    with _connect(host, port) as connection:
        down = _receive(connection, seconds)
    return {"down_bytes_per_second": down, "round_trip_seconds": statistics.median(trips)}


def matmul(seconds: float, quota: str | None) -> dict[str, float]:
    """Returns floating-point operations a second, in wall time."""
    import numpy as np

    a = np.random.default_rng(0).random((SIZE, SIZE), np.float32)
    a @ a
    if quota:
        with open(quota, "w") as file:
            file.write(str(os.getpid()))
    _say("ready")
    sys.stdin.readline()
    count, start, cpu = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - start < seconds:
        a @ a
        count += 1
    wall = time.perf_counter() - start
    return {
        "flops_per_second": 2 * SIZE**3 * count / wall,
        "cores": (time.process_time() - cpu) / wall,
    }


def _accept(listener: socket.socket) -> socket.socket:
    connection, _ = listener.accept()
    connection.settimeout(PATIENCE_SECONDS)
    return connection


def _connect(host: str, port: int) -> socket.socket:
    return socket.create_connection((host, port), PATIENCE_SECONDS)


def _receive(connection: socket.socket, seconds: float) -> float:
    """Receives for a while; the other end stops when this one closes."""
    counted, begin = 0, 0.0
    start = time.perf_counter()
    while (now := time.perf_counter()) - start < seconds:
        received = len(connection.recv(1 << 16))
        if not received:
            break
        if begin:
            counted += received
        elif now - start > SKIPPED * seconds:
            begin = time.perf_counter()
    return counted / (time.perf_counter() - begin) if begin else 0.0


def _send(connection: socket.socket, seconds: float) -> None:
    data = bytes(1 << 16)
    start = time.perf_counter()
    with suppress(ConnectionError):
        while time.perf_counter() - start < seconds + PATIENCE_SECONDS:
            connection.sendall(data)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    """Runs one probe."""
    kind, *arguments = sys.argv[1:]
    if kind == "matmul":
        result = matmul(float(arguments[0]), os.environ.get("HIERTRAIN_TESTBED_QUOTA"))
    else:
        host, port, seconds = arguments
        end = serve if kind == "serve" else dial
        result = end(host, int(port), float(seconds))
    _say(json.dumps(result))


if __name__ == "__main__":
    main()
