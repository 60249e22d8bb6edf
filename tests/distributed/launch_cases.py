"""What the launcher's own test runs in the processes; cheap to import."""

from __future__ import annotations

import os
import signal
import socket
import threading
from typing import Any


def environment(names: list[str]) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in names}


def scale(factor: float) -> float:
    return factor * int(os.environ["LOCAL_RANK"])


def fail_on(rank: int) -> None:
    """Raises on one rank; the others wait, as a rank waits for a peer."""
    if int(os.environ["LOCAL_RANK"]) == rank:
        raise ValueError(f"rank {rank} has had enough")
    threading.Event().wait()


def die_on(rank: int) -> str:
    """Kills one rank; the others go on."""
    if int(os.environ["LOCAL_RANK"]) == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def hang() -> None:
    threading.Event().wait()


def lightning_ranks(num_nodes: int, devices: int) -> dict[str, Any]:
    """What a `Trainer` makes of the environment, as far as it gets without a process group."""
    import lightning as L
    from lightning.pytorch.strategies import DDPStrategy

    trainer = L.Trainer(
        accelerator="cpu",
        num_nodes=num_nodes,
        devices=devices,
        strategy=DDPStrategy(),
        logger=False,
        enable_checkpointing=False,
    )
    return {
        "launcher": type(trainer.strategy.launcher).__name__,
        "creates_processes": not trainer.strategy.cluster_environment.creates_processes_externally,
        "global_rank": trainer.global_rank,
        "world_size": trainer.world_size,
        "port": trainer.strategy.cluster_environment.main_port,
    }


def interfaces() -> list[str]:
    return sorted(name for _, name in socket.if_nameindex())
