"""One testbed: its network, quotas and keys, and the commands that run on its hosts."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.testbed import CONTROL_VARIABLE, OUTPUT_VARIABLE, QUOTA_VARIABLE
from benchmarks.testbed.calibrate import Calibration, calibrate
from benchmarks.testbed.commands import missing
from benchmarks.testbed.config import TestbedConfig
from benchmarks.testbed.control import Control
from benchmarks.testbed.network import Network, namespaces_with, remove_namespace
from benchmarks.testbed.quota import (
    Controllers,
    Membership,
    Quotas,
    find_controllers,
    groups_with,
    remove_group,
)

ROOT = Path(__file__).parents[2]
STATE = Path("/run/hiertrain-testbed")
"""One folder a living testbed, with its lock and its socket."""
PREFIX = "hiertrain-testbed-"
LISTEN_PORT = 5700
MAIN_PORT = 29_400
GRACE_SECONDS = 15.0
"""How long the others may go on when one host's command has failed."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

Say = Callable[[str], None]


class MissingError(RuntimeError):
    """This machine or user cannot have a testbed; the message says what is missing."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command ended on one host."""

    returncode: int | None
    """Negative for the signal that ended it, `None` if it was ended by the testbed."""
    seconds: float
    throttled_seconds: float
    """Time in which it wanted to run and its quota did not let it."""
    joined_quota: bool


class Testbed:
    """Three hosts, or more; made on entering, removed on leaving.

    Args:
        config: What it looks like.
        say: Is told what happens, a line at a time.

    Raises:
        MissingError: On entering, if something is missing.
        OSError: On entering, if the kernel refuses something.
    """

    __test__ = False  # pytest takes it for tests otherwise

    def __init__(self, config: TestbedConfig, *, say: Say = lambda line: None) -> None:
        self.config = config
        self.name = f"{PREFIX}{os.getpid()}"
        self.network = Network(config, prefix=self.name)
        self._say = say
        self._memberships: dict[str, Membership] = {}
        self._keys: Path | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Testbed:
        if lacking := lacks():
            raise MissingError("\n  ".join(["a testbed cannot be made here; it lacks", *lacking]))
        clean()
        signals = _Signals()
        try:
            self._make(signals)
        except BaseException:
            signals.ignore()  # what was made is removed next, and nothing may cut that short
            self._stack.close()
            raise
        return self

    def _make(self, signals: _Signals) -> None:
        stack = self._stack
        stack.enter_context(signals)
        self.folder = stack.enter_context(_ClaimedFolder(self.name))
        controllers = find_controllers()
        assert controllers is not None
        quotas = Quotas(
            controllers, name=self.name, period_seconds=self.config.quota_period_seconds
        )
        stack.callback(quotas.remove)
        self._memberships = {tier.name: quotas.add(tier) for tier in self.config.tiers}
        stack.enter_context(self.network)
        stack.enter_context(Control(self.folder / "control", self.network.set_rate))
        self._keys = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.callback(signals.ignore)

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def calibrate(self) -> Calibration:
        """Measures what the links and tiers give."""
        return calibrate(self)

    def environment(self, tier: str) -> dict[str, str]:
        """Returns the variables of a host's processes."""
        config = next(each for each in self.config.tiers if each.name == tier)
        rank, first = self.config.names.index(tier), self.config.names[0]
        path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            **os.environ,
            **dict.fromkeys(THREADS, str(config.threads)),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join(path),
            "PYTHONUNBUFFERED": "1",
            "NODE_RANK": str(rank),
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(len(self.config.tiers)),
            "MASTER_ADDR": self.network.address(first),
            "MASTER_PORT": str(MAIN_PORT),
            "GLOO_SOCKET_IFNAME": self.network.interface(tier),
            "HIERTRAIN_TIER": tier,
            QUOTA_VARIABLE: str(self._memberships[tier].after_imports),
            CONTROL_VARIABLE: str(self.folder / "control"),
        }

    def run(
        self,
        argv: Sequence[str],
        output: Path,
        *,
        timeout_seconds: float,
        joins_at_start: bool = False,
    ) -> dict[str, Ended]:
        """Runs a command on every host until all have ended.

        When it fails on one, the others are ended 15 s later.

        Args:
            argv: The command.
            output: Folder for `TIER.log` and, in `TIER/`, what the command writes to the folder
                that `HIERTRAIN_TESTBED_OUTPUT` names.
            timeout_seconds: When all are ended.
            joins_at_start: Puts the command under its quota at once, imports included.

        Returns:
            For each tier how it ended.
        """
        topology = self._topology()
        starts = {tier: _statistics(self._memberships[tier]) for tier in self.config.names}
        processes: dict[str, subprocess.Popen[str]] = {}
        readers = []
        try:
            for tier in self.config.names:
                (output / tier).mkdir(parents=True, exist_ok=True)
                environment = {
                    **self.environment(tier),
                    "HIERTRAIN_TOPOLOGY": str(topology),
                    "HIERTRAIN_KEY": str(topology.with_name(f"{tier}.key")),
                    OUTPUT_VARIABLE: str((output / tier).resolve()),
                }
                groups = list(self._memberships[tier].at_start)
                if joins_at_start:
                    groups.append(self._memberships[tier].after_imports)
                script = "".join(f"echo $$ > {group} && " for group in groups) + 'exec "$@"'
                processes[tier] = subprocess.Popen(
                    ["sh", "-c", script, "sh", *self.network.command(tier, argv)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    env=environment,
                    start_new_session=True,
                )
                log = (output / f"{tier}.log").open("w")
                reader = threading.Thread(target=self._keep, args=(tier, processes[tier], log))
                reader.start()
                readers.append(reader)
            returncodes, seconds = _wait(processes, timeout_seconds)
        finally:
            for tier, process in processes.items():
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                self._end_inhabitants(tier)
            for reader in readers:
                reader.join()
        return {
            tier: self._ended(tier, returncodes[tier], seconds[tier], starts[tier])
            for tier in self.config.names
        }

    def _ended(
        self, tier: str, returncode: int | None, seconds: float, before: Mapping[str, float]
    ) -> Ended:
        after = _statistics(self._memberships[tier])
        grown = {name: after[name] - before[name] for name in after}
        return Ended(
            returncode=returncode,
            seconds=seconds,
            throttled_seconds=grown["throttled_seconds"],
            joined_quota=grown["nr_periods"] > 0,
        )

    def _end_inhabitants(self, tier: str) -> None:
        """Ends what a command has left on a host, also if it has a session of its own."""
        for path in {self._memberships[tier].after_imports, *self._memberships[tier].at_start}:
            for pid in path.read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    def _keep(self, tier: str, process: subprocess.Popen[str], log: IO[str]) -> None:
        assert process.stdout is not None
        with log:
            for line in process.stdout:
                log.write(line)
                log.flush()
                self._say(f"[{tier}] {line.rstrip()}")

    def _topology(self) -> Path:
        """Returns the topology file, beside which every tier's private key lies."""
        from lightning_hiertrain.topology import Link, Tier, Topology
        from lightning_hiertrain.transport.keys import make_keys

        assert self._keys is not None
        path = self._keys / "topology.json"
        if path.exists():
            return path
        links = [
            Link(
                between=link.between,
                address=f"{self.network.address(high, seen_from=low)}:{LISTEN_PORT}",
            )
            for link in self.config.links
            for low, high in [link.between]
        ]
        tiers = [
            Tier(
                name=name,
                address=next((link.address for link in links if link.between[1] == name), None),
            )
            for name in self.config.names
        ]
        make_keys(Topology(tiers=tuple(tiers), links=tuple(links)), self._keys).to_json(path)
        return path


def lacks(controllers: Controllers | None = None) -> list[str]:
    """Returns what this machine or user lacks for a testbed."""
    extra = []
    if sys.platform == "linux" and (controllers or find_controllers()) is None:
        extra.append(
            "CPU quotas: neither a cgroup version 1 tree with `cpu` nor a version 2 tree is "
            "mounted; mount one, or start the container with its own cgroups"
        )
    return missing(extra)


def clean() -> list[str]:
    """Removes what testbeds left whose process was killed; living ones stay.

    Returns:
        The names of what was removed.
    """
    names = [socket.parent.name for socket in living()]

    def is_left(name: str) -> bool:
        return not any(name == each or name.startswith(f"{each}-") for each in names)

    removed = []
    controllers = find_controllers()
    for group in groups_with(controllers, PREFIX) if controllers else []:
        if is_left(group.name):
            remove_group(group)
            removed.append(str(group))
    for name in filter(is_left, namespaces_with(PREFIX)):
        remove_namespace(name)
        removed.append(f"namespace {name}")
    for folder in STATE.iterdir() if STATE.is_dir() else []:
        if is_left(folder.name):
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(str(folder))
    return removed


def living() -> list[Path]:
    """Returns the sockets of the testbeds that exist now."""
    if not STATE.is_dir():
        return []
    return [folder / "control" for folder in sorted(STATE.iterdir()) if _is_locked(folder)]


class _ClaimedFolder:
    """A testbed's folder under /run, locked for as long as its process lives."""

    def __init__(self, name: str) -> None:
        self._folder = STATE / name

    def __enter__(self) -> Path:
        self._folder.mkdir(parents=True)
        self._lock = (self._folder / "lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return self._folder

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._lock.close()
        with suppress(OSError):
            STATE.rmdir()


class _Signals:
    """Turns signals that end a process into exceptions, so that what was made can be removed.

    After the first one, and while things are removed, they are ignored: nothing but SIGKILL keeps a
    testbed from being removed.
    """

    NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in self.NUMBERS:
                if signal.getsignal(number) != signal.SIG_IGN:  # as `nohup` leaves it
                    self._before[number] = signal.signal(number, self._end)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def ignore(self) -> None:
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def _end(self, number: int, frame: object) -> None:
        self.ignore()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)


def _is_locked(folder: Path) -> bool:
    try:
        with (folder / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _statistics(membership: Membership) -> dict[str, float]:
    """Reads how often and how long a quota has held its processes back."""
    lines = (line.split() for line in membership.statistics.read_text().splitlines())
    values = {name: float(value) for name, value in lines}
    throttled = values.get("throttled_time", 0.0) * 1e-9 or values.get("throttled_usec", 0.0) * 1e-6
    return {"nr_periods": values.get("nr_periods", 0.0), "throttled_seconds": throttled}


def _wait(
    processes: Mapping[str, subprocess.Popen[str]], timeout_seconds: float
) -> tuple[dict[str, int | None], dict[str, float]]:
    """Waits for all, a while longer if one fails, until the timeout at most."""
    start = time.monotonic()
    deadline = start + timeout_seconds
    returncodes: dict[str, int | None] = dict.fromkeys(processes)
    seconds = dict.fromkeys(processes, timeout_seconds)
    changed = threading.Condition()

    def watch(tier: str, process: subprocess.Popen[str]) -> None:
        code = process.wait()
        with changed:
            returncodes[tier], seconds[tier] = code, time.monotonic() - start
            changed.notify()

    for tier, process in processes.items():
        threading.Thread(target=watch, args=(tier, process), daemon=True).start()
    with changed:
        while None in returncodes.values():
            if any(returncodes.values()):
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                break
            changed.wait(min(remaining, 1.0))
        return dict(returncodes), {
            tier: min(value, time.monotonic() - start) for tier, value in seconds.items()
        }


def write_result(output: Path, ended: Mapping[str, Ended]) -> None:
    """Writes how the command ended on each host."""
    result = {tier: vars(end) for tier, end in ended.items()}
    (output / "result.json").write_text(json.dumps(result, indent=2) + "\n")
