"""How processes of one user on one machine find each other without configuration.

Every tier writes its public key and port to `<temporary directory>/hiertrain-<user
id>/<run>/<tier>.json` and reads those of the others. The directories belong to the user and nobody
else can enter them; files of processes that have ended, or of another owner, are passed over.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

_MAX_FILE_BYTES = 4096
_STALE_SECONDS = 3600.0
_CONFLICT = ".claimed-twice"
_STARTED = time.time()


@dataclass(frozen=True, kw_only=True)
class ProcessIdentity:
    """Which process of which machine; others of the same machine can see whether it runs."""

    machine: str | None
    """Changes with every boot and differs between containers; `None` where it is unknown."""
    pid: int
    start_time: str | None

    @classmethod
    def current(cls) -> ProcessIdentity:
        """Returns that of this process."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """Returns that of a process of this machine."""
        return cls(machine=_machine(), pid=pid, start_time=_start_time(pid))

    @classmethod
    def from_dict(cls, data: Any) -> ProcessIdentity | None:
        """Reads what `dataclasses.asdict` made of one; `None` if it is something else."""
        try:
            identity = cls(**data)
        except TypeError:
            return None
        texts = (identity.machine, identity.start_time)
        is_sound = type(identity.pid) is int and all(
            text is None or isinstance(text, str) for text in texts
        )
        return identity if is_sound else None

    def is_here(self) -> bool:
        """Tells whether this machine can see the process."""
        return (
            self.machine is not None and self.machine == _machine() and self.start_time is not None
        )

    def has_ended(self) -> bool:
        """Tells whether the process is known to have ended, which only its machine can."""
        try:
            return self.is_here() and _start_time(self.pid) != self.start_time
        except OSError:  # this process has too many files open to look
            return False


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a tier tells the others."""

    public_key: str
    port: int
    process: ProcessIdentity


class Rendezvous:
    """The meeting place of one run.

    Args:
        run_id: The same word on all tiers, and another one for every run.
        tier: The tier of this process.

    Raises:
        ValueError: If the directory belongs to someone else or others may enter it.
    """

    def __init__(self, run_id: str, tier: str) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", run_id) or run_id.startswith("."):
            raise ValueError(
                f"the run id {run_id!r} must be a word of letters, digits, '_', '-' and '.'"
            )
        user = os.getuid() if hasattr(os, "getuid") else "user"
        root = Path(tempfile.gettempdir()) / f"hiertrain-{user}"
        self.directory = root / run_id
        _make_private(root)
        for other in root.iterdir():
            # Not one that a starting run has just made.
            if other.name != run_id and _age_seconds(other) > _STALE_SECONDS:
                self._sweep(other)
        _make_private(self.directory)
        self._path = self.directory / f"{tier}.json"
        self._tier = tier
        self._process: ProcessIdentity | None = None

    def publish(self, card: Card) -> None:
        """Writes this tier's card.

        Raises:
            ValueError: If another live process has taken this tier's place.
        """
        other = self.read(self._tier)
        if other is not None and other.process != card.process:
            self._mark_conflict(other.process.pid)
            raise ValueError(self._describe_conflict(self._tier, other.process.pid))
        temporary = self._path.with_suffix(f".{os.getpid()}.tmp")
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(asdict(card), file)
        temporary.replace(self._path)
        self._process = card.process

    def conflict(self) -> str | None:
        """Says which tier two processes claim to be; `None` if there is none.

        The second one is refused, and without this the others would wait in vain for the tier
        that it should have been.
        """
        own = self.read(self._tier)
        if own is not None and own.process != self._process:
            self._mark_conflict(own.process.pid)
        for mark in self.directory.glob(f"*{_CONFLICT}"):
            if _is_new(mark):
                tier, _, pid = mark.name.removesuffix(_CONFLICT).rpartition(".")
                return self._describe_conflict(tier, pid)
        return None

    def _mark_conflict(self, pid: int) -> None:
        """Leaves a mark that outlives both processes: others may still be on their way here."""
        self.directory.joinpath(f"{self._tier}.{pid}{_CONFLICT}").touch(mode=0o600)

    def _describe_conflict(self, tier: str, pid: int | str) -> str:
        return (
            f"two processes claim to be tier {tier!r} of run {self.directory.name!r}, one of them "
            f"is process {pid}; give every process a tier of its own (HIERTRAIN_TIER), and every "
            "run a port of its own (MASTER_PORT)"
        )

    def read(self, tier: str) -> Card | None:
        """Returns the card of a tier, or `None` if it has not come yet or has ended."""
        card = _read(self.directory / f"{tier}.json")
        return None if card is None or card.process.has_ended() else card

    def leave(self) -> None:
        """Removes this tier's card and those of ended tiers, and the directory with the last."""
        own = self.read(self._tier)
        if own is not None and own.process == self._process:
            with contextlib.suppress(OSError):
                self._path.unlink()
        self._sweep(self.directory)

    def _sweep(self, directory: Path) -> None:
        """Removes what ended processes have left in a directory, and it if nothing else is left."""
        with contextlib.suppress(OSError):
            for path in directory.glob("*.json"):
                card = _read(path)
                if card is not None and card.process.has_ended():
                    path.unlink()
            for path in directory.glob(f"*{_CONFLICT}"):
                if not _is_new(path):
                    path.unlink()
            directory.rmdir()


def _is_new(mark: Path) -> bool:
    """Whether a mark is of this process's time, not one that an earlier run has left."""
    try:
        return mark.stat().st_mtime >= _STARTED
    except OSError:
        return False


def _read(path: Path) -> Card | None:
    """Returns a card of this user, or `None` if there is none."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        descriptor = os.open(path, flags)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or not _is_own(status):
            return None
        text = file.read(_MAX_FILE_BYTES)
    try:
        data = json.loads(text)
        process = ProcessIdentity.from_dict(data["process"])
        if process is None:
            return None
        return Card(public_key=str(data["public_key"]), port=int(data["port"]), process=process)
    except (ValueError, TypeError, KeyError):
        return None


def _make_private(directory: Path) -> None:
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or not _is_own(status) or status.st_mode & 0o077:
        raise ValueError(
            f"the directory {directory}, where the tiers of this machine meet, belongs to someone "
            "else or is open to others; remove it, or set TMPDIR to a directory of your own"
        )


def _age_seconds(path: Path) -> float:
    try:
        return time.time() - path.lstat().st_mtime
    except OSError:
        return 0.0


def _is_own(status: os.stat_result) -> bool:
    return not hasattr(os, "getuid") or status.st_uid == os.getuid()


@cache
def _machine() -> str | None:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _start_time(pid: int) -> str | None:
    """Returns when a process was started, `None` if there is none (a zombie has ended)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else fields[19]
