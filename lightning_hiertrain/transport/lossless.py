"""Fewer bytes without loss: how the tensors of a batch travel, bit for bit.

Two stages, each taken where it pays on the link at hand:

    form      whole numbers in the smallest type that holds them
              floating values as an index and a table (`tables.py`)
    squeezed  by zstd, or by zstd after sorting the bytes of all values by their place

What pays is decided by measurement: how long this tier takes to pack a byte, how many bytes are
left, and how fast the link is. Unpacking is taken to last as long as packing. Packing keeps the
sender from its work and the transfer does not, so that a link whose rate nobody knows gets floating
values as they are.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import torch
import zstandard
from torch import Tensor

from lightning_hiertrain.transport.tables import Tables, find_tables, look_up

_FEWEST_BYTES = 256
"""Less travels as it is."""
_FASTEST_LINK = 2e9
_FASTEST_LINK_TO_SQUEEZE = 2e8
"""Bytes per second beyond which packing is not even tried."""
_BOTH_ENDS = 2.0
_SAMPLE_BYTES = 128 << 10
_MEASURE_EVERY = 64
_FEWEST, _KEPT = 3, 7
"""Measurements of which the median is taken."""
_LONGEST_PAUSE = 1024
"""Batches after which tables are looked for again where there were none."""
_SMALLER = {
    torch.int64: (torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32),
    torch.int32: (torch.uint8, torch.int8, torch.uint16, torch.int16),
    torch.int16: (torch.uint8, torch.int8),
}
_MAX_BYTES = 1 << 36


class Packer:
    """Packs tensors for other tiers, and learns on the way what pays."""

    def __init__(self) -> None:
        self._streams: dict[Hashable, _Stream] = {}

    def pack(self, tensor: Tensor, stream: Hashable, bytes_per_second: float | None) -> Any:
        """Packs a tensor.

        Args:
            tensor: Any dense tensor.
            stream: Names tensors of the same nature, such as a place in the batch.
            bytes_per_second: What the link carries, `None` if that is not known.

        Returns:
            What `unpack` takes: the tensor itself or what can travel in its place.
        """
        if not _is_plain(tensor):
            return tensor
        content = tensor = tensor.detach().cpu()
        if tensor.dtype in _SMALLER:
            content = _narrowed(tensor)
        packed: dict[str, Any] = {}
        if bytes_per_second is not None and bytes_per_second < _FASTEST_LINK:
            key = (stream, tensor.dtype, tensor.dim())
            known = self._streams.setdefault(key, _Stream())
            if tensor.is_floating_point():
                content, packed = known.indexed(tensor, bytes_per_second)
            squeezed = known.squeezed(content, bytes_per_second)
            if squeezed is not None:
                how, body = squeezed
                packed.update(squeezed=how, form=content.dtype, shape=tuple(content.shape))
                return {"content": body, "dtype": tensor.dtype, **packed}
        return (
            tensor if content is tensor else {"content": content, "dtype": tensor.dtype, **packed}
        )


def unpack(packed: Any) -> Tensor:
    """Unpacks what `Packer.pack` made.

    Raises:
        ValueError: If it is not what that makes.
    """
    if isinstance(packed, Tensor):
        return packed
    try:
        content = packed["content"]
        if "squeezed" in packed:
            content = _expanded(content, packed["squeezed"], packed["form"], packed["shape"])
        if "table" in packed:
            return look_up(content, packed["table"], packed["dim"])
        result: Tensor = content.to(packed["dtype"])
        return result
    except (KeyError, TypeError, AttributeError, RuntimeError, zstandard.ZstdError) as error:
        raise ValueError(f"a packed tensor cannot be unpacked: {error!r}") from error


def content_bytes(packed: Any) -> int:
    """Returns how many bytes of values `Packer.pack` made of a tensor."""
    if isinstance(packed, Tensor):
        return packed.nbytes
    content = packed["content"]
    table = packed["table"].nbytes if "table" in packed else 0
    return table + (content.nbytes if isinstance(content, Tensor) else len(content))


@dataclass(kw_only=True)
class _Figures:
    """What a way of packing saves and costs."""

    ratio: float = 1.0
    measured: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    """Seconds per byte; single ones are often disturbed."""

    def note(self, ratio: float, seconds_per_byte: float) -> None:
        self.ratio = ratio
        self.measured.append(seconds_per_byte)

    def squeeze(self, name: str, content: Tensor) -> bytes:
        """Squeezes a tensor and notes how it went."""
        start = perf_counter()
        body = _SQUEEZERS[name](content)
        self.note(len(body) / content.nbytes, (perf_counter() - start) / content.nbytes)
        return body

    @property
    def known(self) -> bool:
        return len(self.measured) >= _FEWEST

    def gain(self, num_bytes: int, bytes_per_second: float) -> float:
        """Seconds by which the content is earlier on the other end."""
        both_ends = _BOTH_ENDS * median(self.measured)
        return num_bytes * ((1 - self.ratio) / bytes_per_second - both_ends)


@dataclass(kw_only=True)
class _Stream:
    """What is known of the tensors at one place of the batch."""

    tables: Tables | None = None
    table_figures: _Figures = field(default_factory=_Figures)
    declined: int = 0
    """Batches for which tables would not have paid."""
    pause: int = 0
    """Batches until tables are looked for again."""
    failures: int = 0
    squeezers: dict[str, _Figures] = field(default_factory=dict)
    age: int = 0

    def indexed(self, tensor: Tensor, rate: float) -> tuple[Tensor, dict[str, Any]]:
        """Returns indices and their tables, or the tensor itself if that does not pay."""
        as_it_is: tuple[Tensor, dict[str, Any]] = (tensor, {})
        if tensor.element_size() == 1 or tensor.nbytes < _FEWEST_BYTES or not tensor.dim():
            return as_it_is
        figures = self.table_figures
        if figures.known and figures.gain(tensor.nbytes, rate) <= 0:
            self.declined += 1
            if self.declined % _MEASURE_EVERY:
                return as_it_is
        if self.pause:
            self.pause -= 1
            return as_it_is
        indices = self._index(tensor)
        if indices is None:
            self.tables = None
            self.pause = min(2**self.failures, _LONGEST_PAUSE)
            self.failures += 1
            return as_it_is
        assert self.tables is not None
        table = self.tables.tensor(tensor.dtype)
        if indices.nbytes + table.nbytes > 0.9 * tensor.nbytes:
            return as_it_is
        return indices, {"table": table, "dim": self.tables.dim}

    def _index(self, tensor: Tensor) -> Tensor | None:
        indices = None
        if self.tables is not None and _channels(tensor, self.tables) == self.tables.num_channels:
            indices = self._timed(self.tables, tensor)
        if indices is None:
            for tables in find_tables(tensor):
                indices = self._timed(tables, tensor)
                if indices is not None:
                    self.tables, self.failures = tables, 0
                    break
        return indices

    def _timed(self, tables: Tables, tensor: Tensor) -> Tensor | None:
        """Indexes a tensor; the time counts where nothing had to be learnt."""
        while True:
            before, start = tables.num_values, perf_counter()
            indices = tables.index(tensor)
            seconds = (perf_counter() - start) / tensor.nbytes
            if indices is None:
                return None
            if tables.num_values == before:
                self.table_figures.note(1 / tensor.element_size(), seconds)
            if self.table_figures.known:
                return indices

    def squeezed(self, content: Tensor, rate: float) -> tuple[str, bytes] | None:
        """Returns which squeezer pays most and what it makes, `None` if none does."""
        if content.nbytes < _FEWEST_BYTES or rate > _FASTEST_LINK_TO_SQUEEZE:
            return None
        if self.age % _MEASURE_EVERY == 0:
            self._measure_squeezers(content)
        self.age += 1
        best = max(self.squeezers, key=lambda name: self.squeezers[name].gain(1, rate))
        figures = self.squeezers[best]
        if figures.gain(content.nbytes, rate) <= 0:
            return None
        body = figures.squeeze(best, content)
        return (best, body) if len(body) < content.nbytes else None

    def _measure_squeezers(self, content: Tensor) -> None:
        sample = content.reshape(-1)[: _SAMPLE_BYTES // content.element_size()]
        self.squeezers.clear()
        for name in ("zstd",) if content.element_size() == 1 else ("zstd", "sorted zstd"):
            figures = self.squeezers[name] = _Figures()
            while not figures.known:
                figures.squeeze(name, sample)


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_complex()
        and not tensor.is_neg()
        and tensor.device.type != "meta"
    )


def _channels(tensor: Tensor, tables: Tables) -> int:
    if tables.dim is None:
        return 1
    return tensor.size(tables.dim) if tables.dim < tensor.dim() else 0


def _narrowed(tensor: Tensor) -> Tensor:
    """Returns whole numbers in the smallest type that holds them."""
    if tensor.nbytes < _FEWEST_BYTES:
        return tensor
    low, high = (int(bound) for bound in torch.aminmax(tensor))
    for dtype in _SMALLER[tensor.dtype]:
        limits = torch.iinfo(dtype)
        if limits.min <= low and high <= limits.max:
            return tensor.to(dtype)
    return tensor


def _bytes(content: Tensor) -> Tensor:
    return content.contiguous().reshape(-1).view(torch.uint8)


def _zstd(content: Tensor) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(_bytes(content).numpy().data)


def _sorted_zstd(content: Tensor) -> bytes:
    """Compresses the first bytes of all values, then the second ones, and so on."""
    return _zstd(_bytes(content).view(-1, content.element_size()).t())


_SQUEEZERS: dict[str, Callable[[Tensor], bytes]] = {"zstd": _zstd, "sorted zstd": _sorted_zstd}


def _expanded(content: bytes, how: str, form: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    count = math.prod(shape)
    num_bytes = count * form.itemsize
    if num_bytes > _MAX_BYTES or min(shape, default=0) < 0:
        raise ValueError(f"a packed tensor claims the shape {shape}")
    if how not in _SQUEEZERS or zstandard.frame_content_size(content) != num_bytes:
        raise ValueError(f"a packed tensor of {num_bytes} bytes holds others (packed by {how!r})")
    raw = torch.frombuffer(
        bytearray(zstandard.ZstdDecompressor().decompress(content)), dtype=torch.uint8
    )
    if how == "sorted zstd":
        raw = raw.view(form.itemsize, count).t().contiguous().reshape(-1)
    return raw.view(form).view(shape)
