"""Runs with several stages: validation that steers training, resuming, testing and predicting.

Each function is called by every tier and, with `plain=True`, by the test's own process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

from lightning_hiertrain import HierTrainStrategy, Schedule
from tests.distributed.models import MODELS, Classifier, FunctionalLeNet, loader

SAMPLES, BATCH = 44, 12


class MeasuredLeNet(FunctionalLeNet):
    """Logs torchmetrics objects, of which one keeps a growing list."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.train_accuracy = MulticlassAccuracy(10, average="micro")
        self.accuracy = MulticlassAccuracy(10, average="micro")
        self.auroc = MulticlassAUROC(10, thresholds=None)
        self.mean_loss = MeanMetric()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        logits = self(images)
        loss = torch.nn.functional.cross_entropy(logits, labels)
        self.train_accuracy(logits, labels)
        self.log("train_accuracy", self.train_accuracy, on_step=True, on_epoch=True)
        self.mean_loss.update(loss, weight=len(labels))
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("mean_loss", self.mean_loss.compute())
        self.mean_loss.reset()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.accuracy(logits, labels)
        self.auroc.update(logits, labels)
        self.log("val_loss", torch.nn.functional.cross_entropy(logits, labels))
        self.log_dict({"accuracy": self.accuracy, "auroc": self.auroc})

    test_step = validation_step


class Sequence:
    """A loader in a fixed order that goes on after a checkpoint where it was."""

    def __init__(self, inner: DataLoader[Any]) -> None:
        self.inner = inner
        self.position = 0

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Any:
        start = self.position
        for index, batch in enumerate(self.inner):
            if index >= start:
                self.position = (index + 1) % len(self)
                yield batch

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def make(
    model: str,
    *,
    plain: bool,
    schedule: dict[str, Any] | None,
    optimizer: str,
    plateau: bool = False,
) -> tuple[Classifier, dict[str, Any]]:
    """Returns a module and the arguments that make a Trainer for it."""
    seed_everything(7)
    made = {**MODELS, "MeasuredLeNet": MeasuredLeNet}[model]
    module = made(optimizer=optimizer, plateau=plateau)
    strategy: Any = "auto"
    if not plain:
        given = None if schedule is None else Schedule.from_dict(schedule)
        strategy = HierTrainStrategy(schedule=given, timeout_seconds=60)
    quiet = {
        "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
        "accelerator": "cpu", "devices": 1 if plain else 3, "strategy": strategy,
        "precision": "64-true",
    }  # fmt: skip
    return module, quiet


def fit(
    *,
    model: str = "ModuleLeNet",
    folder: str,
    schedule: dict[str, Any] | None = None,
    plain: bool = False,
    optimizer: str = "adam",
    resume: str | None = None,
    max_epochs: int = 5,
    every_n_train_steps: int | None = None,
    stateful: bool = False,
    accumulate: int = 1,
) -> dict[str, Any]:
    """Trains without shuffling and saves checkpoints on the way."""
    module, arguments = make(model, plain=plain, schedule=schedule, optimizer=optimizer)
    checkpoint = ModelCheckpoint(
        dirpath=folder,
        filename="{step}",
        save_top_k=-1,
        save_last=True,
        every_n_train_steps=every_n_train_steps,
    )
    trainer = Trainer(
        **arguments,
        max_epochs=max_epochs,
        callbacks=[checkpoint],
        accumulate_grad_batches=accumulate,
        limit_val_batches=0,
    )
    data: Any = loader(model, count=SAMPLES, batch_size=BATCH, seed=1, shuffle=False)
    trainer.fit(module, Sequence(data) if stateful else data, ckpt_path=resume)
    return report(trainer, module)


def monitored(
    *,
    model: str,
    folder: str,
    schedule: dict[str, Any] | None = None,
    plain: bool = False,
    optimizer: str = "sgd",
    monitor: str = "val_loss",
) -> dict[str, Any]:
    """Trains with validation, a plateau schedule, early stopping and the best checkpoints."""
    module, arguments = make(
        model, plain=plain, schedule=schedule, optimizer=optimizer, plateau=True
    )
    history = History()
    stopping = EarlyStopping(monitor, patience=3, min_delta=0.1)
    checkpoint = ModelCheckpoint(
        dirpath=folder,
        monitor=monitor,
        save_top_k=2,
        save_last=True,
        filename="{epoch}-{step}-{" + monitor + ":.4f}",
    )
    trainer = Trainer(**arguments, max_epochs=12, callbacks=[history, stopping, checkpoint])
    trainer.fit(
        module,
        loader(model, count=SAMPLES, batch_size=BATCH, seed=1, shuffle=True),
        loader(model, count=20, batch_size=8, seed=2, shuffle=False),
    )
    return {
        **report(trainer, module),
        "history": history.epochs,
        "stopped_epoch": stopping.stopped_epoch,
        "best": Path(checkpoint.best_model_path).name,
        "best_score": float(checkpoint.best_model_score),
        "kept": sorted(Path(path).name for path in checkpoint.best_k_models),
        "files": sorted(path.name for path in Path(folder).glob("*.ckpt")),
    }


class History(Callback):
    """Notes at each epoch's end what callbacks see."""

    def __init__(self) -> None:
        self.epochs: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        values["lr"] = trainer.optimizers[0].param_groups[0]["lr"]
        self.epochs.append(values)


def every_stage(
    *, folder: str, schedule: dict[str, Any] | None = None, plain: bool = False
) -> dict[str, Any]:
    """Validates, tests and predicts before and after training."""
    model = "MeasuredLeNet"
    module, arguments = make(model, plain=plain, schedule=schedule, optimizer="adam")
    checkpoint = ModelCheckpoint(
        dirpath=folder, monitor="val_loss", filename="{epoch}", save_last=True
    )
    trainer = Trainer(**arguments, max_epochs=3, callbacks=[checkpoint])
    held_out = loader(model, count=20, batch_size=8, seed=2, shuffle=False)
    results: dict[str, Any] = {}

    def stages(when: str, **options: Any) -> None:
        results[f"validate {when}"] = trainer.validate(module, held_out, verbose=False, **options)
        results[f"test {when}"] = trainer.test(module, held_out, verbose=False, **options)
        results[f"predict {when}"] = trainer.predict(module, held_out, **options)

    stages("before")
    trainer.fit(
        module, loader(model, count=SAMPLES, batch_size=BATCH, seed=1, shuffle=True), held_out
    )
    results["weights"] = {name: value.clone() for name, value in module.state_dict().items()}
    stages("after")
    stages("best", ckpt_path="best")
    stages("last", ckpt_path="last")
    results["test of the trainer's own"] = trainer.test(dataloaders=held_out, verbose=False)
    trainer.fit_loop.max_epochs = 5
    trainer.fit(
        module, loader(model, count=SAMPLES, batch_size=BATCH, seed=1, shuffle=False), held_out
    )
    stages("after a second fit")
    return {**report(trainer, module), "results": results}


def report(trainer: Trainer, module: Any) -> dict[str, Any]:
    """What came out of a run."""
    return {
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "global_step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
    }
