"""`hiertrain check` on each of several hosts, some of which are not as they should be."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from lightning_hiertrain import cli, host_check
from tests.distributed.forked import forked

ALL = ("device", "edge", "cloud")


def check(
    folder: str,
    *,
    hosts: list[str] = list(ALL),  # noqa: B006
    faults: dict[str, str] | None = None,
    timeout_seconds: float = 20.0,
    namespaces: dict[str, str] | None = None,
) -> dict[str, dict[str, Any]]:
    """Runs the command on each host at once.

    Args:
        folder: Holds `topology.json` and, for each host, a folder with its key.
        hosts: Those on which it is run.
        faults: By host: `"version"`, `"clock"` or the name of another host's key to use.
        timeout_seconds: How long each may wait for the others.
        namespaces: Each host's network.

    Returns:
        By host the exit status, what it wrote and how long it took.
    """

    def work(tier: str) -> int:
        fault = (faults or {}).get(tier, "")
        key = Path(folder, f"{fault if fault.startswith('other-') else tier}.key")
        if fault == "version":
            host_check.version = lambda name: "2.5.0"
        elif fault == "clock":
            genuine = time.time
            time.time = lambda: genuine() + 90
        options = ["--tier", tier, "--private_key", str(key)]
        options += ["--timeout_seconds", str(timeout_seconds), "--seconds_per_link", "0.2"]
        raise SystemExit(cli.main(["check", str(Path(folder, "topology.json")), *options]))

    begun = time.monotonic()
    with forked(work, hosts, layout="nodes", namespaces=namespaces) as tiers:
        tiers.wait(60)
        ends = tiers.ends()
    return {
        tier: {"status": end.code, "output": end.output, "seconds": end.seconds - begun}
        for tier, end in ends.items()
    }
