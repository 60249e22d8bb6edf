"""Faults on each tier of a run: full disks, signals, strangers, values that are not finite."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import signal
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_hiertrain.transport import Network
from tests.distributed.bad_input_cases import TIERS
from tests.distributed.endless import Wide, largest_difference, steps_done, train
from tests.distributed.forked import Forked, apart, forked
from tests.unit.transport.helpers import make_topology, send_raw
from tests.unit.transport.strangers import idle_connections, knock, scan

EVERY = 3
"""Steps between two checkpoints."""
DISK_BYTES = 1_000_000
"""Room for three checkpoints."""
START_SECONDS = 60.0
ENDING_SECONDS = 25.0
MOST_STEPS = 600
_CLONE_NEWNS = 0x20000


def train_with_fault(tier: str, fault: str, *, owner: str = "edge") -> dict[str, Any]:
    """Trains with a checkpoint every few steps until a fault ends it.

    Args:
        tier: The tier that it befalls.
        fault: A signal, or `"disk"`: nothing more can be written where that tier is.
        owner: The tier that owns the step.

    Returns:
        How the tiers ended, what they wrote, the files, and for each checkpoint its step and how
        far its weights are from plain Lightning's at that step.
    """
    folder = Path(tempfile.mkdtemp(prefix="hiertrain-faults-"))
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir()
    if fault == "disk" and tier == "device":
        _mount_small_disk(checkpoints)

    def work(own: str) -> Any:
        saving = ModelCheckpoint(checkpoints, "{step}", every_n_train_steps=EVERY, save_top_k=-1)
        callbacks: list[Callback] = [saving]
        if fault == "disk" and own == tier != "device":
            callbacks.append(WriteNoMore())
        options = {"enable_checkpointing": True, "callbacks": callbacks}
        trained = train(folder, limit=MOST_STEPS, owner=owner, seconds_per_step=0.01, **options)
        return trained["steps"] if own != tier else None

    with forked(work, TIERS) as tiers:
        _await_checkpoints(checkpoints, 2, tiers)
        if fault != "disk":
            os.kill(tiers.pids[tier], getattr(signal, fault))
            tiers.wait(ENDING_SECONDS, tiers=[tier])
        tiers.wait(2.0)
        (folder / "stop").touch()  # whoever goes on without the tier, or undisturbed, may end now
        tiers.wait(ENDING_SECONDS)
        ends = tiers.ends()
    found = {}
    for path in checkpoints.glob("*.ckpt"):
        loaded = torch.load(path, weights_only=False)
        step = loaded["global_step"]
        found[path.name] = (step, largest_difference(loaded["state_dict"], plain_weights()[step]))
    report = {
        "codes": {name: end.code for name, end in ends.items()},
        "outputs": {name: end.output for name, end in ends.items()},
        "files": sorted(path.name for path in checkpoints.iterdir()),
        "checkpoints": found,
    }
    if checkpoints.is_mount():
        subprocess.run(["umount", str(checkpoints)], check=True, timeout=20)
    shutil.rmtree(folder)
    return report


class WriteNoMore(Callback):
    """From the first step to the last one no file of this process grows."""

    def on_train_batch_end(self, *_: Any) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        self._limit(0)

    def on_train_end(self, *_: Any) -> None:
        self._limit(resource.RLIM_INFINITY)

    def _limit(self, most_bytes: int) -> None:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))


@cache
def plain_weights() -> dict[int, dict[str, Tensor]]:
    """Returns plain Lightning's weights after each step at which there may be a checkpoint."""
    return dict(apart(_train_plainly))


def _train_plainly() -> dict[int, dict[str, Tensor]]:
    kept: dict[int, dict[str, Tensor]] = {}

    class Keep(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
            if trainer.global_step % EVERY == 0:
                kept[trainer.global_step] = {
                    name: value.clone() for name, value in pl_module.state_dict().items()
                }

    train(None, limit=MOST_STEPS, callbacks=[Keep()])
    return kept


def _await_checkpoints(folder: Path, count: int, tiers: Forked) -> None:
    deadline = time.monotonic() + START_SECONDS
    while len(list(folder.glob("*.ckpt"))) < count:
        if len(tiers.running()) < len(TIERS) or time.monotonic() > deadline:
            raise AssertionError(tiers.describe())
        time.sleep(0.02)


def _mount_small_disk(folder: Path) -> None:
    """Puts a disk of one megabyte there, which only this process and its children see.

    Raises:
        OSError: If this process may not.
    """
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "no file system of one's own can be mounted here")
    for argv in (
        ["mount", "--make-rprivate", "/"],
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)],
    ):
        subprocess.run(argv, check=True, timeout=20)


# Strangers


def train_under_attack(*, idle: int) -> dict[str, Any]:
    """Trains over links with keys while strangers knock at the edge and the cloud misbehaves.

    Args:
        idle: How many connections that say nothing are held open meanwhile.

    Returns:
        How the tiers ended, what they wrote, their steps, and how far their weights are from plain
        Lightning's on the same mini-batches.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        topology = make_topology(folder)
        topology.to_json(folder / "topology.json")
        edge = topology.tier("edge")
        port = int(str(edge.address).rpartition(":")[2])

        def work(own: str) -> Any:
            callbacks = [Misbehave()] if own == "cloud" else []
            where = str(folder / "topology.json")
            return train(folder, topology=where, seconds_per_step=0.02, callbacks=callbacks)

        with forked(work, TIERS, layout="nodes") as tiers:
            _await_steps(folder, 5, tiers)
            with idle_connections(port, idle):
                for _ in range(2):
                    knock(port, str(edge.public_key))
                    scan(port)
                _await_steps(folder, steps_done(folder / "steps.txt") + 20, tiers)
            (folder / "stop").touch()
            tiers.wait(ENDING_SECONDS)
            ends = tiers.ends()
    values = [end.value for end in ends.values() if end.value is not None]
    plain = apart(lambda: train(None, limit=values[0]["steps"])["weights"]) if values else {}
    return {
        "codes": {tier: end.code for tier, end in ends.items()},
        "outputs": {tier: end.output for tier, end in ends.items()},
        "steps": [value["steps"] for value in values],
        "differences": [largest_difference(value["weights"], plain) for value in values],
    }


class Misbehave(Callback):
    """Sends the edge, after each step, frames that no sender of this version makes."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        network: Network = trainer.strategy._network  # type: ignore[attr-defined]
        protocol = network._engine.protocol  # type: ignore[union-attr]
        whole = {"k": "chunk", "s": "cloud", "t": "edge", "e": protocol.session, "c": 1, "g": 0}
        whole |= {"te": protocol.peers["edge"].session, "q": 1 << 40, "l": [10, 1 << 55]}
        changes: list[dict[str, Any]] = [{"k": "?"}, {"s": "moon"}, {"q": -1}, {"c": 9}, {"l": 3}]
        changed = [json.dumps({**whole, **change}).encode() for change in changes]
        send_raw(network, [[text, b"x" * 30] for text in (b"\xff", b"{}", *changed)])


def _await_steps(folder: Path, count: int, tiers: Forked) -> None:
    deadline = time.monotonic() + START_SECONDS
    while steps_done(folder / "steps.txt") < count:
        if len(tiers.running()) < len(TIERS) or time.monotonic() > deadline:
            raise AssertionError(tiers.describe())
        time.sleep(0.02)


# Values


class Strange(Wide):
    """Its loss, or a gradient, is not what it should be in some steps.

    Args:
        kind: What is strange.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx not in (2, 5):
            return loss
        if self.kind == "no loss":
            return None
        if self.kind == "loss of NaN":
            return loss * float("nan")
        if self.kind == "infinite loss":
            return loss * float("inf")
        return loss

    def on_after_backward(self) -> None:
        if self.kind == "infinite gradient" and self.global_step == 2:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad[0] = float("inf")


STRANGE: dict[str, Callable[[], dict[str, Any]]] = {
    "no loss": dict,
    "loss of NaN": dict,
    "infinite loss": dict,
    "infinite gradient": dict,
    "loss of NaN, anomalies detected": lambda: {"detect_anomaly": True},
    "no loss, accumulating": lambda: {"accumulate_grad_batches": 2},
}


def train_strangely(name: str, *, owner: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Trains where values are not finite, plainly and on three tiers.

    Returns:
        Plainly, and by tier, weights and steps or else the error's class, text and traceback.
    """

    def attempt(folder: Path | None) -> dict[str, Any]:
        kind = name.partition(",")[0]
        try:
            return train(folder, limit=8, owner=owner, module=Strange(kind), **STRANGE[name]())
        except Exception as error:
            return {
                "type": type(error).__name__,
                "message": str(error),
                "traceback": traceback.format_exc(),
            }

    with tempfile.TemporaryDirectory() as folder:
        with forked(lambda _: attempt(Path(folder)), TIERS) as tiers:
            tiers.wait(60)
            ends = tiers.ends()
        plain = apart(lambda: attempt(None))
    return plain, {tier: end.value or {"output": end.output} for tier, end in ends.items()}
