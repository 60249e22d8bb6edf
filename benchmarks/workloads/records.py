"""How a measurement is written down, and how many steps one takes."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.testbed import OUTPUT_VARIABLE
from benchmarks.workloads.models import BATCH_SIZES, MODELS, PIXELS

FORMAT = 1
SLOW_STEP_SECONDS = 5.0
"""From here on fewer steps have to do."""
SLOW_STEPS = 5
SLOW_WARM_UP = 2


class Protocol:
    """How many steps are made and counted, and when a system is given up.

    Args:
        steps: Steps that count.
        warm_up: Steps before them.
        limit_seconds: A step that takes longer ends the case.
    """

    def __init__(self, *, steps: int, warm_up: int, limit_seconds: float) -> None:
        self.steps = steps
        self.warm_up = warm_up
        self.limit_seconds = limit_seconds

    def ends_warm_up(self, warm: Sequence[float]) -> bool:
        """Whether what has been made is enough before steps count."""
        slow = bool(warm) and warm[-1] > SLOW_STEP_SECONDS
        return len(warm) >= (min(self.warm_up, SLOW_WARM_UP) if slow else self.warm_up) or (
            bool(warm) and warm[-1] > self.limit_seconds
        )

    def counted_steps(self, warm: Sequence[float]) -> int:
        """How many steps count, given those before; none if the last of them took too long."""
        if warm[-1] > self.limit_seconds:
            return 0
        return min(self.steps, SLOW_STEPS) if warm[-1] > SLOW_STEP_SECONDS else self.steps


def record(
    case: Mapping[str, Any], warm: Sequence[float], counted: Sequence[float], **more: Any
) -> dict[str, Any]:
    """Returns what is kept of one case.

    Args:
        case: What was asked for.
        warm: Seconds of the steps that do not count.
        counted: Seconds of those that do; none if the case was given up.
        more: Anything else.
    """
    return {
        **case,
        "median_seconds": statistics.median(counted) if counted else None,
        "num_steps": len(counted),
        "cut_off_seconds": None if counted else warm[-1],
        "seconds": [round(each, 6) for each in counted],
        "warm_up_seconds": [round(each, 6) for each in warm],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **more,
    }


def machine() -> dict[str, Any]:
    """Says where a measurement was made."""
    import torch

    model = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def peak_memory_bytes() -> int:
    """Returns the most memory that this process has held."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def write(name: str, data: Mapping[str, Any]) -> None:
    """Writes a file to the folder of this tier's results, whole or not at all."""
    folder = Path(os.environ.get(OUTPUT_VARIABLE, "."))
    partial = folder / f"{name}.part"
    partial.write_text(json.dumps({"format": FORMAT, **data}, indent=1) + "\n")
    partial.replace(folder / name)


def read_cases(path: Path) -> list[dict[str, Any]]:
    """Reads the cases of a workload.

    Raises:
        ValueError: If there are none.
    """
    cases: list[dict[str, Any]] = json.loads(path.read_text())["cases"]
    if not cases:
        raise ValueError(f"{path} holds no cases")
    return cases


def parser(description: str) -> argparse.ArgumentParser:
    """Returns a parser of what all workloads take."""
    made = argparse.ArgumentParser(description=description.splitlines()[0])
    made.add_argument("--model", choices=MODELS, default="lenet5")
    made.add_argument("--pixels", choices=PIXELS, default="uint8", help="how images travel")
    made.add_argument("--batch-size", type=int, help="by default the papers'")
    made.add_argument("--steps", type=int, default=20, help="that count; 5 where they are slow")
    made.add_argument("--warm-up", type=int, default=4, help="steps before; 2 where they are slow")
    made.add_argument("--limit", type=float, default=120, help="seconds after which a step ends it")
    return made


def parse(made: argparse.ArgumentParser) -> tuple[argparse.Namespace, Protocol]:
    """Parses the command line."""
    parsed = made.parse_args()
    parsed.batch_size = parsed.batch_size or BATCH_SIZES[parsed.model]
    protocol = Protocol(steps=parsed.steps, warm_up=parsed.warm_up, limit_seconds=parsed.limit)
    return parsed, protocol
