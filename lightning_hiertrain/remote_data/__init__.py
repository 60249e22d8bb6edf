"""The user's dataset exists on one tier, yet every tier runs the same Lightning loops.

In goes a Trainer whose datamodule or loaders are the user's own; out come loops in which the data
tier iterates the real loaders and every other tier as many tokens.
"""

from lightning_hiertrain.remote_data.loaders import BatchToken, RemoteLoader, sized_token
from lightning_hiertrain.remote_data.remote import RemoteData

__all__ = ["BatchToken", "RemoteData", "RemoteLoader", "sized_token"]
