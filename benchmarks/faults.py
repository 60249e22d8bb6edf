"""Lets tiers die at random moments and holds what the others compute against plain Lightning.

    python benchmarks/faults.py                    # 100 runs of 15 steps, seed 1
    python benchmarks/faults.py --runs 400 --seed 9

In each run one or two tiers that can be spared are killed, or stopped for longer than the silence
that counts as death, before a random message. It prints a tally and ends with 1 if a weight, a
metric, a counter or the order of batches differs on a tier that was left, or if one hangs.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.distributed.loss_cases import TIERS, random_scenario, run_scenario

TOLERANCE = 1e-12


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    tally: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        plain = {
            accumulate: run_scenario(Path(folder), {"accumulate": accumulate})["device"]["result"]
            for accumulate in (1, 3)
        }
        for _ in range(arguments.runs):
            scenario = random_scenario(chance)
            report = run_scenario(Path(folder), dict(scenario))
            if report["died"] is not None:
                tally["runs with a loss"] += 1
            for tier in TIERS:
                if tier not in scenario["deaths"]:
                    found = judged(report[tier], plain[scenario["accumulate"]])
                    tally.update(found)
                    if found["failures"] or found["hangs"] or found["different results"]:
                        print(scenario, tier, report[tier]["output"][-2000:])
    names = ("steps", "batches lost", "batches doubled", "different results", "failures", "hangs")
    print(f"runs {arguments.runs}, with a loss {tally['runs with a loss']}")
    print(", ".join(f"{name} {tally[name]}" for name in names))
    return int(any(tally[name] for name in names[1:]))


def judged(found: dict[str, Any], expected: dict[str, Any]) -> Counter[str]:
    """Counts what is wrong with one tier's report."""
    if found["exit"] is None:
        return Counter({"hangs": 1})
    result = found["result"]
    if found["exit"] != 0 or result is None:
        return Counter({"failures": 1})
    seen, right = Counter(result["kept"]), Counter(expected["kept"])
    distances = [
        float((result[kind][name] - value).abs().max())
        for kind in ("weights", "metrics")
        for name, value in expected[kind].items()
    ]
    same = all(result[what] == expected[what] for what in ("lr", "global_step", "epoch", "kept"))
    return Counter(
        {
            "steps": result["steps_seen"],
            "batches lost": (right - seen).total(),
            "batches doubled": (seen - right).total(),
            "different results": int(not same or max(distances) > TOLERANCE),
        }
    )


if __name__ == "__main__":
    sys.exit(main())
