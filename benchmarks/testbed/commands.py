"""Runs the system's own tools, and says what is missing before anything is changed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

SECONDS = 20.0
TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "mount": "util-linux",
}
"""Commands and the packages that bring them."""


def run(*argv: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs a short command.

    Raises:
        OSError: If it fails, unless `check` is off.
    """
    done = subprocess.run(
        argv,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=SECONDS,
        check=False,
    )
    if check and done.returncode != 0:
        raise OSError(f"`{' '.join(argv)}` failed: {done.stderr.strip() or done.returncode}")
    return done


def missing(extra: Sequence[str] = ()) -> list[str]:
    """Returns what a testbed needs and this machine or user lacks, each with its remedy.

    Args:
        extra: What else was found to be missing.
    """
    found = []
    if os.uname().sysname != "Linux":
        return [f"Linux: this is {os.uname().sysname}"]
    if os.geteuid() != 0:
        found.append("root: network namespaces and CPU quotas need it; run this with sudo")
    found += [
        f"the command `{tool}`: install {package}"
        for tool, package in TOOLS.items()
        if shutil.which(tool) is None
    ]
    return [*found, *extra]
