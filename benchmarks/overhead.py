"""What the strategy costs with everything on one tier, against plain Lightning.

    python benchmarks/overhead.py [--steps 200] [--rounds 3] [--output FILE]

LeNet-5 with mini-batches of 128 images. The rounds take turns: plain Lightning, then three local
processes under a schedule that gives the device everything. Printed are medians of the step's time
and of the processor's time in the device's process, all its threads together; the latter hardly
depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import itertools
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

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from benchmarks.workloads.hiertrain import Model  # noqa: E402
from benchmarks.workloads.models import Turns, make_batches, make_chain  # noqa: E402
from lightning_hiertrain import HierTrainStrategy, Schedule, Share  # noqa: E402

MODEL, BATCH_SIZE = "lenet5", 128
WARM_UP_STEPS = 20


class Clock(Callback):
    """Notes after every step the time, the process's processor time and the thread's."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float, float]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.times.append((time.perf_counter(), time.process_time(), time.thread_time()))


def train(steps: int, *, tiers: bool) -> dict[str, float]:
    """Returns medians of seconds a step."""
    layers = make_chain(MODEL, "float32")
    share = Share(num_layers=len(layers), num_samples=BATCH_SIZE)
    schedule = Schedule(owner="device", shares={"device": share})
    clock = Clock()
    trainer = Trainer(
        accelerator="cpu",
        devices=3 if tiers else 1,
        strategy=HierTrainStrategy(schedule=schedule) if tiers else "auto",
        max_steps=steps + WARM_UP_STEPS,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(layers), Turns(make_batches(MODEL, "float32", BATCH_SIZE)).loader())
    first, last = clock.times[WARM_UP_STEPS - 1], clock.times[-1]
    walls = [time for time, _, _ in clock.times[WARM_UP_STEPS - 1 :]]
    return {
        "step": statistics.median(b - a for a, b in itertools.pairwise(walls)),
        "processor": (last[1] - first[1]) / (len(walls) - 1),
        "training thread": (last[2] - first[2]) / (len(walls) - 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--machine", default=platform.processor() or platform.machine())
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"  # the other tiers run this script, too
    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(arguments.rounds):
        found = {"plain": train(arguments.steps, tiers=False)} if is_first else {}
        found["device"] = train(arguments.steps, tiers=True)
        rounds.append(found)
        if is_first:
            for what, seconds in found["device"].items():
                plain = found["plain"][what]
                print(
                    f"round {number + 1}  {what:<16} plain {1e3 * plain:6.2f} ms   "
                    f"all on the device {1e3 * seconds:6.2f} ms   {seconds / plain - 1:+.1%}",
                    flush=True,
                )
    if not is_first or arguments.output is None:
        return
    result = {
        "command": "python benchmarks/overhead.py " + shlex.join(sys.argv[1:]),
        "machine": arguments.machine,
        "date": str(date.today()),
        "torch": torch.__version__,
        "seconds": rounds,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
