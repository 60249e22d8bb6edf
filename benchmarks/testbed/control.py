"""The socket at which a testbed listens: whoever runs inside may change a link's rate.

A socket with a place in the file system is reached from every network namespace.
"""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Callable
from pathlib import Path


class Control:
    """Listens until it is left.

    Args:
        path: Where the socket lies.
        set_rate: Changes a link, given its name and bytes per second.
    """

    def __init__(self, path: Path, set_rate: Callable[[str, float], None]) -> None:
        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                try:
                    request = json.loads(self.rfile.readline())
                    set_rate(request["link"], 1e6 / 8 * float(request["bandwidth_mbit"]))
                    answer = {}
                except (ValueError, KeyError, TypeError, OSError) as error:
                    answer = {"error": str(error)}
                self.wfile.write(json.dumps(answer).encode() + b"\n")

        self._path = path
        self._server = socketserver.UnixStreamServer(str(path), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Control:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._path.unlink(missing_ok=True)
