"""Tiers that come to harm in the middle of training.

One process imports everything once and forks the tiers of each scenario, in this machine's network
or in three; the imports take longer than all scenarios together. Run as a module with a JSON list
of scenarios; it prints a JSON list of what happened.
"""

from __future__ import annotations

import atexit
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from typing import Any, NoReturn

from lightning.pytorch import Callback, Trainer

from lightning_hiertrain import HierTrainStrategy
from lightning_hiertrain.transport import rendezvous
from tests.distributed.bad_input_cases import TIERS, Small, rows, schedule
from tests.distributed.forked import enter
from tests.distributed.launch import free_ports

GOES_ON = "went on without it at "
LINKS = ({"device", "edge"}, {"edge", "cloud"})
SILENCE_SECONDS = 3.0
TIMEOUT_SECONDS = 30.0
_NOTICED = "training ended at "


class Ready(Callback):
    """Tells, after some steps, that training is under way."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def on_train_batch_end(self, *args: Any) -> None:
        if args[-1] == 4:
            os.write(self.descriptor, b"x")


class GoOn(Callback):
    """Ends training some steps after it has gone on without a tier."""

    def __init__(self) -> None:
        self.steps = 0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.strategy.session.members.lost:  # type: ignore[attr-defined]
            if self.steps == 0:
                print(f"{GOES_ON}{time.monotonic()}")
            self.steps += 1
            trainer.should_stop = self.steps == 5


def train(owner: str, topology: str | None, on_tier_lost: Any, callbacks: list[Callback]) -> None:
    """Trains until something ends it."""
    trainer = Trainer(
        accelerator="cpu",
        devices=3 if topology is None else 1,
        num_nodes=1 if topology is None else 3,
        strategy=HierTrainStrategy(
            schedule=schedule(owner),
            topology=topology,
            timeout_seconds=TIMEOUT_SECONDS,
            silence_seconds=SILENCE_SECONDS,
            on_tier_lost=on_tier_lost,
        ),
        max_epochs=-1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Small(), rows(count=60_000))


def run_scenario(
    owner: str,
    victim: str,
    harm: str,
    topology: str | None = None,
    namespaces: dict[str, str] | None = None,
    on_tier_lost: str = "stop",
) -> dict[str, Any]:
    """Harms one tier of a run.

    Args:
        owner: The tier that owns the step.
        victim: The tier to harm.
        harm: A signal, or "blackhole": the victim's links carry nothing any more, silently.
        topology: The topology file for three hosts; keys lie beside it.
        namespaces: Each tier's network namespace.
        on_tier_lost: The strategy's argument.

    Returns:
        Each tier's exit code (negative: a signal), output and the seconds from the harm until it
        noticed, until its first step without the victim and until its process ended.
    """
    (port,) = free_ports(1)
    readable, writable = os.pipe()
    outputs = {tier: tempfile.TemporaryFile() for tier in TIERS}  # noqa: SIM115
    pids: dict[str, int] = {}
    for rank, tier in enumerate(TIERS):
        pid = os.fork()
        if pid == 0:
            os.setsid()
            for descriptor in (1, 2):
                os.dup2(outputs[tier].fileno(), descriptor)
            if namespaces is not None:
                enter(namespaces[tier])
                # Other hosts cannot look whether a process of this one still runs.
                rendezvous._machine = lambda tier=tier: tier  # type: ignore[assignment]
            is_local = topology is None
            os.environ |= {
                "LOCAL_RANK": str(rank if is_local else 0),
                "NODE_RANK": str(0 if is_local else rank),
                "WORLD_SIZE": "3",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            _work(owner, topology, on_tier_lost, Ready(writable))
        pids[tier] = pid
    os.close(writable)
    try:
        _wait_for_ready(readable)
        harmed_at = time.monotonic()
        _harm(victim, pids[victim], harm, namespaces)
        spared = [tier for tier in TIERS if tier != victim] if harm == "SIGSTOP" else list(TIERS)
        ends = _wait_for_ends({tier: pids[tier] for tier in spared}, harmed_at)
        if harm == "SIGSTOP":
            os.kill(pids[victim], signal.SIGCONT)
            ends |= _wait_for_ends({victim: pids[victim]}, harmed_at)
    finally:
        if harm == "blackhole" and namespaces is not None:
            _set_blackhole(victim, namespaces, add=False)
        os.close(readable)
        for pid in pids.values():
            _kill(pid)
    report = {}
    for tier, output in outputs.items():
        output.seek(0)
        code, seconds = ends.get(tier, (None, None))
        text = output.read().decode(errors="replace")
        noticed, went_on = (re.search(rf"{said}(\S+)", text) for said in (_NOTICED, GOES_ON))
        report[tier] = {
            "exit": code,
            "output": text,
            "noticed_seconds": float(noticed[1]) - harmed_at if noticed else None,
            "went_on_seconds": float(went_on[1]) - harmed_at if went_on else None,
            "ended_seconds": seconds,
        }
    return report


def _work(owner: str, topology: str | None, on_tier_lost: str, ready: Ready) -> NoReturn:
    """Ends this process as an interpreter does, but for freeing all that was imported."""
    code = 0
    try:
        train(owner, topology, on_tier_lost, [ready, GoOn()])
    except BaseException as error:
        code = int(error.code or 0) if isinstance(error, SystemExit) else 1
        print(f"{_NOTICED}{time.monotonic()}")
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait_for_ready(readable: int) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    told = b""
    while len(told) < len(TIERS):
        ready, _, _ = select.select([readable], [], [], max(0.0, deadline - time.monotonic()))
        chunk = os.read(readable, len(TIERS)) if ready else b""
        if not chunk:  # none of them is left, or they take too long
            return
        told += chunk


def _harm(victim: str, pid: int, harm: str, namespaces: dict[str, str] | None) -> None:
    if harm == "blackhole":
        assert namespaces is not None
        _set_blackhole(victim, namespaces, add=True)
    else:
        os.kill(pid, getattr(signal, harm))


def _set_blackhole(victim: str, namespaces: dict[str, str], *, add: bool) -> None:
    """Lets the kernel drop every packet to and from a tier, which nobody is told of."""
    queue = ["root", "tbf", "rate", "8bit", "burst", "1", "limit", "1"] if add else ["root"]
    for tier, name in namespaces.items():
        for other in TIERS:
            if victim in (tier, other) and {tier, other} in LINKS:
                argv = ["tc", "-n", name, "qdisc", "add" if add else "delete"]
                subprocess.run([*argv, "dev", f"to-{other}", *queue], check=True)


def _wait_for_ends(pids: dict[str, int], since: float) -> dict[str, tuple[int, float]]:
    ends: dict[str, tuple[int, float]] = {}
    while len(ends) < len(pids) and time.monotonic() < since + TIMEOUT_SECONDS:
        for tier, pid in pids.items():
            if tier not in ends:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    seconds = time.monotonic() - since
                    ends[tier] = (os.waitstatus_to_exitcode(status), seconds)
        time.sleep(0.02)
    return ends


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass
