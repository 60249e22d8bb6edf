"""What somebody who looks on is told while a tier works: what it does, sends and waits for.

A network has one observer, which is `None` unless somebody looks on. All times are those of
`time.perf_counter`.
"""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from lightning_hiertrain.transport.wire import Message

Activity = tuple[str, str]
"""What a tier does, in one word, and which part of it."""


class Observer(Protocol):
    """Is told what a tier does."""

    def sent(self, peer: str, tag: str, num_bytes: int, started: float, queued: float) -> None:
        """A message has been queued.

        Args:
            peer: The tier that gets it.
            tag: Its tag.
            num_bytes: Its length.
            started: When it was ready to be queued.
            queued: When there was room for it.
        """

    def received(
        self, peer: str, message: Message, operation: str, started: float, ended: float
    ) -> None:
        """A message has been waited for and taken.

        Args:
            peer: The tier that sent it.
            message: The message, which knows when it arrived.
            operation: What it was waited for.
            started: When the wait began.
            ended: When it ended.
        """

    def begin(self, activity: Activity) -> Activity:
        """Something else is done from now on; returns what was done until now."""

    def step_ended(self) -> None:
        """This tier's part of a training step is over."""


class Observed(Protocol):
    """What can have an observer."""

    observer: Observer | None


class Doing:
    """A context in which a tier does one thing, told to the observer if there is one.

    Args:
        observed: The network.
        what: What it does, in one word.
        detail: Which part of it.
    """

    __slots__ = ("_activity", "_before", "_observer")

    def __init__(self, observed: Observed, what: str, detail: str = "") -> None:
        self._observer = observed.observer
        self._activity = (what, detail)
        self._before: Activity = ("", "")

    def __enter__(self) -> None:
        if self._observer is not None:
            self._before = self._observer.begin(self._activity)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._observer is not None:
            self._observer.begin(self._before)
