"""Whether the other tiers are still there: who has ended, fallen silent or refuses connections."""

from __future__ import annotations

from lightning_hiertrain.transport.peers import Peer
from lightning_hiertrain.transport.sockets import Channel, Sockets

_LAST_WORDS_SECONDS = 0.3
_LOOK_SECONDS = 0.5
"""How often a process on this machine is looked for: each look opens a file."""
_REFUSED_SECONDS = 2.0


class Liveness:
    """Notices, on the network's own thread, that a peer is gone.

    Args:
        sockets: The connections.
        silence_seconds: After how long without a connection a peer is lost.
        heartbeat_seconds: How long a connection may be silent before it counts as broken.
    """

    def __init__(
        self, sockets: Sockets, *, silence_seconds: float, heartbeat_seconds: float
    ) -> None:
        self._sockets = sockets
        self._silence_seconds = silence_seconds
        self._heartbeat_seconds = heartbeat_seconds

    def connected(self, peer: Peer) -> None:
        """Notes that a connection to a peer was made."""
        peer.down_since = None

    def reason_to_lose(self, peer: Peer, now: float) -> str | None:
        """Returns why a peer that has been met must be given up now, `None` if it need not."""
        if peer.session is None:
            return None
        self._look_for_process(peer, now)
        if peer.process is not None and peer.ended_since is not None:
            if now - peer.ended_since > _LAST_WORDS_SECONDS:
                return f"its process {peer.process.pid} has ended"
            return None
        if not peer.is_neighbour:
            return None  # its neighbour on the way tells
        if self._sockets.is_up(peer.name, Channel.CONTROL):
            self.connected(peer)
            return None
        if peer.down_since is None:
            # It may have fallen silent before this tier noticed, by a heartbeat at most.
            peer.down_since = max(peer.last_heard, now - self._heartbeat_seconds)
        down_seconds = now - peer.down_since
        if down_seconds > self._silence_seconds:
            return f"there has been no connection for {down_seconds:.1f} s"
        # A link that is down does not refuse; a machine whose process has ended does.
        is_here = peer.process is not None and peer.process.is_here()
        if not is_here and self._sockets.refused_seconds(peer.name, now) > _REFUSED_SECONDS:
            return "its machine answers that nothing listens there any more"
        return None

    @staticmethod
    def _look_for_process(peer: Peer, now: float) -> None:
        """Notes when a peer on this machine was first found to have ended."""
        if peer.process is None or peer.ended_since is not None or now < peer.look_at:
            return
        peer.look_at = now + _LOOK_SECONDS
        if peer.process.has_ended():
            peer.ended_since = now
