"""What all tests share: one thread a process, an environment that stays as it was, three hosts."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

# Before anything imports torch: threads of several processes on few cores only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings
from lightning_utilities.core.rank_zero import rank_zero_only

from tests.distributed.namespaces import Namespaces, namespaces, namespaces_available

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background by a shell; processes that tests interrupt would not hear it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Undoes what a test, or Lightning inside it, did to the environment (ranks, ports, seeds).

    The rank that Lightning keeps for `rank_zero_only` is part of it: a Trainer made as rank 2 would
    silence the loggers of every later test.
    """
    before, rank = dict(os.environ), getattr(rank_zero_only, "rank", 0)
    yield
    os.environ.clear()
    os.environ.update(before)
    rank_zero_only.rank = rank


@pytest.fixture(scope="session")
def namespaces_reason() -> str | None:
    """Why network namespaces cannot be made here, or `None`."""
    return namespaces_available()


@pytest.fixture
def three_hosts(namespaces_reason: str | None) -> Iterator[Namespaces]:
    """Networks for device, edge and cloud; the test is skipped where they cannot be made."""
    if namespaces_reason is not None:
        pytest.skip(namespaces_reason)
    with namespaces() as made:
        yield made
