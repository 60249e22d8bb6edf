"""Floating values as an index and a table of what occurs: 8-bit pixels after any normalisation.

However an image was normalised, a channel of it holds at most 256 different values. They are found
by their bits, so that NaN, -0.0 and infinities come back as they were:

    bits of a value  * factor >> shift  = slot      slots[slot] = index      values[index] = bits

The factor is chosen so that no two known values share a slot. Each index is checked against its
value: what does not fit is new, and joins the table as long as there is room.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

MAX_VALUES = 256
MAX_CHANNELS = 16
_SLOT_BITS = 16
_BLOCK = 1 << 16
"""About how many values are looked up at once: what is in between stays in the cache."""
_ATTEMPTS = 256
_SAMPLE = 4096

Bits = npt.NDArray[Any]
_WORDS: dict[int, tuple[torch.dtype, type[np.unsignedinteger[Any]]]] = {
    2: (torch.int16, np.uint16),
    4: (torch.int32, np.uint32),
    8: (torch.int64, np.uint64),
}


class Tables:
    """The values that occur in a tensor, one table for all or one for each channel.

    Args:
        dim: The dimension along which the channels lie, `None` for one table.
        num_channels: Their number, 1 for one table.
        itemsize: Bytes of a value: 2, 4 or 8.
    """

    def __init__(self, dim: int | None, num_channels: int, itemsize: int) -> None:
        self.dim = dim
        self.num_channels = num_channels
        self._channels = [_Table(itemsize) for _ in range(num_channels)]

    @property
    def num_values(self) -> int:
        """The values in all tables; grows when a new one is met."""
        return sum(table.count for table in self._channels)

    def index(self, tensor: Tensor) -> Tensor | None:
        """Returns the index of each value, or `None` if a channel has too many different ones."""
        bits = _bits(tensor)
        indices = np.empty(bits.shape, np.uint8)
        sources, targets = _by_channel(bits, self.dim), _by_channel(indices, self.dim)
        for table, source, target in zip(self._channels, sources, targets, strict=True):
            for rows in _blocks(source):
                if not table.index(source[rows], target[rows]):
                    return None
        return torch.from_numpy(indices)

    def tensor(self, dtype: torch.dtype) -> Tensor:
        """Returns the tables as rows of values, as far as one of them is filled."""
        count = max(table.count for table in self._channels)
        rows = np.stack([table.values[:count] for table in self._channels])
        return _tensor(rows, dtype)


def find_tables(tensor: Tensor) -> Iterator[Tables]:
    """Yields the tables that a tensor could have, judged by a part of it.

    Args:
        tensor: Floating values of shape `(num_samples, ...)`.
    """
    bits = _bits(tensor)
    dims = range(1, tensor.dim())
    for dim in (None, *(d for d in dims if 1 < tensor.size(d) <= MAX_CHANNELS)):
        channels = list(_by_channel(bits, dim))
        if all(np.unique(_sample(channel)).size <= MAX_VALUES for channel in channels):
            yield Tables(dim, len(channels), tensor.element_size())


def look_up(indices: Tensor, table: Tensor, dim: int | None) -> Tensor:
    """Puts the values of a table in place of their indices.

    Args:
        indices: Any shape, uint8.
        table: `(num_channels, num_values)`.
        dim: The dimension along which the channels lie.

    Raises:
        ValueError: If an index is past its table, or the channels are not as many as the tables.
    """
    numbers, rows = indices.numpy(), _bits(table)
    if dim is not None and not -numbers.ndim <= dim < numbers.ndim:
        raise ValueError(f"there is no dimension {dim} in a tensor of shape {numbers.shape}")
    if numbers.size and (not rows.shape[1] or int(numbers.max()) >= rows.shape[1]):
        raise ValueError(f"an index is past its table of {rows.shape[1]} values")
    values = np.empty(numbers.shape, rows.dtype)
    sources, targets = list(_by_channel(numbers, dim)), list(_by_channel(values, dim))
    if len(sources) != len(rows):
        raise ValueError(f"there are {len(rows)} tables for {len(sources)} channels")
    for row, source, target in zip(rows, sources, targets, strict=True):
        for part in _blocks(source):
            target[part] = np.take(row, source[part].astype(np.intp), mode="clip")
    return _tensor(values, table.dtype)


class _Table:
    """The values of one channel, in the order in which they were met."""

    def __init__(self, itemsize: int) -> None:
        self._word = _WORDS[itemsize][1]
        self.values = np.zeros(MAX_VALUES, self._word)
        self.count = 0
        self._slots = np.zeros(1 << _SLOT_BITS, np.uint8)
        self._factor = self._word(1)
        self._shift = self._word(8 * itemsize - _SLOT_BITS)
        self._random = np.random.default_rng(0)

    def index(self, bits: Bits, out: Bits) -> bool:
        """Writes the index of each value; false if there is no room for a new one."""
        if not self.count and not self._add(bits):
            return False
        while True:
            slots = ((bits * self._factor) >> self._shift).astype(np.intp)
            out[...] = np.take(self._slots, slots, mode="clip")
            fits = np.take(self.values, out.astype(np.intp), mode="clip") == bits
            if fits.all():
                return True
            if not self._add(bits[~fits]):
                return False

    def _add(self, bits: Bits) -> bool:
        new = np.unique(bits)
        if self.count + new.size > MAX_VALUES:
            return False
        self.values[self.count : self.count + new.size] = new
        self.count += new.size
        known = self.values[: self.count]
        for _ in range(_ATTEMPTS):
            slots = ((known * self._factor) >> self._shift).astype(np.intp)
            if np.unique(slots).size == self.count:
                self._slots[slots] = np.arange(self.count, dtype=np.uint8)
                return True
            factor = self._random.integers(0, np.iinfo(self._word).max, dtype=self._word)
            self._factor = self._word(factor | self._word(1))
        return False


def _bits(tensor: Tensor) -> Bits:
    signed, unsigned = _WORDS[tensor.element_size()]
    bits: Bits = tensor.view(signed).numpy().view(unsigned)
    return bits


def _tensor(bits: Bits, dtype: torch.dtype) -> Tensor:
    signed = _WORDS[bits.dtype.itemsize][0]
    return torch.from_numpy(bits.view(str(signed).removeprefix("torch."))).view(dtype)


def _by_channel(array: Bits, dim: int | None) -> Iterator[Bits]:
    return iter((array,) if dim is None else np.moveaxis(array, dim, 0))


def _blocks(array: Bits) -> Iterator[Any]:
    """Yields slices of the first dimension; a single value is a block of its own."""
    if array.ndim == 0:
        yield ...
        return
    length = array.shape[0]
    step = max(1, _BLOCK * length // max(array.size, 1))
    for start in range(0, length if array.size else 0, step):
        yield slice(start, start + step)


def _sample(array: Bits) -> Bits:
    """Returns some whole rows from the start, or a part of the first."""
    if array.ndim == 0 or array.size <= _SAMPLE:
        return array.reshape(-1)
    rows = max(1, _SAMPLE * array.shape[0] // array.size)
    return array[:rows].reshape(-1)[:_SAMPLE]
