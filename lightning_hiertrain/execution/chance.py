"""Random numbers of a prefix worker's own: no two shares of a mini-batch get the same mask."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import numpy as np
import torch

from lightning_hiertrain.accelerators import seed_accelerators
from lightning_hiertrain.partition.isolation import same_chance


@contextmanager
def own_chance(seed: str) -> Iterator[None]:
    """Draws from generators seeded with a word; afterwards they go on as if nothing had happened.

    All tiers seed alike, so without this tiers with equal shares would draw equal masks.

    Args:
        seed: Another one for each tier and mini-batch, the same in every run with the same seed.
    """
    number = int.from_bytes(blake2b(seed.encode(), digest_size=7).digest(), "big")
    with same_chance():
        torch.default_generator.manual_seed(number)
        seed_accelerators(number)
        np.random.seed(number % (1 << 32))
        random.seed(number)
        yield
