"""Accuracy of ResNet-18 with live batch normalisation across three tiers against one process.

    python benchmarks/accuracy.py --output FILE [--images FOLDER]

Across tiers each share is normalised by statistics of its own, and running statistics are merged;
this shows what that does to the accuracy. The tiers are three processes of this machine with the
schedule below; both runs of a seed start from the same weights. The accuracy is that on the images
that are not trained on, mean of the last three epochs.

The images are the embedded subset of CIFAR-10 (2,400 for training and 800 others), or those in the
files `train.npz` and `test.npz` of a folder: `images` `(num_images, 32, 32, 3)` and `labels`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.models import resnet18

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "lenet_cifar10")]

from data import Images, load_subset  # noqa: E402

from benchmarks.compression import summary  # noqa: E402
from lightning_hiertrain import HierTrainStrategy, Schedule, Share  # noqa: E402

LAST_EPOCHS = 3
SCHEDULE = Schedule(
    owner="cloud",
    shares={
        "device": Share(num_layers=12, num_samples=24),  # up to the second group of blocks
        "edge": Share(num_layers=16, num_samples=40),  # up to the third
        "cloud": Share(num_layers=23, num_samples=64),
    },
)


class ResNet18(LightningModule):
    """torchvision's, trained by SGD with a learning rate that rises and falls."""

    def __init__(self) -> None:
        super().__init__()
        self.model = resnet18(num_classes=10)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        hits = (self.model(images).argmax(1) == labels).float()
        self.log("accuracy", hits.mean(), batch_size=len(labels))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
        rate = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.02, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rate, "interval": "step"}}


class Accuracies(Callback):
    """Notes the accuracy after each epoch."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.values.append(float(trainer.callback_metrics["accuracy"]))


def loaders(folder: Path | None) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Returns the images to train on, and the others."""
    if folder is None:
        subset = load_subset()
        train, *rest = (subset[name] for name in ("train", "val", "test"))
        other = tuple(np.concatenate(arrays) for arrays in zip(*rest, strict=True))
    else:
        train, other = (
            tuple(np.load(folder / f"{name}.npz")[key] for key in ("images", "labels"))
            for name in ("train", "test")
        )
    return (
        DataLoader(Images(*train, flip=True), batch_size=SCHEDULE.batch_size, shuffle=True),
        DataLoader(Images(*other, flip=False), batch_size=500),
    )


def train(seed: int, *, tiers: bool, epochs: int, folder: Path | None) -> list[float]:
    """Returns the accuracy after each epoch."""
    seed_everything(seed, verbose=False)
    accuracies = Accuracies()
    trainer = Trainer(
        accelerator="cpu",
        devices=3 if tiers else 1,
        strategy=HierTrainStrategy(schedule=SCHEDULE) if tiers else "auto",
        max_epochs=epochs,
        callbacks=[accuracies],
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(ResNet18(), *loaders(folder))
    return accuracies.values


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--machine", default=platform.processor() or platform.machine())
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"  # the other tiers run this script, too
    started = time.perf_counter()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    epochs: dict[str, list[list[float]]] = {}
    for how in ("three tiers", "one process"):
        epochs[how] = []
        for seed in seeds if is_first or how == "three tiers" else ():
            values = train(
                seed, tiers=how == "three tiers", epochs=arguments.epochs, folder=arguments.images
            )
            epochs[how].append(values)
            if is_first:
                accuracy = statistics.mean(values[-LAST_EPOCHS:])
                print(f"{how:<12} seed {seed}  accuracy {accuracy:.2%}", flush=True)
    if not is_first:
        return
    accuracies = {
        how: [statistics.mean(values[-LAST_EPOCHS:]) for values in runs]
        for how, runs in epochs.items()
    }
    result = {
        "command": "python benchmarks/accuracy.py " + shlex.join(sys.argv[1:]),
        "machine": arguments.machine,
        "date": str(date.today()),
        "torch": torch.__version__,
        "seconds": round(time.perf_counter() - started, 1),
        "schedule": SCHEDULE.to_dict(),
        "seeds": list(seeds),
        "accuracy": accuracies,
        "accuracy_by_epoch": epochs,
        "difference": summary(accuracies["one process"], accuracies["three tiers"]),
    }
    difference = result["difference"]
    print(
        f"{100 * difference['mean']:+.2f} points (standard error "
        f"{100 * difference['standard_error']:.2f}) over {arguments.seeds} seeds"
    )
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
