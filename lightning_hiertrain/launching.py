"""Starting the other tiers as processes of this machine, and seeing that none outlives the run."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

from lightning_hiertrain.meeting import TIER_VARIABLE

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
_GRACE_SECONDS = 15.0
"""How long a process may take to end by itself once another one has failed."""
_START_GRACE_SECONDS = 3.0
"""The same before the tiers have met: nothing is lost then, and one may only just be starting."""


class Launcher(_SubprocessScriptLauncher):
    """Runs this script once more for each other tier of this machine.

    Lightning's own observer kills all processes as soon as it sees that one has failed, and with
    them the error that tells why. The tiers hear of each other's end over their links; the observer
    here gives them time to say so.

    Args:
        cluster_environment: Knows the ranks.
        num_processes: Tiers on this machine.
        num_nodes: Machines.
        report: Called with rank and exit code of a process that has failed; on a thread of its own.
    """

    def __init__(
        self,
        cluster_environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        *,
        report: Callable[[int, int], None],
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._grace_seconds: float | None = None
        self._report = report

    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
        """Starts the processes, unless something else did, and calls the function.

        Raises:
            MisconfigurationException: If the environment gives all processes the same tier.
        """
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not environment.creates_processes_externally:
            tier = os.environ.get(TIER_VARIABLE)
            if tier is not None and self.num_processes > 1:
                raise MisconfigurationException(
                    f"{TIER_VARIABLE}={tier!r} would make the same tier of all "
                    f"{self.num_processes} processes that the Trainer starts; unset it: on one "
                    "machine the rank is enough"
                )
            self._call_children_scripts()
            atexit.register(self._end)
            threading.Thread(target=self._observe, name="hiertrain-observer", daemon=True).start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        return function(*args, **kwargs)

    def fail(self, *, has_met: bool) -> None:
        """Notes that this process's run ended with an error: the others must not outlive it.

        Args:
            has_met: Whether the others have met this tier, and so hear of its end by themselves.
        """
        self._grace_seconds = _GRACE_SECONDS if has_met else _START_GRACE_SECONDS

    def kill(self, signum: int) -> None:
        """Sends a signal to the processes; before SIGKILL they may end by themselves."""
        if signum == getattr(signal, "SIGKILL", None):
            self._wait(_GRACE_SECONDS)
        super().kill(signum)

    def _observe(self) -> None:
        """Reports the first process that fails; ends all if this one does not end upon it."""
        while (failed := self._first_failed()) is None:
            if not self._living():
                return
            time.sleep(_POLL_SECONDS)
        rank, code = failed
        self._report(rank, code)

    def _first_failed(self) -> tuple[int, int] | None:
        codes = ((rank, process.poll()) for rank, process in enumerate(self.procs, start=1))
        return next(((rank, code) for rank, code in codes if code), None)

    def _living(self) -> bool:
        return any(process.poll() is None for process in self.procs)

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._living() and time.monotonic() < deadline:
            time.sleep(0.05)

    def _end(self) -> None:
        """Ends what is left when this process ends after an error."""
        if self._grace_seconds is None:
            return
        self._wait(self._grace_seconds)
        for rank, process in enumerate(self.procs, start=1):
            if process.poll() is None:
                log.warning("the process of rank %d does not end by itself: killing it", rank)
                process.kill()
                process.wait()
