"""Noting on one tier what it does, sends and waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any

from lightning_hiertrain.transport.observing import Activity, Observer
from lightning_hiertrain.transport.wire import Message

_LEAST_WAIT_SECONDS = 1e-3
"""For room to send; less is no wait."""


class Recorder(Observer):
    """Notes what the thread that made it does, and all messages.

    Args:
        synchronise: Called ahead of each change of activity: waits for the accelerator, so that
            its work counts where it belongs.
    """

    def __init__(self, synchronise: Callable[[], None] | None = None) -> None:
        self._synchronise = synchronise
        self._thread = threading.get_ident()
        self._now: Activity = ("other", "")
        self._activities: list[tuple[float, str, str]] = [(perf_counter(), *self._now)]
        self._waits: list[dict[str, Any]] = []
        self._sent: list[dict[str, Any]] = []
        self._received: list[dict[str, Any]] = []
        self._ends: dict[str, float] = {}
        self._last_end = 0.0

    def begin(self, activity: Activity) -> Activity:
        """Notes what is done from now on."""
        if self._synchronise is not None:
            self._synchronise()
        before, self._now = self._now, activity
        self._activities.append((perf_counter(), *activity))
        return before

    def sent(self, peer: str, tag: str, num_bytes: int, started: float, queued: float) -> None:
        """Notes a message that was sent."""
        self._sent.append({"peer": peer, "tag": tag, "bytes": num_bytes, "queued": queued})
        if queued - started > _LEAST_WAIT_SECONDS:
            self._wait(peer, tag, f"send {tag}", started, queued, sends=True)

    def received(
        self, peer: str, message: Message, operation: str, started: float, ended: float
    ) -> None:
        """Notes a message that was waited for."""
        self._received.append(
            {
                "peer": peer,
                "tag": message.tag,
                "bytes": message.num_bytes,
                "began": message.began,
                "arrived": message.arrived,
            }
        )
        self._wait(peer, message.tag, operation, started, ended, sends=False)

    def _wait(
        self, peer: str, tag: str, operation: str, started: float, ended: float, *, sends: bool
    ) -> None:
        if threading.get_ident() == self._thread:
            self._waits.append(
                {
                    "peer": peer,
                    "tag": tag,
                    "operation": operation,
                    "start": started,
                    "end": ended,
                    "sends": sends,
                }
            )

    def step_ended(self) -> None:
        """Notes that this tier's part of a step is over."""
        self._last_end = perf_counter()

    def name_step(self, number: int) -> None:
        """Says which step it was that ended last."""
        self._ends[str(number)] = self._last_end

    def notes(self) -> dict[str, Any]:
        """Returns everything that was noted, as it can travel; times are this process's own."""
        return {
            "activities": [*self._activities, (perf_counter(), *self._now)],
            "waits": self._waits,
            "sent": self._sent,
            "received": self._received,
            "ends": self._ends,
        }
