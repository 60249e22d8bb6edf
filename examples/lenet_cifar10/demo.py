"""What `make demo` runs: LeNet-5 across device, edge and cloud as three processes of this machine.

The script starts the other two processes itself, as Lightning does for `devices=3`. It tells how
profiling goes, the schedule that was chosen, predicted against measured step time, the accuracy and
where the checkpoint is. Its last line is `RESULT` and a JSON object.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import time
import warnings
from pathlib import Path

import lightning as L
from data import CIFAR10DataModule
from lightning.pytorch.callbacks import ModelCheckpoint
from model import LeNet5

PROGRESS_EVERY_SECONDS = 2.0


class Narrator(L.Callback):
    """Tells on rank 0 what happens, one line at a time, so that it can be read in a log too."""

    def __init__(self) -> None:
        self.announced = False
        self.steps = 0
        self.plain_step_seconds: list[float] = []
        self._started = self._told = self._step_started = time.perf_counter()

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Starts the clock; importing and connecting do not count as training."""
        self._started = self._told = time.perf_counter()
        self._say("training starts")
        if _is_profiling(trainer):
            self._say("measuring layers and links during the first training steps ...")

    def on_train_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Tells the schedule in the step in which it comes into force."""
        self._step_started = time.perf_counter()
        self._announce(trainer)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
    ) -> None:
        """Tells how far profiling is."""
        now = time.perf_counter()
        self.steps += 1
        self.plain_step_seconds.append(now - self._step_started)
        if _is_profiling(trainer) and now - self._told > PROGRESS_EVERY_SECONDS:
            self._told = now
            progress = trainer.strategy.profiling_progress
            self._say(f"measuring: {progress:.0%}, {self.steps} training steps so far")

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Tells how an epoch went."""
        if trainer.sanity_checking:
            return
        self._announce(trainer)
        metrics = trainer.callback_metrics
        self._say(
            f"epoch {trainer.current_epoch + 1:>2}/{trainer.max_epochs}  "
            f"validation loss {metrics['val_loss']:.3f}  accuracy {metrics['val_acc']:.1%}"
        )

    def _announce(self, trainer: L.Trainer) -> None:
        if self.announced or not _is_hiertrain(trainer) or _is_profiling(trainer):
            return
        if trainer.strategy.schedule.predicted_seconds is None:
            return
        self.announced = True
        schedule = trainer.strategy.schedule
        self._say(f"schedule chosen after {self.steps} training steps:")
        _print("\n" + schedule.grid() + "\n")

    def _say(self, text: str) -> None:
        _print(f"[{time.perf_counter() - self._started:6.1f} s] {text}")


def main() -> None:
    """Trains, tests and reports."""
    arguments = _parse_arguments()
    _quieten()
    L.seed_everything(arguments.seed, verbose=False)
    narrator = Narrator()
    checkpoint = ModelCheckpoint(
        dirpath=Path(arguments.output).resolve(),
        filename="lenet5-{epoch}-{val_acc:.3f}",
        monitor="val_acc",
        mode="max",
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1 if arguments.plain else 3,
        strategy="auto" if arguments.plain else _hiertrain_strategy(),
        max_epochs=arguments.epochs,
        callbacks=[narrator, checkpoint],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    model = LeNet5()
    data = CIFAR10DataModule()
    trainer.fit(model, datamodule=data)
    report = _timing(trainer, narrator)
    (metrics,) = trainer.test(model, datamodule=data, ckpt_path="best", verbose=False)
    if trainer.is_global_zero:
        _report({"test_accuracy": metrics["test_acc"], **report}, checkpoint.best_model_path)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="runs/lenet_cifar10", help="folder for the checkpoint")
    parser.add_argument(
        "--plain", action="store_true", help="one process with plain Lightning, to compare with"
    )
    return parser.parse_args()


def _hiertrain_strategy() -> L.pytorch.strategies.Strategy:
    from lightning_hiertrain import HierTrainStrategy

    return HierTrainStrategy()


def _is_hiertrain(trainer: L.Trainer) -> bool:
    return hasattr(trainer.strategy, "schedule")


def _is_profiling(trainer: L.Trainer) -> bool:
    return _is_hiertrain(trainer) and trainer.strategy.profiling_progress < 1


def _timing(trainer: L.Trainer, narrator: Narrator) -> dict[str, object]:
    if not _is_hiertrain(trainer):
        measured = statistics.median(narrator.plain_step_seconds)
        return {
            "predicted_step_seconds": None,
            "measured_step_seconds": measured,
            "schedule": None,
        }
    schedule = trainer.strategy.schedule
    return {
        "predicted_step_seconds": schedule.predicted_seconds,
        "measured_step_seconds": trainer.strategy.measured_step_seconds,
        "schedule": schedule.to_dict(),
    }


def _report(result: dict[str, object], checkpoint: str) -> None:
    result["checkpoint"] = os.path.relpath(checkpoint)
    _print("")
    for name in ("predicted", "measured"):
        seconds = result[f"{name}_step_seconds"]
        text = "none" if seconds is None else f"{seconds * 1e3:.1f} ms"
        _print(f"step time, {name + ':':<10} {text}")
    _print(f"test accuracy:        {result['test_accuracy']:.1%} (chance is 10 %)")
    _print(f"checkpoint:           {result['checkpoint']}")
    _print("RESULT " + json.dumps(result))


def _print(text: str) -> None:
    if L.pytorch.utilities.rank_zero_only.rank == 0:
        print(text, flush=True)


def _quieten() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*number of training batches.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")


if __name__ == "__main__":
    main()
