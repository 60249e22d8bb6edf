"""One training run through a hundred outages of its links, with a tally.

    sudo .venv/bin/python -m benchmarks.outages --output benchmarks/results/outages.json

Three tiers in three network namespaces train a small model under a fixed schedule, the edge as
owner; no schedule is planned, because what is tested is the links. Each outage takes one link for
0.1 to 5 s: its carrier, which both hosts notice, or every packet, which nobody is told of. The next
one comes when two more steps are done and a random pause is over. The silence after which a tier
counts as lost is the default, 10 s. At the end plain Lightning trains on as many of the same
mini-batches in one process, and the weights are compared.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from tests.distributed.namespaces import namespaces, namespaces_available
from tests.distributed.outage_cases import train_with_outages


def main() -> None:
    parser = argparse.ArgumentParser(description="training through outages of its links")
    parser.add_argument("--outages", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    reason = namespaces_available()
    if reason is not None:
        raise SystemExit(reason)
    begun = time.monotonic()
    with namespaces() as hosts, TemporaryDirectory() as folder:
        topology = Path(folder, "topology.json")
        hosts.make_topology(Path(folder)).to_json(topology)
        report = train_with_outages(
            str(topology),
            hosts.names,
            count=arguments.outages,
            seed=arguments.seed,
            say=lambda what: print(what, file=sys.stderr, flush=True),
        )
    report["seconds"] = time.monotonic() - begun
    tally = tally_of(report)
    for name, value in tally.items():
        print(f"{name:56}{value}")
    if arguments.output is not None:
        about = {
            "command": " ".join(["python -m benchmarks.outages", *sys.argv[1:]]),
            "date": date.today().isoformat(),
            "machine": platform.platform(),
            "torch": torch.__version__,
        }
        arguments.output.write_text(json.dumps({**about, "tally": tally}, indent=2) + "\n")


def tally_of(report: dict) -> dict[str, float | int | bool]:
    struck = report["struck"]
    steps = report["steps"]
    tally: dict[str, float | int | bool] = {"outages": len(struck)}
    for kind in ("carrier", "silent"):
        those = [each for each in struck if each["outage"]["kind"] == kind]
        seconds = [each["recovery_seconds"] for each in those]
        tally |= {
            f"{kind} outages": len(those),
            f"{kind}: seconds without the link": round(
                sum(each["outage"]["seconds"] for each in those), 1
            ),
            f"{kind}: median seconds until two more steps": round(statistics.median(seconds), 2),
            f"{kind}: most seconds until two more steps": round(max(seconds), 2),
        }
    return tally | {
        "steps": max(steps, default=0),
        "tiers that ended as they should": sum(code == 0 for code in report["codes"].values()),
        "tiers whose number of steps differs": len(set(steps)) - 1 if steps else 3,
        "largest difference of a weight from plain Lightning": max(
            report["differences"], default=float("nan")
        ),
        "seconds in all": round(report["seconds"]),
    }


if __name__ == "__main__":
    main()
