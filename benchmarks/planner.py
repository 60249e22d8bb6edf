"""Times the planner beside exhaustive search, SCIP and HiGHS on random profiles.

    python benchmarks/planner.py                     # 8, 21, 50 and 150 layers
    python benchmarks/planner.py --layers 8 21 --repeat 5 --output results.json

Columns, in seconds, imports apart; the first three are medians over the profiles, the others are of
the first profile:

    plan          `plan` from a profile, in a process that has planned nothing of this size before
    re-plan       the same after a link's bandwidth has changed by 10 %, the programme compiled
    B = 4096      `plan` for a mini-batch of 4096
    exhaustive    every owner, cut and share in NumPy
    SCIP, HiGHS   one programme over all cuts, without the search before it

What has not ended after `--limit` seconds is stopped and shown as such, what would not fit into
memory as "too large"; neither is tried with more layers. The last columns are the slowest `plan`
and the greatest relative difference of the step times found by `plan` and the others.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from cvxpy.error import SolverError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lightning_hiertrain.planning import plan, programme
from lightning_hiertrain.planning.boxes import Boxes
from lightning_hiertrain.planning.instance import make_instance
from lightning_hiertrain.planning.paths import PathTable
from lightning_hiertrain.planning.policies import Privacy, make_boxes, policy_roles
from lightning_hiertrain.profiles import Profile
from tests.unit.planning.instances import random_profile

BATCH = 128
MOST_ROWS = 50_000
"""Of a whole programme: CVXPY needs gigabytes for more."""


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


def exhaustive(profile: Profile, overlap: bool, limit: float) -> float | None:
    """The least step time over all choices and shares; `None` if time runs out."""
    deadline = time.perf_counter() + limit
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
            if time.perf_counter() > deadline:
                return None
            paths = table.paths(group[first : first + width], num_terms=table.instance.num_layers)
            values = paths.constant[:, :, None] + paths.slope @ shares.T
            forward, backward, busy = (values[:, paths.kind == kind] for kind in range(3))
            step = forward.max(axis=1) + backward.max(axis=1)
            if busy.shape[1]:
                step = np.maximum(step, busy.max(axis=1))
            best = min(best, float(step.min()))
    return best


def whole(profile: Profile, overlap: bool, limit: float, solver: str) -> float | None:
    """The programme over all choices at once, without the search; `None` if time runs out."""
    table, boxes = all_choices(profile, overlap)
    paths = table.paths(boxes, num_terms=table.instance.num_layers)
    slots = programme.Slots(paths=paths, boxes=boxes)
    kept = {kind: programme._undominated(slots, kind, BATCH) for kind in range(4)}
    shape = tuple(len(rows[0]) if rows else 0 for rows in kept.values())
    if len(boxes) * sum(shape) > MOST_ROWS:
        raise MemoryError
    template = programme._Template(len(boxes), table.instance.num_tiers, shape)
    scale = paths.worst(boxes.least).max()
    template.fill(slots, kept, batch_size=BATCH, scale=scale)
    options: dict[str, Any] = (
        {"scip_params": {"limits/time": limit}} if solver == "SCIP" else {"time_limit": limit}
    )
    try:
        template.problem.solve(solver=solver, **options)
    except SolverError:  # out of time without any schedule
        return None
    if template.problem.status != "optimal":
        return None
    return float(template.problem.value) * scale / programme._SCALE


RIVALS: dict[str, Callable[[Profile, bool, float], float | None]] = {
    "exhaustive": exhaustive,
    "SCIP": lambda profile, overlap, limit: whole(profile, overlap, limit, "SCIP"),
    "HiGHS": lambda profile, overlap, limit: whole(profile, overlap, limit, "HIGHS"),
}


def measure(num_layers: int, overlap: bool, rivals: list[str], options: Any) -> dict[str, Any]:
    """One row of the table: seconds by column, or why there are none."""
    own: dict[str, list[float]] = {}
    others: dict[str, float | str] = {}
    difference = 0.0
    for seed in range(options.repeat):
        profile = random_profile(seed, num_layers=num_layers)
        link = profile.links[1]
        other = replace(link, bandwidth_bytes_per_second=1.1 * link.bandwidth_bytes_per_second)
        changed = replace(profile, links=(profile.links[0], other, *profile.links[2:]))
        programme._template.cache_clear()
        for name, subject, batch_size in (
            ("plan", profile, BATCH),
            ("re-plan", changed, BATCH),
            ("B = 4096", profile, 4096),
        ):
            seconds, schedule = timed(
                lambda p=subject, b=batch_size: plan(p, batch_size=b, overlap=overlap)
            )
            own.setdefault(name, []).append(seconds)
            if name == "plan":
                planned = schedule
        if seed == 0:
            for name in rivals:
                try:
                    seconds, best = timed(
                        lambda p=profile, n=name: RIVALS[n](p, overlap, options.limit)
                    )
                except MemoryError:
                    others[name] = "too large"
                    continue
                others[name] = f"> {options.limit:g}" if best is None else seconds
                if best is not None:
                    difference = max(difference, abs(planned.predicted_seconds / best - 1))
    return {
        "layers": num_layers,
        "overlap": overlap,
        **{name: statistics.median(seconds) for name, seconds in own.items()},
        **others,
        "worst plan": max(own["plan"]),
        "difference": difference if any(isinstance(x, float) for x in others.values()) else "-",
    }


def cell(row: dict[str, Any], name: str) -> str:
    value = row.get(name, "-")
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.0e}" if name == "difference" else f"{value:.3f}"
    return str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 21, 50, 150])
    parser.add_argument("--repeat", type=int, default=3, help="profiles for each size")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each rival")
    parser.add_argument("--output", type=Path, help="a JSON file for the rows")
    options = parser.parse_args()
    plan(random_profile(0, num_layers=2), batch_size=8)  # imports CVXPY and SCIP
    names = ["layers", "overlap", "plan", "re-plan", "B = 4096", *RIVALS]
    names += ["worst plan", "difference"]
    print("".join(f"{name:>12}" for name in names))
    rows: list[dict[str, Any]] = []
    for overlap in (False, True):
        rivals = list(RIVALS)
        for num_layers in sorted(options.layers):
            row = measure(num_layers, overlap, rivals, options)
            rivals = [name for name in rivals if isinstance(row[name], float)]
            rows.append(row)
            print("".join(f"{cell(row, name):>12}" for name in names), flush=True)
    if options.output:
        result = {
            "command": " ".join(["python", *sys.argv]),
            "date": time.strftime("%Y-%m-%d"),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "limit_seconds": options.limit,
            "rows": rows,
        }
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
