"""Runs in which tiers have different accelerators: some the CPU, some an emulated one."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_hiertrain import HierTrainStrategy, Schedule
from tests.distributed.forked import apart, forked
from tests.distributed.training import Switch
from tests.emulated import accelerator
from tests.unit.transport.helpers import make_topology

TIERS = ("device", "edge", "cloud")
BATCH, CLASSES = 12, 4


class Net(LightningModule):
    """A small convolutional network that keeps and measures what users' modules do."""

    def __init__(self, optimizer: str, normalises: bool, dropout: float, own_kernels: bool) -> None:
        super().__init__()
        self.optimizer, self.own_kernels = optimizer, own_kernels
        self.accuracy = MulticlassAccuracy(CLASSES)
        self.losses: list[Tensor] = []
        self.register_buffer("scale", torch.full((3, 1, 1), 0.5))
        self.net = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4) if normalises else nn.GroupNorm(2, 4),
            nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 16), nn.Dropout(dropout),
            nn.Tanh(), nn.Linear(16, CLASSES),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.net(images * self.scale)
        return found

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, lengths, labels = batch
        assert lengths.device.type == "cpu", "the hook has left it there"
        logits = self(images)
        loss = F.cross_entropy(logits, labels)
        self.losses.append(loss.detach())
        self.accuracy(logits, labels)
        self.log("train_loss", loss, on_epoch=True)
        self.log("train_accuracy", self.accuracy, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("own_mean", torch.stack(self.losses).mean())
        self.losses.clear()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, _, labels = batch
        self.log("val_loss", F.cross_entropy(self(images), labels))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        found: Tensor = self(batch[0])
        return found

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        images, lengths, labels = batch
        return images.to(device), lengths, labels.to(device)

    def configure_optimizers(self) -> Any:
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        # As in a script that asks for its machine's best kernels.
        fused = self.own_kernels and self.device.type == "cpu"
        return torch.optim.Adam(self.parameters(), lr=1e-2, fused=fused)


def data(count: int, seed: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    images = torch.randn(count, 3, 8, 8, generator=generator) + 0.3 * labels[:, None, None, None]
    return DataLoader(TensorDataset(images, torch.arange(count), labels), batch_size=BATCH)


def train(
    folder: Path,
    *,
    tier: str | None = None,
    emulated: str | None = None,
    library: str = "",
    schedules: list[dict[str, Any]] | None = None,
    strategies: list[dict[str, Any]],
    model: dict[str, Any] | None = None,
    epochs: int = 2,
) -> dict[str, Any]:
    """Fits, goes on from the checkpoint with another Trainer, tests and predicts.

    Args:
        folder: This tier's own; topology and keys lie above it.
        tier: The tier that this process is, `None` for plain Lightning.
        emulated: The tier that has the emulated accelerator.
        library: The built accelerator.
        schedules: Those of the first fit, each put in force two steps after the one before. What
            follows is as its strategy says.
        strategies: For each fit the arguments of the strategy.
        model: Arguments of `Net`.
        epochs: Epochs in each fit.
    """
    own: Any = "cpu"
    if tier is not None and tier == emulated:
        accelerator.load(library)
        own = accelerator.Emulated()
    seed_everything(7)
    usual: dict[str, Any] = {"optimizer": "adam", "normalises": False, "dropout": 0.0}
    module = Net(**{**usual, "own_kernels": tier is not None, **(model or {})})
    report: dict[str, Any] = {}
    for part, strategy in enumerate(strategies, start=1):
        given = [Schedule.from_dict(x) for x in (schedules if part == 1 else None) or ()]
        callbacks: list[Callback] = [
            Switch({2 * i: x for i, x in enumerate(given) if i}),
            ModelCheckpoint(folder, f"part{part}", save_on_train_epoch_end=True),
        ]
        made: Any = "auto"
        nodes = 1
        if tier is not None:
            nodes = len(TIERS)
            made = HierTrainStrategy(
                topology=folder.parent / "topology.json",
                schedule=given[0] if given else None,
                timeout_seconds=60,
                **strategy,
            )
        one = Trainer(
            accelerator=own,
            devices=1,
            num_nodes=nodes,
            strategy=made,
            max_epochs=part * epochs,
            callbacks=callbacks,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            gradient_clip_val=0.5,
            accumulate_grad_batches=2,
        )
        last = folder / "part1.ckpt" if part == 2 else None
        one.fit(module, data(44, 1), data(20, 2), ckpt_path=last, weights_only=False)
        report[f"metrics {part}"] = {k: float(v) for k, v in one.callback_metrics.items()}
        report[f"steps {part}"] = one.global_step
    report["device"] = str(one.strategy.root_device)
    report["test"] = [dict(x) for x in one.test(module, data(20, 3), verbose=False)]
    report["predictions"] = [x.cpu() for x in one.predict(module, data(20, 3)) or ()]
    report["weights"] = {name: x.cpu().clone() for name, x in module.state_dict().items()}
    if tier is not None:
        report["profile"] = one.strategy.profile
        report["synchronizations"] = 0
        if tier == emulated:
            report["synchronizations"] = torch.accel.num_synchronizations()  # type: ignore[attr-defined]
    return report


def run(**options: Any) -> dict[str, Any]:
    """Trains on three tiers, one process each with a Trainer of its own, and by plain Lightning."""
    folder = Path(tempfile.mkdtemp(prefix="hiertrain-accelerators-"))
    make_topology(folder).to_json(folder / "topology.json")

    def work(tier: str) -> Any:
        # Each has a disk of its own.
        (folder / tier).mkdir()
        return train(folder / tier, tier=tier, **options)

    with forked(work, TIERS, layout="nodes") as tiers:
        tiers.wait(60)
        told = tiers.describe()
        ends = tiers.ends()
    assert all(end.code == 0 for end in ends.values()), told
    found: dict[str, Any] = {tier: end.value for tier, end in ends.items()}
    plain = {k: v for k, v in options.items() if k in ("strategies", "model", "epochs")}
    (folder / "plain").mkdir()
    found["plain"] = apart(functools.partial(train, folder / "plain", **plain))
    return found


def refused(library: str) -> dict[str, str]:
    """Returns the errors of calls that forget to move something to the accelerator."""

    def work() -> dict[str, str]:
        accelerator.load(library)
        here, there = torch.ones(2, 2), torch.ones(2, 2, device="accel")
        calls: dict[str, Callable[[], Any]] = {
            "sum": lambda: here + there,
            "product": lambda: there @ here,
            "join": lambda: torch.cat([there, here]),
            "array": there.numpy,
            "chance": lambda: torch.rand(2, device="accel", generator=torch.Generator()),
        }
        errors = {}
        for name, call in calls.items():
            try:
                call()
            except (RuntimeError, TypeError) as error:
                errors[name] = str(error)
        return errors

    found: dict[str, str] = apart(work)
    return found
