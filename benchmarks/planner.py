"""Times the planner beside exhaustive search and HiGHS on random profiles.

    python benchmarks/planner.py                     # 8, 21, 50 and 150 layers
    python benchmarks/planner.py --layers 8 21 --repeat 5

Columns, in seconds, medians over the profiles, imports apart:

    plan          `plan` from a profile, in a process that has planned nothing of this size before
    re-plan       the same after a link's bandwidth has changed by 10 %, the programme compiled
    B = 4096      `plan` for a mini-batch of 4096
    exhaustive    every owner, cut and share in NumPy, up to `--exhaustive` layers
    SCIP, HiGHS   one programme over all cuts, without the search, up to `--whole` layers and
                  without overlap

and the greatest relative difference of the step times found by `plan` and the others.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lightning_hiertrain.planning import plan, programme
from lightning_hiertrain.planning.boxes import Boxes
from lightning_hiertrain.planning.instance import make_instance
from lightning_hiertrain.planning.paths import PathTable
from lightning_hiertrain.planning.policies import Privacy, make_boxes, policy_roles
from lightning_hiertrain.profiles import Profile
from tests.unit.planning.instances import random_profile

BATCH = 128


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def every(limit: int, count: int) -> np.ndarray:
    """All tuples of `count` numbers below `limit`, one a row."""
    return np.indices((limit,) * count).reshape(count, limit**count).T


def all_choices(profile: Profile, overlap: bool) -> tuple[PathTable, Boxes]:
    """Every owner, set of prefix workers, cuts and number of chunks, one a row."""
    instance = make_instance(profile, batch_size=BATCH)
    table = PathTable(instance, [(0,)], "overlap" if overlap else "plain", prefetch=overlap)
    roots = make_boxes(
        policy_roles("hiertrain", instance),
        instance,
        policy="hiertrain",
        privacy=Privacy(),
        chunk_counts=(1, 4) if overlap else (1,),
        codec_set=0,
    )
    parts = []
    for row in range(len(roots)):
        workers = np.flatnonzero(roots.active[row])
        grid = 1 + every(instance.num_layers, len(workers))
        part = roots[np.full(len(grid), row)]
        part.low[:, workers] = part.high[:, workers] = grid
        parts.append(part)
    return table, Boxes.join(parts)


def exhaustive(profile: Profile, overlap: bool) -> float:
    """The least step time over all choices and shares."""
    table, boxes = all_choices(profile, overlap)
    best = np.inf
    live_sets = np.unique(boxes.least, axis=0)
    for least in live_sets:
        group = boxes[(boxes.least == least).all(axis=1)]
        tiers = np.flatnonzero(least)
        free = BATCH - least.sum()
        grid = every(free + 1, len(tiers) - 1)
        grid = grid[grid.sum(axis=1) <= free]
        shares = np.zeros((len(grid), len(least)))
        shares[:, tiers[:-1]] = grid
        shares[:, tiers[-1]] = free - grid.sum(axis=1)
        shares += least
        num_paths = 12 if not overlap else 4 * table.instance.num_layers * len(tiers)
        width = max(1, 8_000_000 // (len(shares) * num_paths))
        for first in range(0, len(group), width):
            paths = table.paths(group[first : first + width], num_terms=table.instance.num_layers)
            values = paths.constant[:, :, None] + paths.slope @ shares.T
            forward, backward, busy = (values[:, paths.kind == kind] for kind in range(3))
            step = forward.max(axis=1) + backward.max(axis=1)
            if busy.shape[1]:
                step = np.maximum(step, busy.max(axis=1))
            best = min(best, float(step.min()))
    return best


def whole(profile: Profile, overlap: bool, solver: str) -> float:
    """The programme over all choices at once, without the search."""
    table, boxes = all_choices(profile, overlap)
    paths = table.paths(boxes, num_terms=table.instance.num_layers)
    slots = programme.Slots(paths=paths, boxes=boxes)
    kept = {kind: programme._undominated(slots, kind, BATCH) for kind in range(4)}
    shape = tuple(len(rows[0]) if rows else 0 for rows in kept.values())
    template = programme._Template(len(boxes), table.instance.num_tiers, shape)
    scale = paths.worst(boxes.least).max()
    template.fill(slots, kept, batch_size=BATCH, scale=scale)
    template.problem.solve(solver=solver)
    return float(template.problem.value) * scale / programme._SCALE


def row(num_layers: int, overlap: bool, options: argparse.Namespace) -> list[str]:
    columns: dict[str, list[float]] = {}
    difference = 0.0
    for seed in range(options.repeat):
        profile = random_profile(seed, num_layers=num_layers)
        link = profile.links[1]
        other = replace(link, bandwidth_bytes_per_second=1.1 * link.bandwidth_bytes_per_second)
        changed = replace(profile, links=(profile.links[0], other, *profile.links[2:]))
        programme._template.cache_clear()
        seconds, schedule = timed(lambda p=profile: plan(p, batch_size=BATCH, overlap=overlap))
        columns.setdefault("plan", []).append(seconds)
        seconds, _ = timed(lambda p=changed: plan(p, batch_size=BATCH, overlap=overlap))
        columns.setdefault("re-plan", []).append(seconds)
        seconds, _ = timed(lambda p=profile: plan(p, batch_size=4096, overlap=overlap))
        columns.setdefault("B = 4096", []).append(seconds)
        others: dict[str, Callable[[], float]] = {}
        if num_layers <= options.exhaustive:
            others["exhaustive"] = lambda p=profile: exhaustive(p, overlap)
        if num_layers <= options.whole and not overlap:
            others["SCIP"] = lambda p=profile: whole(p, overlap, "SCIP")
            others["HiGHS"] = lambda p=profile: whole(p, overlap, "HIGHS")
        for name, function in others.items():
            seconds, best = timed(function)
            columns.setdefault(name, []).append(seconds)
            difference = max(difference, abs(schedule.predicted_seconds / best - 1))
    cells = [f"{num_layers}", "yes" if overlap else "no"]
    for name in ("plan", "re-plan", "B = 4096", "exhaustive", "SCIP", "HiGHS"):
        cells.append(f"{statistics.median(columns[name]):.3f}" if name in columns else "-")
    worst = max(columns["plan"])
    compared = "exhaustive" in columns or "HiGHS" in columns
    return [*cells, f"{worst:.3f}", f"{difference:.0e}" if compared else "-"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 21, 50, 150])
    parser.add_argument("--repeat", type=int, default=3, help="profiles for each size")
    parser.add_argument("--exhaustive", type=int, default=8, help="up to so many layers")
    parser.add_argument("--whole", type=int, default=8, help="up to so many layers")
    options = parser.parse_args()
    plan(random_profile(0, num_layers=2), batch_size=8)  # imports CVXPY and SCIP
    names = ["layers", "overlap", "plan", "re-plan", "B = 4096", "exhaustive", "SCIP", "HiGHS"]
    print("".join(f"{name:>12}" for name in [*names, "worst plan", "difference"]))
    for num_layers in options.layers:
        for overlap in (False, True):
            cells = row(num_layers, overlap, options)
            print("".join(f"{cell:>12}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
