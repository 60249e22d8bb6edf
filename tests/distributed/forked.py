"""Tiers as forks of one process that has imported everything, which takes longer than most runs.

`run_scenarios("tests.distributed.cases", [("scenario", {...}), ...])` imports the module in one new
process and calls its functions there with these arguments; it returns what they returned. A call
runs its tiers inside `forked`, in this machine's network or in three, and may do to them meanwhile
what it likes.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.distributed.launch import free_ports
from tests.distributed.preloaded import run_preloaded

_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, kw_only=True)
class End:
    """How a tier ended."""

    code: int | None
    """Negative for the signal that ended it, `None` if it had to be killed here."""
    output: str
    value: Any
    """What its function returned, `None` if it did not."""
    seconds: float
    """When it ended, by the monotonic clock."""


def run_scenarios(
    module: str, scenarios: Sequence[tuple[str, Mapping[str, Any]]], *, timeout_seconds: float
) -> list[Any]:
    """Calls functions of a module with arguments, all in one process that is made for it."""
    with tempfile.TemporaryDirectory(prefix="hiertrain-forked-") as folder:
        asked, told = Path(folder, "asked.json"), Path(folder, "told.pt")
        asked.write_text(json.dumps(list(scenarios)))
        work = functools.partial(_run_all, module, asked, told)
        run_preloaded(work, timeout_seconds=timeout_seconds)
        return list(_load(told))


class Forked:
    """The tiers of a scenario while they run."""

    def __init__(self, folder: Path, pids: dict[str, int]) -> None:
        self.pids = pids
        self._folder = folder
        self._ends: dict[str, tuple[int | None, float]] = {}

    def wait(self, timeout_seconds: float, *, tiers: Sequence[str] | None = None) -> None:
        """Waits until tiers, by default all, have ended; kills nobody."""
        deadline = time.monotonic() + timeout_seconds
        names = self.pids if tiers is None else tiers
        while not all(self._has_ended(name) for name in names) and time.monotonic() < deadline:
            time.sleep(0.02)

    def describe(self) -> str:
        """Tells what each tier has written, and how those that have ended did so."""
        running = self.running()
        return "\n".join(
            f"--- {name} "
            + ("runs" if name in running else f"ended with {self._ends[name][0]}")
            + f"\n{self.output(name)[-3000:]}"
            for name in self.pids
        )

    def running(self) -> list[str]:
        """Returns the tiers that have not ended."""
        return [name for name in self.pids if not self._has_ended(name)]

    def output(self, tier: str) -> str:
        """Returns what a tier has written so far."""
        return (self._folder / f"{tier}.out").read_text(errors="replace")

    def ends(self) -> dict[str, End]:
        """Kills what still runs and tells how each tier ended."""
        for name in self.running():
            os.kill(self.pids[name], signal.SIGKILL)
            os.waitpid(self.pids[name], 0)
            self._ends[name] = (None, time.monotonic())
        return {
            name: End(
                code=code,
                output=self.output(name),
                value=_load(path) if (path := self._folder / f"{name}.pt").exists() else None,
                seconds=seconds,
            )
            for name, (code, seconds) in self._ends.items()
        }

    def _has_ended(self, name: str) -> bool:
        if name not in self._ends:
            ended, status = os.waitpid(self.pids[name], os.WNOHANG)
            if ended:
                self._ends[name] = (os.waitstatus_to_exitcode(status), time.monotonic())
        return name in self._ends


@contextmanager
def forked(
    work: Callable[[str], Any],
    tiers: Sequence[str],
    *,
    layout: str = "local",
    namespaces: Mapping[str, str] | None = None,
) -> Iterator[Forked]:
    """Runs a function as each tier, and ends what is left of it at the end.

    Args:
        work: Called with the tier's name.
        tiers: The tiers, in order of rank.
        layout: `"local"` for `Trainer(devices=3)`, `"nodes"` for `Trainer(num_nodes=3, devices=1)`.
        namespaces: Each tier's network namespace; the tiers are then hosts of their own.
    """
    (port,) = free_ports(1)
    # Not `TemporaryDirectory`: each fork would remove it at its exit.
    folder = Path(tempfile.mkdtemp(prefix="hiertrain-tiers-"))
    pids: dict[str, int] = {}
    running = Forked(folder, pids)
    try:
        for rank, tier in enumerate(tiers):
            environment = {
                "LOCAL_RANK": str(rank if layout == "local" else 0),
                "NODE_RANK": str(0 if layout == "local" else rank),
                "WORLD_SIZE": str(len(tiers)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            (folder / f"{tier}.out").touch()
            pid = os.fork()
            if pid == 0:
                _live(work, tier, folder, environment, namespaces)
            pids[tier] = pid
        yield running
    finally:
        for tier in running.running():
            os.kill(pids[tier], signal.SIGKILL)
            os.waitpid(pids[tier], 0)
        shutil.rmtree(folder)


def apart(function: Callable[[], Any], *, timeout_seconds: float = 60.0) -> Any:
    """Returns what a function returns in a fork: autograd's threads here would bar later forks."""
    with forked(lambda _: function(), ["apart"]) as running:
        running.wait(timeout_seconds)
        (end,) = running.ends().values()
    assert end.code == 0, end.output
    return end.value


def _live(
    work: Callable[[str], Any],
    tier: str,
    folder: Path,
    environment: Mapping[str, str],
    namespaces: Mapping[str, str] | None,
) -> None:
    """Works as a tier and ends as an interpreter does, but for freeing all that was imported."""
    code = 1
    try:
        os.setsid()
        # Folders that the first process removes at its end are not this one's to remove.
        weakref.finalize._registry.clear()  # type: ignore[attr-defined]
        with (folder / f"{tier}.out").open("ab") as output:
            for descriptor in (1, 2):
                os.dup2(output.fileno(), descriptor)
        os.environ |= environment
        if namespaces is not None:
            enter(namespaces[tier])
            _be_a_host(tier)
        _save(work(tier), folder / f"{tier}.pt")
        code = 0
    except BaseException as error:
        if isinstance(error, SystemExit):
            code = int(error.code or 0)
        else:
            traceback.print_exc()
    finally:
        with suppress(BaseException):
            atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def enter(namespace: str) -> None:
    """Moves this process into a network namespace."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")


def _be_a_host(tier: str) -> None:
    """Hides from other tiers whether a process of this one still runs, as another host does."""
    from lightning_hiertrain.transport import rendezvous

    rendezvous._machine = lambda: tier  # type: ignore[assignment]


def _save(value: Any, path: Path) -> None:
    import torch

    torch.save(value, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)


def _load(path: Path) -> Any:
    import torch

    return torch.load(path, weights_only=False)


def _run_all(module: str, asked: Path, told: Path) -> None:
    cases = importlib.import_module(module)
    scenarios = json.loads(asked.read_text())
    _save([getattr(cases, name)(**arguments) for name, arguments in scenarios], told)
