"""Three hosts on one Linux machine, with limited links and processors.

    python -m benchmarks.testbed run -- python train.py
    python -m benchmarks.testbed calibrate
    python -m benchmarks.testbed clean

What runs inside calls `join_quota` after its imports, and may change a link with `set_rate`. This
module imports nothing heavy, so that any script can.
"""

from __future__ import annotations

import json
import os
import socket

QUOTA_VARIABLE = "HIERTRAIN_TESTBED_QUOTA"
"""Names the file by which a process joins its tier's CPU quota."""
CONTROL_VARIABLE = "HIERTRAIN_TESTBED_CONTROL"
"""Names the socket at which the testbed listens."""
OUTPUT_VARIABLE = "HIERTRAIN_TESTBED_OUTPUT"
"""Names the folder that keeps what a tier writes."""
CONTROL_SECONDS = 10.0


def join_quota() -> bool:
    """Puts this process, all its threads and its later children under its tier's CPU quota.

    Call it after the imports: those would take minutes at a tenth of a core.

    Returns:
        Whether there was a quota to join; outside a testbed there is none.
    """
    path = os.environ.get(QUOTA_VARIABLE)
    if not path:
        return False
    with open(path, "w") as file:
        file.write(str(os.getpid()))
    return True


def set_rate(link: str, bandwidth_mbit: float, *, control: str | None = None) -> None:
    """Changes what a link of the testbed carries each way, from now on.

    Args:
        link: For example `"edge-cloud"`.
        bandwidth_mbit: In millions of bits a second.
        control: The testbed's socket; that of the testbed around this process by default.

    Raises:
        RuntimeError: Outside a testbed, or if the testbed cannot do it.
    """
    path = control or os.environ.get(CONTROL_VARIABLE)
    if not path:
        raise RuntimeError(
            f"this process does not run in a testbed: {CONTROL_VARIABLE} is not set; start it with "
            "`python -m benchmarks.testbed run -- COMMAND`"
        )
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(CONTROL_SECONDS)
        connection.connect(path)
        request = {"link": link, "bandwidth_mbit": bandwidth_mbit}
        with connection.makefile("rw") as stream:
            stream.write(json.dumps(request) + "\n")
            stream.flush()
            answer = json.loads(stream.readline() or '{"error": "the testbed has ended"}')
    if "error" in answer:
        raise RuntimeError(f"the testbed could not change {link}: {answer['error']}")
