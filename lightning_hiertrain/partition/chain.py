"""A model as a chain of layers: what the tracer finds and all else works from. Pure data.

```
calls    0   1   2   3   4   5   6   7   8    torch functions in the order in which they are called
kind     r   m   m   c   m   m   m   m   m    raw, main or constant
cuts             ^           ^   ^            after these calls a single tensor carries the samples
layer    [   1   ][    2    ][ 3 ][ after the chain: loss, metrics ]
```
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch

from lightning_hiertrain.partition.chance import BATCH_STATISTICS, MAYBE_RANDOM, RANDOM


class Kind(Enum):
    """What a call depends on."""

    CONSTANT = "constant"
    """Not on the batch: a mask, a position table. Every tier makes it."""
    RAW = "raw"
    """On the batch but on no parameter and no chance: work on the samples ahead of the model."""
    MAIN = "main"
    """On samples that went through parameters (or through chance)."""


@dataclass(frozen=True, kw_only=True)
class RowShape:
    """The shape of a value with samples in it, for any number of samples."""

    shape: tuple[int, ...]
    """With 1 in place of the size that varies."""
    dim: int
    """The dimension along which samples lie."""
    per_sample: int
    """Entries along that dimension for one sample (windows, tokens)."""
    dtype: str
    """For example `"float32"`."""

    @property
    def bytes_per_sample(self) -> int:
        """Bytes of one sample."""
        return math.prod(self.of(1)) * int(getattr(torch, self.dtype).itemsize)

    def of(self, num_samples: int) -> tuple[int, ...]:
        """Returns the shape for that many samples."""
        return (
            *self.shape[: self.dim],
            self.per_sample * num_samples,
            *self.shape[self.dim + 1 :],
        )


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a torch function that returned a tensor."""

    name: str
    kind: Kind
    outputs: tuple[RowShape | None, ...] = ()
    """Shapes of the tensors in the result; `None` for one in which no samples lie."""
    reads_raw: bool = False
    """Whether a main call takes a raw value, of which it may need only the first rows."""
    module: str = ""
    """Name of the module in whose forward it is made."""
    changes_buffers: bool = False
    """Whether it writes into buffers of the module."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One link of the chain, from the cut before it to the cut after it."""

    name: str
    """Name of the module or function that ends it, unique in the chain."""
    last_call: int
    """Index of the call whose single output crosses the cut."""
    output: RowShape
    parameters: tuple[str, ...]
    """Names of the parameters that this layer is the first to use."""
    parameter_bytes: int
    output_bytes_per_sample: int


@dataclass(frozen=True, kw_only=True)
class LayerChain:
    """The layers of a model in order; a cut may follow any of them."""

    layers: tuple[Layer, ...]
    calls: tuple[Call, ...]
    """Up to and including the last layer's last call."""
    leaf_shapes: tuple[RowShape | None, ...]
    """For each tensor of the batch, its shape; `None` for one that is not split."""
    first_leaf_use: tuple[int, ...]
    """For each leaf, the index of the first main call that reads it or what was made of it;
    `len(calls)` if that lies behind the chain or nowhere."""
    last_leaf_use: tuple[int, ...]
    """The same for the last such call; -1 if nothing reads the leaf."""

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: int) -> Layer:
        return self.layers[index]

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def parameters_through(self, num_layers: int) -> tuple[str, ...]:
        """Returns the names of the parameters that the first `num_layers` layers use."""
        return tuple(name for layer in self.layers[:num_layers] for name in layer.parameters)

    def is_read_before(self, leaf: int, num_layers: int) -> bool:
        """Tells whether the first `num_layers` layers read a leaf of the batch."""
        return self.first_leaf_use[leaf] <= self.layers[num_layers - 1].last_call

    def is_read_behind(self, leaf: int, num_layers: int) -> bool:
        """Tells whether anything behind the first `num_layers` layers reads a leaf of the batch."""
        return self.last_leaf_use[leaf] > self.layers[num_layers - 1].last_call

    def needs_whole_shares(self, num_layers: int) -> bool:
        """Tells whether the first `num_layers` layers must see all rows of a share at once.

        They must where they normalise over the batch or change a buffer in every pass.
        """
        return any(
            call.name in BATCH_STATISTICS or call.changes_buffers
            for call in self._calls_through(num_layers)
        )

    def least_samples(self, num_layers: int) -> int:
        """Returns how many samples the first `num_layers` layers must have at least, if any.

        A channel's mean and variance need two values; where a layer that normalises over the batch
        gets one of each sample, that is two samples.
        """
        return 2 if 1 in self._values_through(num_layers).values() else 1

    @property
    def values_per_sample(self) -> dict[str, int]:
        """For each module that normalises over the batch, the values of a channel in one sample."""
        return self._values_through(len(self))

    def _values_through(self, num_layers: int) -> dict[str, int]:
        values = {}
        for call in self._calls_through(num_layers):
            if call.name in BATCH_STATISTICS and call.outputs and call.outputs[0] is not None:
                shape = call.outputs[0].of(1)
                channels = shape[1] if len(shape) > 1 else 1
                values[call.module] = max(math.prod(shape) // max(channels, 1), 1)
        return values

    def _calls_through(self, num_layers: int) -> tuple[Call, ...]:
        return self.calls[: self.layers[num_layers - 1].last_call + 1] if num_layers else ()

    def draws_random_numbers(self, num_layers: int) -> bool:
        """Tells whether the first `num_layers` layers may draw random numbers."""
        return any(
            call.name in RANDOM or call.name in MAYBE_RANDOM
            for call in self._calls_through(num_layers)
        )

    @property
    def signature(self) -> str:
        """Tells two chains apart: names and sizes of the layers."""
        return ";".join(f"{x.name}:{x.output_bytes_per_sample}:{x.parameter_bytes}" for x in self)
