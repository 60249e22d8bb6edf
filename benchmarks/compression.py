"""Accuracy of LeNet-5 with packed activations and gradients against none, seed by seed.

    python benchmarks/compression.py --output FILE --codecs int8 minmax4 minmax3 minmax2

Both runs of a seed start from the same weights and see the same images in the same order. All
activations are packed and unpacked at one cut, their gradients likewise, rounded by chance: what a
link carries between a prefix worker with all samples and an owner without any. This happens in one
process; the step runs along its chain as on a tier, and the codecs are those of the links.

The accuracy is that on the 800 images that are not trained on, mean of the last five epochs. Beside
it stands the loss that profiling measures for a codec within the first steps, on 32 images, by
which the planner admits codecs.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import seed_everything
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "lenet_cifar10")]

from data import CIFAR10DataModule  # noqa: E402
from model import LeNet5  # noqa: E402

from lightning_hiertrain.partition import LayerChain, Passage, trace_step  # noqa: E402
from lightning_hiertrain.profiling.codecs import accuracy_losses, sampled_cuts  # noqa: E402
from lightning_hiertrain.transport.codecs import decode, encode, gradient_codec  # noqa: E402

LAST_EPOCHS = 5


class Link(torch.autograd.Function):
    """Packs and unpacks activations, and their gradients on the way back."""

    @staticmethod
    def forward(ctx: Any, activations: Tensor, codec: str) -> Tensor:
        ctx.codec = codec
        return decode(encode(activations, codec))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return decode(encode(gradient, gradient_codec(ctx.codec), stochastic=True)), None


class Run:
    """One training."""

    def __init__(self, seed: int, codec: str, cut: int) -> None:
        seed_everything(seed, verbose=False)
        self.model = LeNet5()
        self.data = CIFAR10DataModule()
        self.data.setup("fit")
        self.codec, self.cut = codec, cut
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=2e-3)
        with torch.random.fork_rng():
            batch = next(iter(self.data.val_dataloader()))
        self.chain: LayerChain = trace_step(lambda b: (self.loss(b),), self.model, batch)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        passage = Passage(
            self.chain,
            batch,
            num_rows=len(batch[0]),
            taps={self.cut: lambda output: Link.apply(output, self.codec)},
        )
        with passage:
            loss = self.loss(batch)
        passage.check_complete()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def train(self, epochs: int) -> list[float]:
        """Returns the accuracy after each of the last epochs."""
        accuracies = []
        for epoch in range(epochs):
            for batch in self.data.train_dataloader():
                self.step(batch)
            if epoch >= epochs - LAST_EPOCHS:
                accuracies.append(self.accuracy())
        return accuracies

    def moves(self, codecs: list[str]) -> dict[str, float]:
        """Returns what profiling would find for the codecs, and spoils the model."""
        images, labels = next(iter(self.data.train_dataloader()))
        batch = (images[:32], labels[:32])
        return accuracy_losses(
            self.chain, self.loss, self.model, batch, sampled_cuts(self.chain), codecs, seconds=60
        )

    @torch.no_grad()
    def accuracy(self) -> float:
        right = total = 0
        for loader in (self.data.val_dataloader(), self.data.test_dataloader()):
            for images, labels in loader:
                right += int((self.model(images).argmax(1) == labels).sum())
                total += len(labels)
        return right / total


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--codecs", nargs="+", default=["int8"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--cut", type=int, default=3, help="layers before the cut; 3 is pool1")
    parser.add_argument("--machine", default=platform.processor() or platform.machine())
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    started = time.perf_counter()
    seeds = range(arguments.seeds)
    runs: dict[str, list[float]] = {}
    for codec in ("none", *arguments.codecs):
        runs[codec] = []
        for seed in seeds:
            accuracy = statistics.mean(Run(seed, codec, arguments.cut).train(arguments.epochs))
            runs[codec].append(accuracy)
            print(f"{codec:<10} seed {seed}  accuracy {accuracy:.2%}", flush=True)
    moves = [Run(seed, "none", arguments.cut).moves(arguments.codecs) for seed in seeds]
    result = {
        "command": "python benchmarks/compression.py " + shlex.join(sys.argv[1:]),
        "machine": arguments.machine,
        "date": str(date.today()),
        "torch": torch.__version__,
        "seconds": round(time.perf_counter() - started, 1),
        "epochs": arguments.epochs,
        "cut": arguments.cut,
        "accuracy": runs,
        "measured_accuracy_loss": {
            codec: statistics.mean(move[codec] for move in moves) for codec in arguments.codecs
        },
        "difference": {codec: summary(runs["none"], runs[codec]) for codec in arguments.codecs},
    }
    for codec, found in result["difference"].items():
        print(
            f"{codec:<10} {100 * found['mean']:+.2f} points (standard error "
            f"{100 * found['standard_error']:.2f}) over {arguments.seeds} seeds; profiling finds "
            f"a loss of {100 * result['measured_accuracy_loss'][codec]:.2f} %"
        )
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


def summary(without: list[float], packed: list[float]) -> dict[str, float]:
    differences = [b - a for a, b in zip(without, packed, strict=True)]
    spread = statistics.stdev(differences) if len(differences) > 1 else 0.0
    return {
        "mean": statistics.mean(differences),
        "standard_error": spread / len(differences) ** 0.5,
    }


if __name__ == "__main__":
    main()
