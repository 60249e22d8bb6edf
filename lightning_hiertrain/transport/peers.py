"""What a tier knows of another one, and the frames by which they keep in touch.

The first frame of everything that travels is an envelope, a small JSON object:

    k       kind: hello | probe | ack | chunk | refuse
    s, t    source and target tier
    e, te   session of the source, and of the target as far as the source knows
    c       channel
    q, g    sequence number and generation (`flow.py`)
    l       lengths of head and whole of each message that begins in a chunk
    p       the probe or gap that an ack answers
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

from lightning_hiertrain.errors import LinkTimeoutError, PeerLostError
from lightning_hiertrain.transport.flow import LARGEST_CHUNK_BYTES, MAX_TOGETHER, InFlow, OutFlow
from lightning_hiertrain.transport.rendezvous import ProcessIdentity
from lightning_hiertrain.transport.sockets import Channel
from lightning_hiertrain.transport.wire import MalformedError, Message

_AHEAD_SECONDS = 0.03
"""How long tensors of the step may find the link taken by what is needed later."""
_AHEAD_BYTES = 64 << 10
_RELAYED_CHUNK_BYTES = 128 << 10
"""The largest chunk to a tier behind another one, which has to have the whole to hand it on."""
KINDS = ("hello", "probe", "ack", "chunk", "refuse")


@dataclass(kw_only=True, eq=False)
class Peer:
    """Another tier, seen from this one; the network's lock guards the second block of fields."""

    name: str
    route: tuple[str, ...]
    session: str | None = None
    process: ProcessIdentity | None = None
    last_heard: float = 0.0
    down_since: float | None = None
    look_at: float = 0.0
    """When to look again whether its process runs, if that is on this machine."""
    ended_since: float | None = None
    closing_at: int | None = None
    """The number of chunks of tensors after which it will have closed."""
    outgoing: dict[Channel, OutFlow] = field(init=False)
    incoming: dict[Channel, InFlow] = field(default_factory=lambda: {c: InFlow() for c in Channel})
    asked_for: int = 0
    """The last small message that this tier has asked about."""
    unanswered: bool = False
    """Whether it should hear from this tier before the next beat."""

    established: bool = False
    """Whether each has heard from the other."""
    lost: str | None = None
    """Why it can no longer be reached."""
    ended_by_itself: bool = False
    """Whether it ended in order or with an error of its own, rather than died."""
    culprit: str | None = None
    """The tier whose failure made it fail; `lost` then tells what happened there."""
    through: str = ""
    """How the culprit's failure came to be this one's."""
    inbox: defaultdict[str, deque[Message]] = field(default_factory=lambda: defaultdict(deque))
    queued_bytes: dict[Channel, int] = field(default_factory=lambda: dict.fromkeys(Channel, 0))
    queued_messages: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    bytes_relayed: int = 0

    def __post_init__(self) -> None:
        most = LARGEST_CHUNK_BYTES if self.is_neighbour else _RELAYED_CHUNK_BYTES
        self.outgoing = {
            Channel.CONTROL: OutFlow(max_chunk_bytes=most),
            Channel.DATA: OutFlow(max_chunk_bytes=most),
            Channel.AHEAD: OutFlow(
                window_seconds=_AHEAD_SECONDS, min_window_bytes=_AHEAD_BYTES, max_chunk_bytes=most
            ),
        }

    @property
    def next_hop(self) -> str:
        return self.route[1]

    @property
    def is_neighbour(self) -> bool:
        return len(self.route) == 2

    def stats(self) -> dict[str, int]:
        """Returns what was sent to and received from it."""
        return {
            "bytes_sent": self.bytes_sent,
            "bytes_received": self.bytes_received,
            "messages_sent": self.messages_sent,
            "messages_received": self.messages_received,
            "bytes_relayed": self.bytes_relayed,
            "chunks_replayed": sum(flow.num_replayed for flow in self.outgoing.values()),
            "chunks_doubled": sum(flow.num_doubled for flow in self.incoming.values()),
        }


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """The envelope of an arriving frame, checked field by field."""

    kind: str
    source: str
    target: str
    session: str
    target_session: str | None
    channel: Channel
    sequence: int
    generation: int
    lengths: list[int] | None
    echo: tuple[int, int] | None
    more: dict[str, Any]

    @classmethod
    def read(cls, text: bytes) -> Envelope:
        """Parses an envelope.

        Raises:
            MalformedError: If it is not one.
        """
        try:
            data = json.loads(text)
            kind, session, target_session = data["k"], data["e"], data.get("te")
            if kind not in KINDS or not isinstance(session, str) or len(session) > 64:
                raise MalformedError("an envelope of an unknown kind")
            lengths, echo = data.get("l"), data.get("p")
            return cls(
                kind=kind,
                source=str(data["s"]),
                target=str(data["t"]),
                session=session,
                target_session=target_session,
                channel=Channel(_number(data.get("c", 0))),
                sequence=_number(data.get("q", 0)),
                generation=_number(data.get("g", 0)),
                lengths=None if lengths is None else _lengths(lengths),
                echo=None if echo is None else (_number(echo[0]), _number(echo[1])),
                more=data,
            )
        except MalformedError:
            raise
        except (
            ValueError,
            TypeError,
            KeyError,
            IndexError,
            AttributeError,
            RecursionError,
        ) as error:
            raise MalformedError("an envelope that cannot be read") from error


def write_envelope(
    kind: str, source: str, target: str, session: str, peer_session: str | None, **more: Any
) -> bytes:
    """Returns the bytes of an envelope."""
    data = {"k": kind, "s": source, "t": target, "e": session, "te": peer_session, **more}
    return json.dumps(data, separators=(",", ":")).encode()


def _lengths(value: Any) -> list[int]:
    if not isinstance(value, list) or len(value) % 2 or not 2 <= len(value) <= 2 * MAX_TOGETHER:
        raise MalformedError("an envelope with impossible lengths")
    return [_number(length) for length in value]


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise MalformedError("an envelope with an impossible number")
    return value


def lost_error(
    tier: str, peer: Peer, operation: str, timeout_seconds: float | None
) -> PeerLostError:
    """Returns the error of an operation with a peer that is lost; it names who failed first."""
    limit = "" if timeout_seconds is None else f" (timeout {timeout_seconds:g} s)"
    failed, reason = peer.culprit or peer.name, str(peer.lost)
    if failed == tier:
        failed, reason = peer.name, f"it ended because of tier {tier!r}: {reason}"
    through = "" if failed == peer.name else f", {peer.through}"
    return PeerLostError(
        f"tier {tier!r} lost tier {failed!r} during {operation!r}{limit}{through}: {reason}",
        tier=tier,
        peer=failed,
        operation=operation,
        timeout_seconds=timeout_seconds,
        reason=reason,
    )


def timeout_error(
    tier: str, peer: Peer, operation: str, timeout_seconds: float, what: str
) -> LinkTimeoutError:
    """Returns the error of a wait for a peer that has taken too long."""
    state = "is connected" if peer.established else "has not connected yet"
    return LinkTimeoutError(
        f"tier {tier!r} waited {timeout_seconds:g} s for tier {peer.name!r} during "
        f"{operation!r}: {what}, and the peer {state}; see what that tier is doing, or raise the "
        "timeout",
        tier=tier,
        peer=peer.name,
        operation=operation,
        timeout_seconds=timeout_seconds,
    )
