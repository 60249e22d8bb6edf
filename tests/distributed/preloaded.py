"""Processes forked from a server that has imported PyTorch and Lightning.

Importing them takes longer than most of what the tests run. The server starts with the first fork,
has no threads, and ends with this process.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_START_SECONDS = 60.0
"""The first one waits for the imports."""
_PRELOADED = ["torch", "lightning.pytorch", "torchmetrics", "lightning_hiertrain"]


class Fork:
    """A process forked from the server, used like a `Popen`.

    Args:
        work: What to do there.
        env: Its whole environment.
        output: The file that takes its standard output and error.
    """

    def __init__(self, work: Callable[[], None], env: dict[str, str], output: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        ready, told = context.Pipe(duplex=False)
        arguments = (work, env, output, told)
        self._process = context.Process(target=_run, args=arguments)
        self._waiting = threading.Lock()
        self.returncode: int | None = None
        self._process.start()
        # `multiprocessing` looks after its children when the next one starts, on whatever thread:
        # of two that read how one has ended, the second takes it for lost (exit code 255).
        multiprocessing.process._children.discard(self._process)  # type: ignore[attr-defined]
        told.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        if not ready.poll(_START_SECONDS):
            os.kill(self.pid, signal.SIGKILL)
            raise TimeoutError(f"a fork has not started within {_START_SECONDS:g} s")
        with suppress(EOFError):
            ready.recv()  # from here on it leads a process group of its own

    def wait(self, timeout_seconds: float | None = None) -> int | None:
        """Waits for its end and returns how it ended, as far as is known; any thread may."""
        with self._waiting:
            self._process.join(timeout_seconds)
            self.returncode = self._process.exitcode
        return self.returncode


def run_preloaded(work: Callable[[], None], *, timeout_seconds: float) -> None:
    """Does something in a fork and waits for it; leaves no process of its group behind.

    Raises:
        AssertionError: If it ended with an error, or took longer; with its output.
    """
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)}
    with tempfile.NamedTemporaryFile() as output:
        fork = Fork(work, env, output.name)
        try:
            code = fork.wait(timeout_seconds)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(fork.pid, signal.SIGKILL)
        assert code == 0, f"{code}\n{output.read().decode(errors='replace')}"


def _run(work: Callable[[], None], env: dict[str, str], output: str, told: Connection) -> None:
    os.setsid()
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    told.send("ready")
    told.close()
    os.environ.clear()
    os.environ.update(env)
    os.chdir(_ROOT)
    sys.path.insert(0, str(_ROOT))
    faulthandler.enable()
    try:
        work()
    finally:
        atexit._run_exitfuncs()  # which a fork of `multiprocessing` leaves out
