"""How fast tensors leave a tier, seen from the acknowledgements of what it sends anyway.

Between two acknowledgements a link was busy if enough was on its way when the first one came. The
bytes that the second one acknowledges then tell its rate. The start of what is sent after a pause
does not count: neither the round trip, nor the burst that a shaper lets pass, nor most of TCP's
slow start is in the result.

Acknowledgements may come late, all at once. So what was sent after a pause also tells, as a whole,
how fast the link is at least.

What goes to a neighbour tells of one link. What is relayed behind it tells of all links on the way,
the slowest of them. While enough goes to the neighbour too to keep its link busy, all together
tells of that one; while a little does, nothing is told: the rest may be held up further on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_hiertrain.transport.peers import Peer
from lightning_hiertrain.transport.sockets import Channel

_LEAST_RUN_BYTES = 48 << 10
"""From one pause to the next, to tell how fast a link is at least."""
_BUSY_BYTES = 16 << 10
"""On the way over a link that counts as busy."""
_BURST_BYTES = 32 << 10
"""After a pause, that do not count."""
_KEPT = 4096
"""Intervals between acknowledgements that are kept until somebody asks."""


@dataclass(kw_only=True)
class _Way:
    """What is on its way through one neighbour, as it was at the last acknowledgement."""

    at: float = 0.0
    began: float | None = None
    """When something was sent after a pause, `None` in a pause."""
    has_relayed: bool = False
    """Whether anything since then was for a tier behind the neighbour."""
    since_pause_bytes: int = 0
    tells_of: str | None = None
    """The tier whose links are busy with it."""


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """What has arrived somewhere while the links there were busy."""

    num_bytes: float = 0.0
    seconds: float = 0.0
    least_bytes_per_second: float = 0.0
    """What the links carry at least."""

    @property
    def bytes_per_second(self) -> float:
        """What the links carry, by all that was seen; 0 if nothing was."""
        rate = self.num_bytes / self.seconds if self.seconds else 0.0
        return max(rate, self.least_bytes_per_second)

    def __add__(self, other: Goodput) -> Goodput:
        return Goodput(
            num_bytes=self.num_bytes + other.num_bytes,
            seconds=self.seconds + other.seconds,
            least_bytes_per_second=max(self.least_bytes_per_second, other.least_bytes_per_second),
        )


@dataclass(kw_only=True)
class GoodputMeter:
    """Watches a tier's flows; any other thread than the links' calls `take` alone."""

    peers: Mapping[str, Peer]
    _ways: dict[str, _Way] = field(default_factory=dict)
    _seen: deque[tuple[str, Goodput]] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def sent(self, peer: Peer) -> None:
        """Notes that tensors for a peer have left."""
        way = self._ways.setdefault(peer.next_hop, _Way())
        if way.began is None:
            way.began, way.has_relayed = time.monotonic(), False
        way.has_relayed |= not peer.is_neighbour

    def acknowledged(self, peer: Peer, num_bytes: int) -> None:
        """Notes that tensors for a peer have arrived there."""
        hop, now = peer.next_hop, time.monotonic()
        way = self._ways.setdefault(hop, _Way())
        if way.tells_of is not None and num_bytes:
            seen = Goodput(num_bytes=num_bytes, seconds=now - way.at)
            self._seen.append((way.tells_of, seen))
        left = {
            other.name: in_flight
            for other in self.peers.values()
            if other.next_hop == hop and (in_flight := in_flight_bytes(other))
        }
        way.at = now
        way.since_pause_bytes += num_bytes
        if not left:
            self._end_run(hop, way)
        way.tells_of = None
        if way.since_pause_bytes >= _BURST_BYTES and (hop in left or len(left) == 1):
            (to,) = (hop,) if hop in left else left
            way.tells_of = to if left[to] >= _BUSY_BYTES else None

    def _end_run(self, hop: str, way: _Way) -> None:
        num_bytes, began = way.since_pause_bytes, way.began
        way.since_pause_bytes, way.began = 0, None
        if began is not None and num_bytes >= _LEAST_RUN_BYTES and not way.has_relayed:
            rate = (num_bytes - _BURST_BYTES) / max(way.at - began, 1e-6)
            self._seen.append((hop, Goodput(least_bytes_per_second=rate)))

    def take(self) -> dict[str, Goodput]:
        """Returns what was seen since the last call, by the tier that it went to."""
        found: dict[str, Goodput] = {}
        while self._seen:
            peer, more = self._seen.popleft()
            found[peer] = found.get(peer, Goodput()) + more
        return found


def in_flight_bytes(peer: Peer) -> int:
    """Returns how many bytes of tensors are on their way to a peer."""
    flows = peer.outgoing
    return sum(flows[c].in_flight_bytes for c in (Channel.DATA, Channel.AHEAD) if c in flows)
