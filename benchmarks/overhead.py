"""What the strategy costs with everything on one tier, against plain Lightning.

    python benchmarks/overhead.py [--model lenet5] [--steps 200] [--rounds 5] [--output FILE]

The rounds take turns, each in a process of its own: plain Lightning, then three local processes
under a schedule that gives the device everything. Shown are medians over the rounds of the step's
time, of the processor's time in the device's process, all its threads together, and of the most
memory that the process ever held. The processor's time hardly depends on what else the machine
does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

HOWS = ("plain", "device")
WARM_UP_STEPS = 20
RESULT = "RESULT "


def train(model: str, steps: int, *, tiers: bool) -> dict[str, float]:
    """Returns seconds a step and bytes."""
    import torch
    import torch.nn.functional as F
    from lightning.pytorch import LightningModule, Trainer

    from benchmarks.workloads.models import (
        BATCH_SIZES,
        Turns,
        make_batches,
        make_chain,
        make_optimizer,
    )
    from benchmarks.workloads.step_ends import StepEnds

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = make_chain(model, "float32")

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            images, labels = batch
            return F.cross_entropy(self.layers(images), labels)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self.parameters())

    class Clock(StepEnds):
        def __init__(self) -> None:
            super().__init__()
            self.times: list[tuple[float, float]] = []

        def step_ended(self) -> None:
            self.times.append((time.perf_counter(), time.process_time()))

    torch.set_num_threads(1)
    module, clock, strategy = Model(), Clock(), "auto"
    if tiers:
        from lightning_hiertrain import HierTrainStrategy, Schedule, Share

        share = Share(num_layers=len(module.layers), num_samples=BATCH_SIZES[model])
        strategy = HierTrainStrategy(schedule=Schedule(owner="device", shares={"device": share}))
    trainer = Trainer(
        accelerator="cpu",
        devices=3 if tiers else 1,
        strategy=strategy,
        max_steps=steps + WARM_UP_STEPS,
        profiler=clock,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, Turns(make_batches(model, "float32", BATCH_SIZES[model])).loader())
    counted = clock.times[WARM_UP_STEPS - 1 :]
    walls = [seconds for seconds, _ in counted]
    return {
        "step_seconds": statistics.median(b - a for a, b in itertools.pairwise(walls)),
        "processor_seconds": (counted[-1][1] - counted[0][1]) / (len(counted) - 1),
        "memory_bytes": 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def apart(model: str, steps: int, how: str) -> dict[str, float]:
    """Trains in a process of its own."""
    command = [sys.executable, __file__, "--model", model, "--steps", str(steps), "--only", how]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    (line,) = (line for line in ended.stdout.splitlines() if line.startswith(RESULT))
    result: dict[str, float] = json.loads(line.removeprefix(RESULT))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=("lenet5", "alexnet"), default="lenet5")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=HOWS, help=argparse.SUPPRESS)
    parser.add_argument("--machine", default=platform.processor() or platform.machine())
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.only is not None:
        result = train(arguments.model, arguments.steps, tiers=arguments.only == "device")
        if os.environ.get("LOCAL_RANK", "0") == "0":  # the other tiers run this script, too
            print(RESULT + json.dumps(result), flush=True)
        return
    rounds = []
    for number in range(arguments.rounds):
        found = {how: apart(arguments.model, arguments.steps, how) for how in HOWS}
        rounds.append(found)
        seconds = {how: 1e3 * found[how]["step_seconds"] for how in HOWS}
        print(
            f"round {number + 1}: plain {seconds['plain']:.2f} ms a step, all on the device "
            f"{seconds['device']:.2f} ms",
            flush=True,
        )
    medians = {
        how: {what: statistics.median(found[how][what] for found in rounds) for what in values}
        for how, values in rounds[0].items()
    }
    for what, unit, name in (
        ("step_seconds", 1e-3, "step, ms"),
        ("processor_seconds", 1e-3, "processor, ms"),
        ("memory_bytes", 1 << 20, "memory, MiB"),
    ):
        plain, device = (medians[how][what] for how in HOWS)
        print(f"{name:<14} {plain / unit:8.2f} {device / unit:8.2f}   {device / plain - 1:+.1%}")
    if arguments.output is not None:
        record = {
            "command": "python benchmarks/overhead.py " + shlex.join(sys.argv[1:]),
            "machine": arguments.machine,
            "date": str(date.today()),
            "medians": medians,
            "rounds": rounds,
        }
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
