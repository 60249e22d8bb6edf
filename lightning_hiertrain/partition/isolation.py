"""Running a step without a trace in the random number generators or the module's buffers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn


@contextmanager
def same_chance() -> Iterator[None]:
    """Restores the state of all random number generators (Python, NumPy, torch) at the end."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    in_use = torch.cuda.is_initialized()
    cuda = torch.cuda.get_rng_state_all() if in_use else []
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


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
