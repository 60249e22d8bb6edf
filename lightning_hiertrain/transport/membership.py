"""Which tiers a run cannot do without, and which of the others it has lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from lightning_hiertrain.transport.peers import Peer


class Membership:
    """Tells a loss that ends the run from one after which the other tiers go on.

    A tier that is lost and can be spared raises no error where something is sent to it: it goes
    nowhere. Until `need` is called no tier can be spared.

    Args:
        tier: The tier of this process.
        peers: What is known of the others.

    Attributes:
        on_lost: Told at once, on the links' thread, of each tier that is lost and can be spared.
    """

    def __init__(self, tier: str, peers: Mapping[str, Peer]) -> None:
        self.on_lost: Callable[[str], None] | None = None
        self._tier = tier
        self._peers = peers
        self._needed: frozenset[str] | None = None

    def need(self, tiers: Iterable[str]) -> None:
        """Names all tiers without which this one cannot go on; any other one may die."""
        self._needed = frozenset({self._tier, *tiers})

    def can_spare(self, tier: str) -> bool:
        """Tells whether the others go on if this tier dies."""
        return self._needed is not None and tier not in self._needed

    def spares(self, tier: str) -> bool:
        """Tells whether a tier has died and the others go on.

        One that failed with an error of its own, or left in order, has not: its error is
        everybody's.
        """
        peer = self._peers.get(tier)
        has_died = peer is not None and peer.lost is not None and not peer.ended_by_itself
        return has_died and self.can_spare(tier)

    @property
    def spared(self) -> dict[str, str]:
        """The tiers that have died and without which the run goes on, and how they died."""
        return {name: str(peer.lost) for name, peer in self._peers.items() if self.spares(name)}

    def decides(self, tier: str, about: str) -> bool:
        """Tells whether a tier that this one has lost is lost to all: it matters, the other not."""
        return self.can_spare(about) and not self.can_spare(tier)
