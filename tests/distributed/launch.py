"""Runs functions in real processes, one a rank, as tests of distributed behaviour need it.

`run_tiers("tests.distributed.cases:train", steps=3)` starts three Python processes with the
variables that Lightning's own environment reads, calls `train(steps=3)` in each and returns what
each returned. Importing torch and Lightning takes several seconds a process, so `run_cases` makes
the same processes execute several calls one after the other, and forks them from a server that has
imported both.

Every run has a time limit. At nine tenths of it each process writes the stacks of its threads; at
the limit all are killed. A failure is raised again here with the failing rank's traceback.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import json
import os
import queue
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from tests.distributed.preloaded import Fork

ROOT = Path(__file__).parents[2]
SHOWN_OUTPUT_CHARACTERS = 4_000
FORGOTTEN_VARIABLES = (
    "GROUP_RANK",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NODE_RANK",
    "RANK",
    "WORLD_SIZE",
)
"""What an outer launcher may have left in the environment."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call that every rank makes."""

    target: str
    """`"package.module:function"`, or the path of a script that ends in `.py`."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that JSON can carry; a script takes `argv`."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """One process to start."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to this process's environment."""
    forked: tuple[str, int] | None = None
    """A job and a rank: the same as the command, in a process that need not import everything."""


@dataclass(frozen=True, kw_only=True)
class Exit:
    """How a process ended."""

    returncode: int | None
    """Negative for the signal that ended it, `None` if it was killed here."""
    output: str
    """Standard output and error together."""
    seconds: float
    """From the start of all to this end."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a rank did."""

    rank: int
    exit: Exit
    results: list[Any]
    """What each case returned, up to the first that failed."""
    error: str | None
    """The traceback of the case that failed."""
    error_time: float | None


class RankError(AssertionError):
    """A rank failed or did not end in time; the message holds the tracebacks, the earliest first.

    Args:
        message: What is shown.
        outcomes: Every rank's.
    """

    def __init__(self, message: str, outcomes: list[Outcome]) -> None:
        super().__init__(message)
        self.outcomes = outcomes


def run_tiers(
    target: str,
    *,
    world_size: int = 3,
    timeout_seconds: float = 120.0,
    env: Mapping[str, str] | Callable[[int], Mapping[str, str]] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Calls one function, or runs one script, on every rank.

    Args:
        target: `"package.module:function"`, or the path of a script that ends in `.py`.
        world_size: Number of processes.
        timeout_seconds: After which all are killed.
        env: Variables for all ranks, or a function of the rank.
        **kwargs: Arguments of the call; JSON must be able to carry them.

    Returns:
        Each rank's result.

    Raises:
        RankError: If a rank failed or did not end in time.
    """
    case = Case(target=target, kwargs=kwargs)
    (results,) = run_cases([case], world_size=world_size, timeout_seconds=timeout_seconds, env=env)
    return results


def run_cases(
    cases: Iterable[Case],
    *,
    world_size: int = 3,
    timeout_seconds: float = 120.0,
    env: Mapping[str, str] | Callable[[int], Mapping[str, str]] | None = None,
) -> list[list[Any]]:
    """Makes the same processes execute several calls, one after the other.

    Returns:
        For each case each rank's result: `results[case][rank]`.

    Raises:
        RankError: If a rank failed or did not end in time.
    """
    cases = list(cases)
    outcomes = observe_cases(
        cases, world_size=world_size, timeout_seconds=timeout_seconds, env=env, stop_on_failure=True
    )
    if any(outcome.exit.returncode != 0 for outcome in outcomes):
        raise RankError(_describe(outcomes, cases, timeout_seconds), outcomes)
    return [[outcome.results[i] for outcome in outcomes] for i in range(len(cases))]


def observe_cases(
    cases: Iterable[Case],
    *,
    world_size: int = 3,
    timeout_seconds: float = 120.0,
    env: Mapping[str, str] | Callable[[int], Mapping[str, str]] | None = None,
    stop_on_failure: bool = False,
    layout: Literal["local", "nodes"] = "local",
    wrap: Callable[[int, list[str]], list[str]] | None = None,
) -> list[Outcome]:
    """Like `run_cases`, and tells how each rank ended instead of raising.

    Args:
        cases: The calls.
        world_size: Number of processes.
        timeout_seconds: After which all are killed.
        env: Variables for all ranks, or a function of the rank.
        stop_on_failure: Whether the others are killed soon after the first rank failed.
        layout: `"local"` for `Trainer(devices=world_size)`, `"nodes"` for
            `Trainer(num_nodes=world_size, devices=1)`.
        wrap: Turns a rank and its command into another command, for example one that enters a
            network namespace.
    """
    cases = list(cases)
    with tempfile.TemporaryDirectory(prefix="hiertrain-ranks-") as folder:
        job = Path(folder, "job.json")
        job.write_text(
            json.dumps(
                {
                    "cases": [[case.target, dict(case.kwargs)] for case in cases],
                    "ports": free_ports(len(cases)),
                    "world_size": world_size,
                    "layout": layout,
                    "timeout_seconds": timeout_seconds,
                }
            )
        )
        commands = []
        for rank in range(world_size):
            argv = [sys.executable, "-m", "tests.distributed.launch", str(job), str(rank)]
            extra = (env(rank) if callable(env) else env) or {}
            argv = wrap(rank, argv) if wrap else argv
            forked = None if wrap else (str(job), rank)
            environment = {"OMP_NUM_THREADS": "1", **extra}
            commands.append(Command(argv=argv, env=environment, forked=forked))
        exits = run_processes(
            commands, timeout_seconds=timeout_seconds, stop_on_failure=stop_on_failure
        )
        return [_read_outcome(Path(folder), rank, end) for rank, end in enumerate(exits)]


def run_processes(
    commands: Sequence[Command],
    *,
    timeout_seconds: float,
    stop_on_failure: bool = True,
    grace_seconds: float = 5.0,
) -> list[Exit]:
    """Runs commands at the same time and leaves no process behind.

    Args:
        commands: What to run, in the root of the repository.
        timeout_seconds: After which all are killed.
        stop_on_failure: Whether the others are killed when one failed.
        grace_seconds: How long they may still take then, to tell what they noticed.

    Returns:
        How each ended.
    """
    base = {name: value for name, value in os.environ.items() if name not in FORGOTTEN_VARIABLES}
    base["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), base.get("PYTHONPATH")]))
    base["PYTHONFAULTHANDLER"] = "1"
    ended: queue.SimpleQueue[int] = queue.SimpleQueue()
    started = time.perf_counter()
    deadline = started + timeout_seconds
    seconds = [timeout_seconds] * len(commands)
    returncodes: list[int | None] = [None] * len(commands)
    with ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.NamedTemporaryFile()) for _ in commands]
        processes: list[subprocess.Popen[bytes] | Fork] = []
        stack.callback(_kill_all, processes)
        for index, (command, output) in enumerate(zip(commands, outputs, strict=True)):
            env = {**base, **command.env}
            process = _start(command, env, output)
            processes.append(process)
            threading.Thread(target=_wait, args=(process, index, ended), daemon=True).start()
        for _ in commands:
            try:
                index = ended.get(timeout=max(0.0, deadline - time.perf_counter()))
            except queue.Empty:
                break
            returncodes[index] = processes[index].returncode
            seconds[index] = time.perf_counter() - started
            if stop_on_failure and returncodes[index] != 0:
                deadline = min(deadline, time.perf_counter() + grace_seconds)
        _kill_all(processes)
        texts = []
        for output in outputs:
            output.seek(0)
            texts.append(output.read().decode(errors="replace"))
    return [
        Exit(returncode=code, output=text, seconds=took)
        for code, text, took in zip(returncodes, texts, seconds, strict=True)
    ]


def free_ports(count: int) -> list[int]:
    """Returns TCP ports of the loopback interface that nobody uses."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _start(
    command: Command, env: dict[str, str], output: IO[bytes]
) -> subprocess.Popen[bytes] | Fork:
    if command.forked is not None:
        return Fork(functools.partial(_be_rank, *command.forked), env, output.name)
    return subprocess.Popen(
        list(command.argv),
        env=env,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _be_rank(job: str, rank: int) -> None:
    sys.argv = [__file__, job, str(rank)]
    _work(Path(job), rank)


def _wait(
    process: subprocess.Popen[bytes] | Fork, index: int, ended: queue.SimpleQueue[int]
) -> None:
    process.wait()
    ended.put(index)


def _kill_all(processes: Iterable[subprocess.Popen[bytes] | Fork]) -> None:
    """Kills each process and all that it started, also when it has itself ended already."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read_outcome(folder: Path, rank: int, end: Exit) -> Outcome:
    import torch

    results = []
    for file in sorted(folder.glob(f"result-{rank}-*.pt")):
        results.append(torch.load(file, weights_only=False))
    error = folder / f"error-{rank}.json"
    told = json.loads(error.read_text()) if error.exists() else {}
    return Outcome(
        rank=rank,
        exit=end,
        results=results,
        error=told.get("traceback"),
        error_time=told.get("time"),
    )


def _describe(outcomes: list[Outcome], cases: list[Case], timeout_seconds: float) -> str:
    failed = [outcome for outcome in outcomes if outcome.exit.returncode != 0]
    failed.sort(key=lambda outcome: (outcome.error_time or float("inf"), outcome.exit.seconds))
    parts = []
    for outcome in failed:
        case = cases[min(len(outcome.results), len(cases) - 1)]
        code = outcome.exit.returncode
        if outcome.error is not None:
            what = "failed"
        elif code is None:
            what = f"was killed after {outcome.exit.seconds:.1f} s (limit {timeout_seconds:g} s)"
        else:
            what = f"ended with {code}" if code > 0 else f"ended by signal {-code}"
        parts.append(f"rank {outcome.rank} {what} in {case.target}({dict(case.kwargs)})")
        if outcome.error is not None:
            parts.append(outcome.error)
        parts.append(f"--- output of rank {outcome.rank}")
        parts.append(outcome.exit.output[-SHOWN_OUTPUT_CHARACTERS:])
    return "\n".join(parts)


def _work(job: Path, rank: int) -> None:
    """Executes the cases as one rank; the other side of `observe_cases`."""
    work = json.loads(job.read_text())
    faulthandler.dump_traceback_later(0.9 * work["timeout_seconds"])
    for number, ((target, kwargs), port) in enumerate(
        zip(work["cases"], work["ports"], strict=True)
    ):
        local = work["layout"] == "local"
        os.environ.update(
            LOCAL_RANK=str(rank if local else 0),
            NODE_RANK=str(0 if local else rank),
            WORLD_SIZE=str(work["world_size"]),
            MASTER_ADDR=os.environ.get("MASTER_ADDR", "127.0.0.1"),
            MASTER_PORT=str(port),
        )
        try:
            result = _call(target, kwargs)
        except BaseException as error:
            if isinstance(error, SystemExit) and not error.code:
                result = None
            else:
                told = {"traceback": traceback.format_exc(), "time": time.time()}
                _write(job.with_name(f"error-{rank}.json"), lambda path, d=told: _dump(path, d))
                raise
        _write(
            job.with_name(f"result-{rank}-{number:04}.pt"), lambda path, r=result: _save(path, r)
        )
    faulthandler.cancel_dump_traceback_later()


def _call(target: str, kwargs: dict[str, Any]) -> Any:
    if target.endswith(".py"):
        before = sys.argv, list(sys.path)
        sys.argv, sys.path[:0] = [target, *kwargs.get("argv", [])], [str(Path(target).parent)]
        try:
            runpy.run_path(target, run_name="__main__")
        finally:
            sys.argv, sys.path[:] = before
        return None
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)(**kwargs)


def _write(path: Path, write: Callable[[Path], None]) -> None:
    """Writes a file that is either there as a whole or not at all."""
    partial = path.with_suffix(".part")
    write(partial)
    partial.replace(path)


def _dump(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data))


def _save(path: Path, result: Any) -> None:
    import torch

    torch.save(result, path)


if __name__ == "__main__":
    _work(Path(sys.argv[1]), int(sys.argv[2]))
