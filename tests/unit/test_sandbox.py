"""Steps of the sandbox leave no trace in the module and none for the next step."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torchmetrics import MeanMetric

from lightning_hiertrain.partition import trace_step
from lightning_hiertrain.partition.calls import tensors_in
from lightning_hiertrain.sandbox import Sandbox


class Keeping(LightningModule):
    """Keeps something of each step in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        self.mean = MeanMetric()
        self.outputs: list[Any] = []
        self.seen = {"steps": 0, "losses": [torch.zeros(1)]}
        self.average = torch.zeros(())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.net(batch).pow(2).mean()
        self.mean.update(loss)
        self.outputs.append(loss)
        self.seen["steps"] += 1
        self.seen["losses"].append(loss.detach())
        self.average.lerp_(loss.detach(), 0.5)
        self.new = loss
        self.log("mean", self.mean)
        self.log("average", self.average)
        return loss


@pytest.fixture
def sandbox() -> Sandbox:
    module = Keeping()
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    module.trainer = trainer
    return Sandbox(module, [], nullcontext)


def test_a_step_that_keeps_things_has_its_cuts(sandbox: Sandbox) -> None:
    with sandbox.isolated():
        chain = trace_step(sandbox.training_step, sandbox.module, torch.randn(6, 4))
    assert [layer.name for layer in chain] == ["net.0", "net.1", "net.2", "net.3", "pow"]


def test_steps_begin_alike(sandbox: Sandbox) -> None:
    batch = torch.randn(6, 4)
    with sandbox.isolated():
        first, again = sandbox.training_step(batch), sandbox.training_step(batch)
    one, two = list(tensors_in(first)), list(tensors_in(again))
    assert len(one) == len(two) > 3
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert sandbox.module.seen["steps"] == len(sandbox.module.outputs) == 1
