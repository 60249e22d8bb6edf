"""What two tiers that have met do in the test of their end; called by every rank."""

from __future__ import annotations

import os

import torch

from lightning_hiertrain import HierTrainStrategy
from lightning_hiertrain.meeting import meet, open_links


def send_and_end(megabytes: int) -> int | None:
    """The first tier ends as soon as it has sent; the second tells how many bytes it got."""
    rank = int(os.environ["LOCAL_RANK"])
    settings = HierTrainStrategy(tiers=("device", "edge"), timeout_seconds=30)._settings
    network = open_links(
        settings, rank=rank, is_one_machine=True, main_port=int(os.environ["MASTER_PORT"])
    )
    meet(network, settings, rank, "32-true")
    if rank == 0:
        network.send("edge", "weights", torch.ones(megabytes << 20, dtype=torch.uint8))
        return None
    received = network.receive("device", "weights")
    return int(received.sum(dtype=torch.int64))
