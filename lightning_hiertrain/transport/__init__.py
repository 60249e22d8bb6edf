"""Authenticated, resumable links between tiers on ZeroMQ.

In: a topology and, between machines, keys. Out: a `Network` on which tiers send each other nested
    values of tensors by
tag, and the collective operations on top of it. Nothing that arrives is ever unpickled or
evaluated.
"""

from lightning_hiertrain.transport.collectives import Collectives
from lightning_hiertrain.transport.keys import make_keys, read_private_key
from lightning_hiertrain.transport.network import Network
from lightning_hiertrain.transport.packing import pack, unpack
from lightning_hiertrain.transport.wire import Message, packed_bytes

__all__ = [
    "Collectives",
    "Message",
    "Network",
    "make_keys",
    "pack",
    "packed_bytes",
    "read_private_key",
    "unpack",
]
