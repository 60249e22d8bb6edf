"""Link codecs: how activations and their gradients are packed on the way between two tiers.

| name | what travels |
|---|---|
| `none` | the tensor as it is |
| `fp16`, `bf16` | half precision |
| `int8` | min-max quantisation of the tensor to 8 bits |
| `int8+zstd` | the same, compressed by zstd at level 1 |
| `minmaxN`, N = 2..8 | min-max quantisation to N bits, Huffman-coded, as JALAD has it |

A tensor with a value that is not finite travels as it is: it must end training as it would on one
machine.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import torch
import zstandard
from torch import Tensor

_chance = torch.Generator()
# Its own, so that packing takes no random number from the user's code.

_HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_MAX_ELEMENTS = 1 << 33


def check_codec(codec: str) -> None:
    """Refuses a codec that there is not.

    Raises:
        ValueError: If the name is unknown.
    """
    if codec != "none" and codec not in _HALVES:
        _bits(codec)


def gradient_codec(codec: str) -> str:
    """Returns how gradients are packed on a link whose activations are packed by a codec.

    Gradients bear less than activations: most are small beside the largest, and below 8 bits chance
    outweighs them. So `minmaxN` packs them to 8 bits.
    """
    return "minmax8" if codec.startswith("minmax") else codec


def encode(tensor: Tensor, codec: str, *, stochastic: bool = False) -> Any:
    """Packs a tensor.

    Args:
        tensor: Floating values of any shape.
        codec: The codec's name.
        stochastic: Whether quantisation rounds up or down by chance, so that the mean is right; for
            gradients.

    Returns:
        What `decode` takes; it can travel.

    Raises:
        ValueError: If the codec is unknown.
    """
    tensor = tensor.detach()
    if codec == "none" or not tensor.is_floating_point() or not tensor.numel():
        return tensor
    if codec in _HALVES:
        return {"half": tensor.to(_HALVES[codec]), "dtype": tensor.dtype}
    levels = (1 << _bits(codec)) - 1
    low, high = (float(bound) for bound in torch.aminmax(tensor))
    if not math.isfinite(low) or not math.isfinite(high):
        return tensor
    scale = (high - low) / levels or 1.0
    steps = tensor.to(torch.float32).sub(low).div_(scale)
    if stochastic:
        steps = steps.add_(torch.rand(steps.shape, generator=_chance).to(steps.device)).floor_()
    else:
        steps = steps.round_()
    indices = steps.clamp_(0, levels).to(torch.uint8).cpu().contiguous()
    return {
        "codec": codec,
        "low": low,
        "scale": scale,
        "dtype": tensor.dtype,
        "shape": tuple(tensor.shape),
        "indices": _squeeze(indices, codec),
    }


def decode(packed: Any) -> Tensor:
    """Unpacks what `encode` made.

    Raises:
        ValueError: If it is not what `encode` makes.
    """
    if isinstance(packed, Tensor):
        return packed
    try:
        if "half" in packed:
            half: Tensor = packed["half"]
            return half.to(packed["dtype"])
        shape = tuple(int(size) for size in packed["shape"])
        indices = _expand(packed["indices"], packed["codec"], math.prod(shape)).view(shape)
        values = indices.to(torch.float32).mul_(packed["scale"]).add_(packed["low"])
        return values.to(packed["dtype"])
    except (KeyError, TypeError, RuntimeError, zlib.error, zstandard.ZstdError) as error:
        raise ValueError(f"a packed tensor cannot be unpacked: {error}") from error


def _bits(codec: str) -> int:
    if codec in ("int8", "int8+zstd"):
        return 8
    bits = codec.removeprefix("minmax")
    if bits != codec and bits.isdigit() and 2 <= int(bits) <= 8:
        return int(bits)
    raise ValueError(
        f"the codec {codec!r} is unknown; choose none, fp16, bf16, int8, int8+zstd or minmax2..8"
    )


def _squeeze(indices: Tensor, codec: str) -> Tensor | bytes:
    if codec == "int8":
        return indices
    content = indices.numpy().data
    if codec == "int8+zstd":
        return zstandard.ZstdCompressor(level=1).compress(content)
    packer = zlib.compressobj(level=1, strategy=zlib.Z_HUFFMAN_ONLY)
    return packer.compress(content) + packer.flush()


def _expand(content: Tensor | bytes, codec: str, count: int) -> Tensor:
    if isinstance(content, Tensor):
        return content
    if count > _MAX_ELEMENTS:
        raise ValueError(f"a packed tensor claims {count} elements")
    if codec == "int8+zstd":
        raw = zstandard.ZstdDecompressor().decompress(content, max_output_size=count)
    else:
        raw = zlib.decompressobj().decompress(content, count + 1)
    if len(raw) != count:
        raise ValueError(f"a packed tensor holds {len(raw)} elements in place of {count}")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
