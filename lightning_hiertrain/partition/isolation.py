"""Running a step without a trace in the random number generators or the module's buffers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from lightning_hiertrain.accelerators import random_states, set_random_states


@contextmanager
def same_chance() -> Iterator[None]:
    """Restores the state of all random number generators at the end.

    They are those of Python, NumPy and torch, on the CPU and on accelerators of any kind.
    """
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    accelerators = random_states()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        set_random_states(accelerators)


NARROW = (torch.float32, torch.bfloat16, torch.float16)
"""Types that `in_double` widens."""


@contextmanager
def in_double(module: nn.Module) -> Iterator[None]:
    """Puts float64 values into the parameters and buffers of fewer bits, until the end."""
    tensors = [*module.parameters(), *module.buffers()]
    kept = [(x, x.data, x.grad) for x in tensors if x.dtype in NARROW]
    try:
        for tensor, data, _ in kept:
            tensor.grad = None
            tensor.data = data.double()
        yield
    finally:
        for tensor, data, gradient in kept:
            tensor.grad = None
            tensor.data = data
            tensor.grad = gradient


@contextmanager
def same_buffers(module: nn.Module) -> Iterator[None]:
    """Restores the values of the module's buffers at the end."""
    with torch.no_grad():
        kept = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                if buffer.shape == value.shape:
                    buffer.copy_(value)
