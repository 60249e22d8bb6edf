"""How a tier ends: after its work, or with an error that its peers must hear of."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from lightning_hiertrain.transport.engine import Engine
from lightning_hiertrain.transport.peers import Peer
from lightning_hiertrain.transport.protocol import ABORT, BYE
from lightning_hiertrain.transport.sockets import Channel
from lightning_hiertrain.transport.wire import encode

log = logging.getLogger(__name__)

_LAST_WORDS_SECONDS = 2.0
_STALL_SECONDS = 3.0


class Farewell:
    """The last that is sent; failures are logged, because an end must not be held up by them.

    Args:
        engine: The links.
        wait: Waits for a condition, at most so many seconds, and tells whether it came true.
    """

    def __init__(self, engine: Engine, wait: Callable[[Callable[[], bool], float], bool]) -> None:
        self._engine = engine
        self._protocol = engine.protocol
        self._peers = list(engine.protocol.peers.values())
        self._wait = wait

    def abort(self, reason: str, culprit: str | None) -> None:
        """Tells all peers that this tier ends with an error, and which tier failed first."""
        try:
            # A tier that is just coming would wait for this one in vain.
            self._wait(
                lambda: all(peer.lost or peer.established for peer in self._peers),
                _LAST_WORDS_SECONDS,
            )
            self._tell(self._peers, ABORT, lambda _: {"reason": reason, "culprit": culprit})
        except Exception:
            log.warning("tier %s could not tell that it ends", self._protocol.tier, exc_info=True)

    def finish(self, timeout_seconds: float) -> None:
        """Lets everything arrive that was sent, and says goodbye."""
        try:
            self._flush(timeout_seconds)
            self._relay_to_the_end()
            # A relay hears it last: it stops relaying then.
            for routed in (True, False):
                peers = [peer for peer in self._peers if peer.is_neighbour is not routed]
                self._tell(peers, BYE, lambda peer: peer.outgoing[Channel.DATA].sent)
        except Exception:
            log.warning("tier %s did not close in order", self._protocol.tier, exc_info=True)

    def _tell(self, peers: list[Peer], tag: str, value: Callable[[Peer], Any]) -> None:
        told = []

        def queue_all() -> bool:
            for peer in peers:
                if peer.lost is None and peer.established:
                    self._protocol.enqueue(peer, encode(tag, value(peer)), Channel.CONTROL)
                    told.append(peer)
            return True

        self._wait(queue_all, _LAST_WORDS_SECONDS)
        with self._engine.arrival_awaited():
            self._wait(
                lambda: all(peer.lost or not peer.queued_bytes[Channel.CONTROL] for peer in told),
                _LAST_WORDS_SECONDS,
            )

    def _flush(self, timeout_seconds: float) -> None:
        """Waits for what is queued as long as some of it still arrives."""
        deadline = time.monotonic() + timeout_seconds
        progress, before = 0, -1

        def num_left() -> int:
            return sum(peer.queued_messages for peer in self._peers if peer.established)

        while num_left() and progress != before and time.monotonic() < deadline:
            with self._engine.arrival_awaited():
                self._wait(lambda: not num_left(), _STALL_SECONDS)
            flows = [flow for peer in self._peers for flow in list(peer.outgoing.values())]
            before, progress = progress, sum(flow.num_acknowledged for flow in flows)
        if num_left():
            log.warning(
                "tier %s closes with %s messages unacknowledged", self._protocol.tier, num_left()
            )

    def _relay_to_the_end(self) -> None:
        """Lets tiers that talk through this one finish first."""
        route, tier = self._protocol.topology.route, self._protocol.tier
        relayed = [
            peer
            for peer in self._peers
            if any(tier in route(peer.name, other.name) for other in self._peers if other != peer)
        ]
        self._wait(
            lambda: all(peer.lost or not peer.established for peer in relayed), _STALL_SECONDS
        )
