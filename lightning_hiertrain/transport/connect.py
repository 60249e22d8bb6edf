"""How a tier opens its links: where it listens, whom it dials, and how it learns the keys."""

from __future__ import annotations

import atexit
import errno

import zmq

from lightning_hiertrain.errors import LinkError
from lightning_hiertrain.topology import Topology
from lightning_hiertrain.transport.addresses import (
    dial_address,
    is_loopback,
    links_of,
    listen_addresses,
    resolve,
)
from lightning_hiertrain.transport.admission import Credentials
from lightning_hiertrain.transport.keys import public_key
from lightning_hiertrain.transport.peers import Peer
from lightning_hiertrain.transport.rendezvous import Card, ProcessIdentity, Rendezvous
from lightning_hiertrain.transport.sockets import Sockets


class Connector:
    """Opens the links of one tier.

    Args:
        tier: The tier of this process.
        topology: Tiers and links.
        private_key: This tier's key, or `None` to make one for the run.
        run_id: Where the processes of this machine leave their keys for each other; `None` if the
            topology holds the keys.
    """

    def __init__(
        self, tier: str, topology: Topology, *, private_key: str | None, run_id: str | None
    ) -> None:
        if private_key is None:
            private_key = zmq.curve_keypair()[1].decode()
        self.credentials = Credentials(public_key=public_key(private_key), private_key=private_key)
        self._tier = tier
        self._topology = topology
        self._run_id = run_id
        self._dialled, self._listened = links_of(topology, tier)
        has_peers = len(topology.names) > 1
        self._rendezvous = Rendezvous(run_id, tier) if run_id is not None and has_peers else None

    def listen(self, sockets: Sockets) -> None:
        """Opens the listening port, if somebody dials this tier, and lets local processes know.

        Raises:
            LinkError: If the address cannot be had.
        """
        port = self._listen(sockets) if self._listened else 0
        if self._rendezvous is not None:
            key = self.credentials.public_key
            card = Card(public_key=key, port=port, process=ProcessIdentity.current())
            self._rendezvous.publish(card)
            atexit.register(self.leave)

    def meet(self, sockets: Sockets) -> bool:
        """Finds neighbours' keys and dials them; returns whether nothing is left to find.

        Raises:
            ValueError: If two processes of this machine claim to be the same tier.
        """
        conflict = self._rendezvous.conflict() if self._rendezvous is not None else None
        if conflict is not None:
            raise ValueError(conflict)
        neighbours = self.credentials.neighbours
        links = (*self._dialled, *self._listened)
        for link in links:
            name = link.other(self._tier)
            if name in neighbours:
                continue
            card = self._rendezvous.read(name) if self._rendezvous is not None else None
            key = card.public_key if card is not None else self._topology.tier(name).public_key
            if key is None:
                continue
            neighbours[name] = key
            if link in self._dialled:
                if card is not None and self._has_free_port(name):
                    sockets.dial(name, "127.0.0.1", card.port)
                else:
                    sockets.dial(name, *dial_address(self._topology, link))
        return len(neighbours) == len(links)

    def leave(self) -> None:
        """Removes what was left for other processes."""
        if self._rendezvous is not None:
            atexit.unregister(self.leave)
            self._rendezvous.leave()

    def describe_missing(self, peer: Peer, sockets: Sockets) -> str:
        """Says where a tier that has not come was expected."""
        where = f"tier {peer.name!r} is missing"
        link = self._topology.link(self._tier, peer.next_hop)
        if not peer.is_neighbour or link is None:
            return f"{where} (reached through tier {peer.next_hop!r})"
        if self._has_free_port(link.between[1]):
            return f"{where} (expected as a process of this machine, run {self._run_id!r})"
        host, port = dial_address(self._topology, link)
        if link.between[0] == self._tier:
            failure = sockets.failure(peer.name) or "no answer"
            return f"{where} (dialled at {host}:{port}: {failure})"
        return f"{where} (it should dial this tier at {host}:{port})"

    def _has_free_port(self, tier: str) -> bool:
        """Tells whether a tier listens on whatever port is free."""
        links = (link for link in self._topology.links if link.between[1] == tier)
        fixed = [self._topology.tier(tier).address, *(link.address for link in links)]
        return self._run_id is not None and not any(fixed)

    def _listen(self, sockets: Sockets) -> int:
        if self._has_free_port(self._tier):
            return sockets.listen("127.0.0.1", None)
        addresses = listen_addresses(self._topology, self._tier)
        is_open = False
        for host, port in addresses:
            try:
                sockets.listen(resolve(host), port)
                is_open = True
            except OSError as error:  # zmq's own error is not one
                raise self._error(host, port, error) from error
            except zmq.ZMQError as error:
                # An address that is not this machine's own may be that of a router before it.
                if error.errno not in (errno.EADDRNOTAVAIL, errno.ENODEV):
                    raise self._error(host, port, error) from error
        host, port = addresses[0]
        if is_open:
            return port
        if is_loopback(host) or self._run_id is not None:
            raise self._error(host, port, "this machine has no such address")
        try:
            return sockets.listen("*", port)
        except zmq.ZMQError as error:
            raise self._error("*", port, error) from error

    def _error(self, host: str, port: int, error: object) -> LinkError:
        return LinkError(
            f"tier {self._tier!r} cannot listen on {host}:{port}: {error}; end the run that uses "
            "it, or change the tier's `address` in the topology",
            tier=self._tier,
            peer=self._tier,
            operation="listen",
        )
