"""Tensors of batches come out of the links bit for bit, whatever way they were packed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_hiertrain.transport import packed_bytes
from lightning_hiertrain.transport.lossless import Packer, unpack
from lightning_hiertrain.transport.packing import pack as to_skeleton
from lightning_hiertrain.transport.packing import unpack as from_skeleton
from lightning_hiertrain.transport.tables import MAX_VALUES

SLOW = 1e5
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SPECIAL = (float("nan"), float("inf"), -float("inf"), -0.0, 0.0)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def check(tensor: Tensor, packer: Packer, rate: float | None = SLOW) -> Any:
    """Packs, carries and unpacks a tensor, and returns what travelled."""
    packed = packer.pack(tensor, "stream", rate)
    restored = unpack(from_skeleton(*to_skeleton(packed)))
    assert restored.dtype == tensor.dtype
    assert restored.shape == tensor.shape
    assert torch.equal(bits(restored), bits(tensor))
    return packed


def ways(packed: Any) -> set[str]:
    """Returns what was done to a tensor; nothing for one that travels as it is."""
    return set() if isinstance(packed, Tensor) else {"table", "squeezed"} & set(packed)


def pixels(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def normalised(raw: Tensor, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    shape = [1] * raw.dim()
    shape[dim] = 3
    mean = torch.tensor([0.4914, 0.4822, 0.4465]).view(shape).to(dtype)
    return (raw.to(dtype) / 255 - mean) / torch.tensor([0.247, 0.2435, 0.2616]).view(shape).to(
        dtype
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "channels_last", "grey", "video"])
def test_eight_bit_pixels_take_a_byte_each(layout: str, dtype: torch.dtype) -> None:
    shape, dim = {
        "NCHW": ((32, 3, 24, 24), 1),
        "NHWC": ((32, 24, 24, 3), 3),
        "channels_last": ((32, 3, 24, 24), 1),
        "grey": ((32, 1, 28, 28), 1),
        "video": ((4, 5, 3, 24, 24), 2),
    }[layout]
    packer = Packer()
    for seed in range(3):
        images = pixels(shape, seed).to(dtype) / 255
        if layout != "grey":
            images = normalised(pixels(shape, seed), dim, dtype)
        if layout == "channels_last":
            images = images.to(memory_format=torch.channels_last)
        packed = check(images, packer)
        assert packed["content"].dtype == torch.uint8
        assert packed_bytes(packed) < images.nbytes / dtype.itemsize + 7000


def test_tables_grow_with_what_is_met() -> None:
    packer = Packer()
    for highest in (3, 40, 255):
        images = normalised(pixels((16, 3, 16, 16)).clamp(max=highest), 1)
        assert "table" in ways(check(images, packer))


def test_an_image_that_does_not_fit_travels_otherwise() -> None:
    packer = Packer()
    assert "table" in ways(check(normalised(pixels((16, 3, 16, 16)), 1), packer))
    noise = torch.randn(16, 3, 16, 16)
    assert "table" not in ways(check(noise, packer))
    assert "table" in ways(check(normalised(pixels((16, 3, 16, 16)), 1), Packer()))


def test_tables_are_found_again_after_other_images() -> None:
    packer = Packer()
    check(torch.randn(16, 3, 16, 16), packer)
    packed = [check(normalised(pixels((16, 3, 16, 16), i), 1), packer) for i in range(4)]
    assert "table" in ways(packed[-1])


def test_one_value_too_many_is_refused_by_the_table() -> None:
    values = torch.arange(MAX_VALUES + 1, dtype=torch.float32).repeat(8)
    assert "table" in ways(check(values[values < MAX_VALUES], Packer()))
    assert "table" not in ways(check(values, Packer()))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_floating_values_keep_every_bit(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(FLOATS))
    shape = tuple(data.draw(st.lists(st.integers(0, 9), min_size=0, max_size=5)))
    levels = data.draw(st.integers(1, 400))
    seed = data.draw(st.integers(0, 99))
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(levels, generator=generator, dtype=torch.float64)
    special = data.draw(st.lists(st.sampled_from(SPECIAL), max_size=5))
    table[: len(special)] = torch.tensor(special, dtype=torch.float64)[:levels]
    tensor = table.to(dtype)[torch.randint(levels, shape, generator=generator)]
    if tensor.dim() > 1 and data.draw(st.booleans()):
        tensor = tensor.transpose(0, -1)
    if tensor.dim() and tensor.size(0) > 2 and data.draw(st.booleans()):
        tensor = tensor[::2]
    packer = Packer()
    for _ in range(2):
        check(tensor, packer, data.draw(st.sampled_from([None, 1e3, 1e6, 1e8, 1e10])))


@settings(max_examples=100, deadline=None)
@given(
    scale=st.floats(1e-3, 1e3),
    shift=st.floats(-1e3, 1e3),
    dtype=st.sampled_from(FLOATS),
    constant=st.booleans(),
    dim=st.sampled_from([1, 3]),
    seed=st.integers(0, 99),
)
def test_any_normalisation_comes_back(
    scale: float, shift: float, dtype: torch.dtype, constant: bool, dim: int, seed: int
) -> None:
    raw = pixels((6, 3, 5, 3), seed)
    if constant:
        raw.select(dim, 0).fill_(17)
    factors = torch.tensor([scale, 2 * scale, -scale], dtype=torch.float64)
    shape = [1] * 4
    shape[dim] = 3
    images = (raw.double() * factors.view(shape) + shift).to(dtype)
    packer = Packer()
    check(images, packer)
    check(images.flip(0), packer)


def test_payloads_of_nan_survive() -> None:
    tensor = torch.tensor([0x7FC00001, -0x3FFFFF, 0x7F800001], dtype=torch.int32)
    assert "table" in ways(check(tensor.view(torch.float32).repeat(200, 3), Packer()))


@settings(max_examples=100, deadline=None)
@given(
    dtype=st.sampled_from([torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool]),
    low=st.integers(-(2**40), 2**40),
    span=st.integers(0, 2**33),
    rate=st.sampled_from([None, 1e3, 1e9]),
)
def test_whole_numbers_come_back(
    dtype: torch.dtype, low: int, span: int, rate: float | None
) -> None:
    values = torch.linspace(low, low + span, 300, dtype=torch.float64).to(torch.int64)
    check(values.to(dtype), Packer(), rate)


@pytest.mark.parametrize(
    ("values", "itemsize"),
    [((0, 255), 1), ((-128, 127), 1), ((0, 65535), 2), ((-1, 300), 2), ((0, 70000), 4)],
)
def test_labels_and_tokens_take_the_smallest_type(values: tuple[int, int], itemsize: int) -> None:
    labels = torch.tensor(values * 100)
    for rate in (None, 1e9):
        packed = check(labels, Packer(), rate)
        assert packed["content"].dtype.itemsize == itemsize


def test_numbers_that_need_their_type_travel_as_they_are() -> None:
    labels = torch.tensor([2**40, -(2**40)] * 100)
    assert isinstance(check(labels, Packer(), None), Tensor)


def test_a_fast_or_unknown_link_gets_images_as_they_are() -> None:
    images = normalised(pixels((16, 3, 16, 16)), 1)
    for rate in (None, 5e9):
        assert not ways(check(images, Packer(), rate))


def test_a_link_as_fast_as_packing_gets_images_as_they_are() -> None:
    images = normalised(pixels((16, 3, 16, 16)), 1)
    packer = Packer()
    assert "table" in ways(check(images, packer, 1e5))
    assert not ways(check(images, packer, 1.9e9))


def test_sparse_values_are_squeezed_on_a_slow_link_alone() -> None:
    sparse = torch.randn(64, 256).relu_() * (torch.rand(64, 256) > 0.9)
    packer = Packer()
    packed = check(sparse, packer, 1e5)
    assert packed_bytes(packed) < sparse.nbytes / 2
    assert not ways(check(sparse, packer, 1e9))


@pytest.mark.parametrize(
    "damage",
    [
        {"shape": (7,)},
        {"shape": (1 << 50,)},
        {"squeezed": "zip"},
        {"content": b"nonsense"},
        {"content": None},
        {"form": "float32"},
    ],
)
def test_what_no_packer_makes_is_refused(damage: dict[str, Any]) -> None:
    packed = Packer().pack(torch.zeros(64, 64).index_fill_(0, torch.tensor([3]), 1), "x", 1e3)
    assert packed["squeezed"]
    with pytest.raises(ValueError, match="packed tensor"):
        unpack({**packed, **damage})


def test_a_wrong_table_is_refused() -> None:
    packed = Packer().pack(normalised(pixels((8, 3, 16, 16)), 1), "x", 1e8)
    with pytest.raises(ValueError, match="past its table"):
        unpack({**packed, "table": packed["table"][:, :100]})
    with pytest.raises(ValueError, match="2 tables for 3 channels"):
        unpack({**packed, "table": packed["table"][:2]})
    with pytest.raises(ValueError, match="no dimension 9"):
        unpack({**packed, "dim": 9})
