"""Everything that can go wrong and has a name of its own.

Errors in arguments are plain `ValueError`/`TypeError`; a Lightning feature that cannot work here
raises Lightning's `MisconfigurationException`. The classes below are for failures that a caller may
want to tell apart.
"""

from __future__ import annotations


class HierTrainError(RuntimeError):
    """The base of this package's own errors."""


class TraceError(HierTrainError, ValueError):
    """A model could not be seen as a chain of layers, or left the chain that was traced."""


class PlanningError(HierTrainError, ValueError):
    """The planner found no schedule; the message names the constraint that binds."""


class LinkError(HierTrainError):
    """Communication between two tiers failed.

    Args:
        message: What happened and the remedy.
        tier: The tier on which it was noticed.
        peer: The tier at the other end.
        operation: What was being done, for example `"receive activations"`.
        timeout_seconds: How long was waited, if a wait ended it.
        reason: What happened to the peer, as far as is known; the message if nothing more is.
    """

    def __init__(
        self,
        message: str,
        *,
        tier: str,
        peer: str,
        operation: str,
        timeout_seconds: float | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(message)
        self.tier = tier
        self.peer = peer
        self.operation = operation
        self.timeout_seconds = timeout_seconds
        self.reason = message if reason is None else reason


class LinkTimeoutError(LinkError, TimeoutError):
    """A wait for a peer ended without an answer."""


class PeerLostError(LinkError, ConnectionError):
    """A peer was there and is gone: killed, silent for too long, or ended with an error."""
