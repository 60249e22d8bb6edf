"""The links of one tier to all others: how they open, fail and close."""

from __future__ import annotations

import os
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from traceback import format_exception
from types import TracebackType

from lightning_hiertrain.errors import LinkTimeoutError
from lightning_hiertrain.topology import KEY_CHARACTERS, Topology
from lightning_hiertrain.transport.addresses import check_secure
from lightning_hiertrain.transport.connect import Connector
from lightning_hiertrain.transport.engine import Engine
from lightning_hiertrain.transport.farewell import Farewell
from lightning_hiertrain.transport.keys import check_private_key, check_tier_key, read_private_key
from lightning_hiertrain.transport.messages import Messages
from lightning_hiertrain.transport.peers import lost_error
from lightning_hiertrain.transport.protocol import Protocol

_STOP_SECONDS = 5.0


class Network(Messages):
    """The links of one tier; made by `Network.local` or `Network.from_topology`.

    Attributes:
        tier: The tier of this process.
        topology: Tiers and links.
        timeout_seconds: How long a wait lasts unless it is told otherwise.
        observer: Who is told what is sent and waited for; `None` for nobody.
    """

    def __init__(
        self,
        tier: str,
        topology: Topology,
        *,
        private_key: str | None,
        run_id: str | None,
        timeout_seconds: float,
        silence_seconds: float,
    ) -> None:
        topology.tier(tier)
        for name, seconds in (
            ("timeout_seconds", timeout_seconds),
            ("silence_seconds", silence_seconds),
        ):
            if not seconds > 0:
                raise ValueError(f"`{name}` must be above 0, got {seconds!r}")
        super().__init__(tier, timeout_seconds=timeout_seconds)
        self.topology = topology
        self._silence_seconds = silence_seconds
        self._private_key = private_key
        self._run_id = run_id
        self._connector: Connector | None = None
        self._aborted = False

    @classmethod
    def local(
        cls,
        tier: str,
        names: Iterable[str],
        *,
        run_id: str,
        timeout_seconds: float = 120.0,
        silence_seconds: float = 10.0,
    ) -> Network:
        """The links between processes of one user on this machine; needs no configuration.

        Args:
            tier: The tier of this process.
            names: All tiers, in order of rank.
            run_id: The same word on all tiers, and another one for every run.
            timeout_seconds: How long a wait lasts unless it is told otherwise.
            silence_seconds: After how long without a connection a peer counts as lost.
        """
        return cls(
            tier,
            Topology.local(names),
            private_key=None,
            run_id=run_id,
            timeout_seconds=timeout_seconds,
            silence_seconds=silence_seconds,
        )

    @classmethod
    def from_topology(
        cls,
        tier: str,
        topology: Topology,
        *,
        private_key: str | Path | None,
        meeting: int = 0,
        timeout_seconds: float = 120.0,
        silence_seconds: float = 10.0,
    ) -> Network:
        """The links between machines.

        Args:
            tier: The tier of this process.
            topology: Tiers with their addresses and public keys, and links; the same on all tiers.
            private_key: This tier's private key or the file that holds it. `None` is allowed if no
                tier has keys and all addresses are this machine's own: then keys are made for the
                run.
            meeting: How many networks each of the tiers' processes has had before. Keys that were
                made for one are not those of the next.
            timeout_seconds: How long a wait lasts unless it is told otherwise.
            silence_seconds: After how long without a connection a peer counts as lost.

        Raises:
            ValueError: If keys or addresses are missing or do not fit.
        """
        if private_key is not None:
            is_key = (
                isinstance(private_key, str)
                and len(private_key) == KEY_CHARACTERS
                and not os.path.exists(private_key)
            )
            private_key = (
                check_private_key(str(private_key)) if is_key else read_private_key(private_key)
            )
        topology.tier(tier)
        secure = check_secure(topology, tier, has_private_key=private_key is not None)
        if secure and private_key is not None:
            check_tier_key(tier, topology, private_key)
        run = sha256(repr(topology.to_dict()).encode()).hexdigest()[:32]
        return cls(
            tier,
            topology,
            private_key=private_key,
            run_id=None if secure else f"topology-{run}-{meeting}",
            timeout_seconds=timeout_seconds,
            silence_seconds=silence_seconds,
        )

    def __enter__(self) -> Network:
        if self._engine is None:
            self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.abort("".join(format_exception(error)))
        self.close()

    @property
    def is_usable(self) -> bool:
        """Whether all peers can still be reached."""
        engine = self._engine
        return (
            engine is not None
            and engine.failure is None
            and not self._closed
            and not self._aborted
            and all(
                peer.lost is None or engine.protocol.membership.spares(name)
                for name, peer in engine.protocol.peers.items()
            )
        )

    def start(self) -> None:
        """Listens for the tiers below, dials those above, and returns without waiting for them.

        Raises:
            LinkError: If an address to listen on cannot be had.
            ValueError: If the local run is already under way, or others can enter its directory.
        """
        if self._engine is not None or self._closed:
            raise RuntimeError(
                f"the network of tier {self.tier!r} was started before; make a new one"
            )
        connector = Connector(
            self.tier, self.topology, private_key=self._private_key, run_id=self._run_id
        )
        protocol = Protocol(
            self.tier,
            self.topology,
            connector.credentials,
            changed=self._changed,
            silence_seconds=self._silence_seconds,
            meet=connector.meet,
        )
        engine = Engine(protocol, self._changed)
        try:
            connector.listen(protocol.sockets)
        except BaseException:
            engine.stop(_STOP_SECONDS)
            connector.leave()
            raise
        self._connector, self._engine = connector, engine
        engine.start()

    def wait_for_peers(self, timeout_seconds: float | None = None) -> None:
        """Waits until this tier and every other one have heard from each other.

        Raises:
            LinkTimeoutError: If one is missing; the message names it and its address.
            PeerLostError: If one came and is gone.
        """
        timeout_seconds = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        peers = self._running().protocol.peers

        def all_here() -> bool:
            for peer in peers.values():
                has_left = peer.established and peer.closing_at is not None  # so it was here
                if peer.lost is not None and not has_left:
                    raise lost_error(self.tier, peer, "wait for all tiers", timeout_seconds)
            return all(peer.established for peer in peers.values())

        if not self._wait(all_here, timeout_seconds):
            missing = self.missing()
            raise LinkTimeoutError(
                f"tier {self.tier!r} waited {timeout_seconds:g} s for all tiers: "
                + "; ".join(missing.values())
                + ". Start the missing tiers, and check addresses, firewalls and keys",
                tier=self.tier,
                peer=next(iter(missing)),
                operation="wait for all tiers",
                timeout_seconds=timeout_seconds,
            )

    def missing(self) -> dict[str, str]:
        """Returns the tiers that have not been met, and what is known about why."""
        assert self._connector is not None
        protocol = self._running().protocol
        return {
            peer.name: peer.lost or self._connector.describe_missing(peer, protocol.sockets)
            for peer in protocol.peers.values()
            if not peer.established
        }

    def give_up(self, peer: str, reason: str) -> None:
        """Ends waits for a peer that has not come yet and, as is known elsewhere, never will."""
        if self._engine is None or self._closed:
            return  # nobody waits any more
        state = self._peer(peer)
        with self._changed:
            if not state.established and state.lost is None:
                state.lost = reason
                self._changed.notify_all()

    def abort(self, reason: str, *, culprit: str | None = None) -> None:
        """Tells all peers that this tier ends with an error, which ends their waits too.

        Args:
            reason: What happened.
            culprit: The tier that failed first, if it is not this one.
        """
        if (
            self._engine is None
            or self._closed
            or self._aborted
            or self._engine.failure is not None
        ):
            return
        self._aborted = True
        Farewell(self._engine, self._wait).abort(reason, culprit)

    def close(self) -> None:
        """Sends what is still queued, says goodbye and closes the links."""
        if self._closed:
            return
        engine = self._engine
        if engine is not None and engine.failure is None and not self._aborted:
            Farewell(engine, self._wait).finish(self.timeout_seconds)
        self._closed = True
        if engine is not None:
            engine.stop(_STOP_SECONDS)
        if self._connector is not None:
            self._connector.leave()
