"""Small projects that each use some of what Lightning offers, run across tiers or plainly."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import grad_norm
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_hiertrain import HierTrainStrategy, Schedule

SAMPLES, BATCH, FEATURES, CLASSES = 44, 12, 10, 4


class Net(LightningModule):
    """A project with nothing special; the others change some of it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, CLASSES)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("val_loss", loss)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.log("test_loss", F.cross_entropy(self(x), y))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Hooked(Net):
    """Uses every hook around a step: logs in them, keeps state between them."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []
        self.losses: list[float] = []
        self.counts: dict[str, int] = {}
        self.best = float("inf")

    def _count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.outputs.append(loss.detach())
        self.log("train_loss", loss, prog_bar=True, batch_size=len(x))
        self.log_dict({"accuracy": (logits.argmax(1) == y).double().mean(), "count": batch_idx})
        return {"loss": loss, "hits": (logits.argmax(1) == y).sum()}

    def on_train_epoch_start(self) -> None:
        self._count("epoch_start")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        self._count("batch_start")
        return -1 if self.current_epoch == 2 and batch_idx == 2 else None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._count("batch_end")
        self.losses.append(outputs["loss"].item())
        self.log("hits", outputs["hits"].double(), on_step=True)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self._count("zero_grad")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))

    def on_after_backward(self) -> None:
        first = next(self.parameters()).grad
        assert first is not None
        self.log("first_gradient", first.abs().max())

    def on_train_epoch_end(self) -> None:
        mean = torch.stack(self.outputs).mean()
        self.best = min(self.best, float(mean))
        self.log("own_mean", mean)
        self.log("best", self.best)
        self.outputs.clear()

    def on_validation_epoch_end(self) -> None:
        self.log("val_hook", float(len(self.outputs)))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        total = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class ByHand(Net):
    """Has weights that no optimizer changes: one in front of all layers, and averages of others.

    They change within the step, without a trace in their version; sizes are asked for by `size`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x * self.scale)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y) + F.mse_loss(logits, self.teacher(x))
        self.log("train_loss", loss, on_epoch=True, batch_size=x.size(0))
        self.log("rows", x.shape[0])
        return {"loss": loss, "rows": x.size(0)}

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.scale.data *= 0.9
        for mean, weight in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            mean.data = 0.8 * mean.data + 0.2 * weight.data

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.teacher(x * self.scale), y))


class Notes(Callback):
    """Writes on rank 0 alone, where that asks Lightning for the folder."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            Path(str(trainer.log_dir), f"epoch{trainer.current_epoch}.txt").write_text("ended")


class Pictures(Callback):
    """Looks at mini-batches, on whatever tier it runs."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        x, y = batch
        self.seen.append(float(x.sum() + y.sum()))

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        self.seen.append(float(pl_module(batch[0]).sum()))

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}


class Clamped(Net):
    """Changes its weights after each step, and the gradients before it."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.2, 0.2)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad *= 0.5
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="value")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Averaged(Net):
    """Keeps a moving average of its weights and validates with it."""

    def __init__(self) -> None:
        super().__init__()
        self.average = torch.optim.swa_utils.AveragedModel(
            self.net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.8)
        )

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.average.update_parameters(self.net)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.average(x), y))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.5)


class Finetuned(Net):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.net[:3]

    def configure_optimizers(self) -> Any:
        wanted = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(wanted, lr=0.5, momentum=0.9)


class Swapped(Net):
    """Validates with averaged weights, which it swaps in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.average = [torch.zeros_like(p, dtype=torch.double) for p in self.parameters()]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for average, parameter in zip(self.average, self.parameters(), strict=True):
            average.lerp_(parameter.detach().to(average.device), 0.3)

    def _swap(self) -> None:
        for average, parameter in zip(self.average, self.parameters(), strict=True):
            held = parameter.detach().clone()
            parameter.data.copy_(average)
            average.copy_(held)

    def on_validation_start(self) -> None:
        self._swap()

    def on_validation_end(self) -> None:
        self._swap()


class Unfrozen(Net):
    """Begins with a frozen layer and its own way of changing the learning rate."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 1:
            self.net[0].requires_grad_(True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] *= 0.9

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


class Clamp(Callback):
    """Changes weights from a callback, which runs on every tier."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        for parameter in pl_module.parameters():
            parameter.data.clamp_(-0.25, 0.25)


class StepNorms(Callback):
    """Reads all weights after each step, or from some step on."""

    def __init__(self, first: int = 0) -> None:
        self.norms: list[float] = []
        self.first = first

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step > self.first:
            self.norms.append(sum(float(p.norm()) for p in pl_module.parameters()))

    def state_dict(self) -> dict[str, Any]:
        return {"norms": list(self.norms)}


class Hidden(Callback):
    """Reads a weight from some step on, and its code does not say so."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        if trainer.global_step > 5:
            float(next(iter(pl_module.net[0]._parameters.values())).sum())


class Looking(Net):
    """Looks at the whole batch after the step."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert len(batch[0]) == len(batch[1])
        self.log("labels", batch[1].double().mean())
        self.log("inputs", batch[0].mean())


class LookingAside(Net):
    """Looks at it so that its code does not tell."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("inputs", args[1][0].mean())


class Norms(Callback):
    """Reads all weights at an epoch's end and keeps what it read in the checkpoint."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        norms = [float(p.detach().norm()) for p in pl_module.parameters()]
        self.norms.append(sum(norms))

    def state_dict(self) -> dict[str, Any]:
        return {"norms": list(self.norms)}


@dataclass
class Samples:
    """A batch of its own class."""

    x: Tensor
    y: Tensor
    name: str
    weight: float

    def __len__(self) -> int:
        return len(self.x)


class Structured(Net):
    """Its batch is nested and holds what cannot be split."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inner = batch["inputs"][0]
        assert isinstance(batch["names"][0], str)
        scaled = (inner["x"] - batch["mean"]) / 2
        loss = F.cross_entropy(self(scaled), batch["targets"]["y"])
        return loss * batch["weight"]

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx), batch_size=len(batch["names"]))


class OwnClass(Net):
    def training_step(self, batch: Samples, batch_idx: int) -> Any:
        assert batch.name.startswith("batch")
        loss = F.cross_entropy(self(batch.x), batch.y) * batch.weight
        self.log("train_loss", loss, batch_size=len(batch))
        return loss


class TwoLoaders(Net):
    """Trains on two loaders at once."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (x, y), (noise, _) = batch["labelled"], batch["noise"]
        loss = F.cross_entropy(self(x + 0.1 * noise), y)
        self.log("train_loss", loss)
        return loss


class Transferred(Net):
    """Works on the batch when it reaches the device."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return x.flip(1), y

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return (x - x.mean(0)) / x.std(0), y


class Weighted(Net):
    """Weighs samples by a table that is not split, freezes a layer, steps its schedule by epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(0.5, 1.5, CLASSES))
        self.net[0].weight.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self(x), y, weight=self.table, reduction="none")
        self.log("train_loss", loss.mean(), on_epoch=True)
        return loss.mean() + 1e-3 * sum(p.pow(2).sum() for p in self.parameters())

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": self.net[:3].parameters(), "lr": 0.1},
            {"params": self.net[3:].parameters(), "lr": 0.3, "weight_decay": 0.01},
        ]
        optimizer = torch.optim.SGD(groups, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)]


class Stream(IterableDataset[Any]):
    """Samples without a length."""

    def __iter__(self) -> Iterator[Any]:
        yield from samples(1)


def samples(seed: int, count: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=generator, dtype=torch.double)
    return TensorDataset(x, torch.randint(CLASSES, (count,), generator=generator))


def loader(seed: int = 1, count: int = SAMPLES, **kwargs: Any) -> DataLoader[Any]:
    return DataLoader(samples(seed, count), batch_size=BATCH, **kwargs)


def nested(items: list[Any]) -> dict[str, Any]:
    return {
        "inputs": [{"x": torch.stack([x for x, _ in items])}],
        "targets": {"y": torch.stack([y for _, y in items])},
        "names": [f"sample {int(y)}" for _, y in items],
        "mean": torch.full((FEATURES,), 0.1, dtype=torch.double),
        "weight": 0.5,
    }


def own_class(items: list[Any]) -> Samples:
    return Samples(
        x=torch.stack([x for x, _ in items]),
        y=torch.stack([y for _, y in items]),
        name=f"batch of {len(items)}",
        weight=2.0,
    )


CALLS: list[str] = []
"""Which hooks of `Data` this process has called."""


class Data(LightningDataModule):
    """Tells the model what it found in `setup`."""

    def prepare_data(self) -> None:
        CALLS.append("prepare_data")

    def setup(self, stage: str) -> None:
        CALLS.append(f"setup {stage}")
        self.made: Dataset[Any] = samples(1)
        self.num_samples = len(samples(1))

    def train_dataloader(self) -> Any:
        return DataLoader(self.made, batch_size=BATCH, shuffle=True, num_workers=1)

    def val_dataloader(self) -> Any:
        return [loader(2, 20), loader(3, 16)]

    def test_dataloader(self) -> Any:
        return loader(4, 16)


PROJECTS: dict[str, Any] = {
    "hooks": lambda: (Hooked(), {"max_epochs": 4}, [loader(shuffle=True), loader(2, 20)]),
    "hooks, accumulating": lambda: (
        Hooked(),
        {"max_epochs": 4, "accumulate_grad_batches": 3},
        [loader(), loader(2, 20)],
    ),
    "clip by value": lambda: (
        Net(),
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        [loader()],
    ),
    "weights changed in hooks": lambda: (Clamped(), {}, [loader(), loader(2, 20)]),
    "weights changed in a callback": lambda: (
        Net(),
        {"callbacks": [Clamp(), Norms()]},
        [loader(), loader(2, 20)],
    ),
    "unfreezing and rates in hooks": lambda: (Unfrozen(), {"max_epochs": 4}, [loader()]),
    "weights swapped for validation": lambda: (Swapped(), {}, [loader(), loader(2, 20)]),
    "weight averaging": lambda: (
        Net(),
        {"callbacks": [WeightAveraging(), Norms()]},
        [loader(), loader(2, 20)],
    ),
    "weights read after each step": lambda: (
        Net(),
        {"callbacks": [StepNorms()]},
        [loader(), loader(2, 20)],
    ),
    "weights read from some step on": lambda: (
        Net(),
        {"callbacks": [StepNorms(first=5)]},
        [loader()],
    ),
    "weights changed by hand": lambda: (
        ByHand(),
        {"callbacks": [Notes()]},
        [loader(), loader(2, 20)],
    ),
    "mini-batches read in a callback": lambda: (
        Net(),
        {"callbacks": [Pictures()]},
        [loader(shuffle=True), loader(2, 20)],
    ),
    "mini-batches read in a hook": lambda: (Looking(), {}, [loader()]),
    "moving average": lambda: (Averaged(), {}, [loader(), loader(2, 20)]),
    "nested batch": lambda: (
        Structured(),
        {},
        [loader(collate_fn=nested), loader(2, 20, collate_fn=nested)],
    ),
    "batch of an own class": lambda: (OwnClass(), {}, [loader(collate_fn=own_class)]),
    "two training loaders": lambda: (
        TwoLoaders(),
        {},
        [CombinedLoader({"labelled": loader(), "noise": loader(5)}, "max_size_cycle")],
    ),
    "transfer hooks": lambda: (Transferred(), {}, [loader(), loader(2, 20)]),
    "frozen layer, groups, table": lambda: (Weighted(), {}, [loader()]),
    "stream": lambda: (
        Net(),
        {"max_epochs": 2},
        [DataLoader(Stream(), batch_size=BATCH), [loader(2, 20), loader(3, 16)]],
    ),
    "stream with a limit": lambda: (
        Net(),
        {"limit_train_batches": 2, "limit_val_batches": 1},
        [DataLoader(Stream(), batch_size=BATCH), loader(2, 20)],
    ),
    "limits": lambda: (
        Net(),
        {"limit_train_batches": 0.5, "limit_val_batches": 2, "val_check_interval": 1},
        [loader(shuffle=True), [loader(2, 40), loader(3, 16)]],
    ),
    "overfit": lambda: (Net(), {"overfit_batches": 2}, [loader(shuffle=True), loader(2, 20)]),
    "validation in mid-epoch": lambda: (
        Net(),
        {"val_check_interval": 3, "check_val_every_n_epoch": None, "max_epochs": 4},
        [loader(), loader(2, 20)],
    ),
    "validation every second epoch": lambda: (
        Net(),
        {"check_val_every_n_epoch": 2, "max_epochs": 4},
        [loader(), loader(2, 20)],
    ),
    "fast_dev_run": lambda: (Net(), {"fast_dev_run": 2}, [loader(), loader(2, 20)]),
    "datamodule": lambda: (Net(), {"max_epochs": 2}, [Data()]),
    "accumulation that grows": lambda: (
        Net(),
        {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 2})], "max_epochs": 4},
        [loader()],
    ),
    "stochastic weight averaging": lambda: (
        Net(),
        {"callbacks": [StochasticWeightAveraging(0.01, swa_epoch_start=1)], "max_epochs": 4},
        [loader()],
    ),
    "finetuning": lambda: (
        Finetuned(),
        {
            "callbacks": [
                BackboneFinetuning(
                    2, backbone_initial_ratio_lr=0.1, should_align=False, verbose=False
                )
            ],
            "max_epochs": 4,
        },
        [loader()],
    ),
}


REFUSED: dict[str, Any] = {
    "weights read late": lambda: (Net(), {"callbacks": [Hidden()]}, [loader()]),
    "inputs read in a hook": lambda: (LookingAside(), {}, [loader()]),
}


def run(
    project: str, *, folder: str, schedule: dict[str, Any] | None = None, plain: bool = False
) -> dict[str, Any]:
    """Fits a project and reports what came out."""
    make = {**PROJECTS, **REFUSED}[project]
    return fit_project(make, folder=folder, schedule=schedule, plain=plain)


def fit_project(
    make: Callable[[], Any], *, folder: str, schedule: dict[str, Any] | None, plain: bool
) -> dict[str, Any]:
    """Fits what `make` returns (module, options, data) and reports what came out."""
    seed_everything(3)
    CALLS.clear()
    module, options, data = make()
    strategy: Any = "auto"
    if not plain:
        assert schedule is not None
        strategy = HierTrainStrategy(schedule=Schedule.from_dict(schedule), timeout_seconds=60)
    callbacks = [LearningRateMonitor(), *options.pop("callbacks", [])]
    usual: dict[str, Any] = {
        "precision": "64-true",
        "callbacks": None if {"fast_dev_run", "barebones"} & options.keys() else callbacks,
        "logger": CSVLogger(folder, name="", version=""),
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "max_epochs": 3,
    }
    trainer = Trainer(
        accelerator="cpu", devices=1 if plain else 3, strategy=strategy, **{**usual, **options}
    )
    datamodule = data[0] if isinstance(data[0], LightningDataModule) else None
    if datamodule is None:
        trainer.fit(module, *data)
    else:
        trainer.fit(module, datamodule=datamodule)
        trainer.test(module, datamodule=datamodule, verbose=False)
    metrics = Path(folder, "metrics.csv")
    report = {
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "stopped": trainer.should_stop,
        "saved": {
            path.name: torch.load(path, weights_only=False)["state_dict"]
            for path in sorted(Path(folder).glob("*.ckpt"))
        },
        "notes": sorted(path.name for path in Path(folder).glob("*.txt")),
        "steps": trainer.global_step,
        "epoch": trainer.current_epoch,
        "callback_metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
        "logged_metrics": {k: float(v) for k, v in trainer.logged_metrics.items()},
        "log": metrics.read_text().splitlines() if metrics.exists() else [],
        "rates": [group["lr"] for x in trainer.optimizers for group in x.param_groups],
    }
    for name in ("losses", "counts", "best", "kept"):
        if hasattr(module, name):
            report[name] = getattr(module, name)
    report["callbacks"] = [
        x.state_dict() for x in callbacks if isinstance(x, Norms | StepNorms | Pictures)
    ]
    if datamodule is not None:
        report["calls"] = list(CALLS)
        report["num_samples"] = datamodule.num_samples
    return report
