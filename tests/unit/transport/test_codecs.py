"""What the link codecs keep of a tensor."""

from __future__ import annotations

import pytest
import torch

from lightning_hiertrain.transport.codecs import decode, encode, gradient_codec

CODECS = ("none", "fp16", "bf16", "int8", "int8+zstd", *(f"minmax{n}" for n in range(2, 9)))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shape", [(), (0, 4), (5,), (8, 6, 14, 14)])
def test_shape_and_type_come_back(codec: str, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    restored = decode(encode(tensor, codec))
    assert restored.shape == tensor.shape
    assert restored.dtype == tensor.dtype


@pytest.mark.parametrize(
    ("codec", "steps"), [("int8", 255), ("int8+zstd", 255), ("minmax8", 255), ("minmax4", 15)]
)
def test_quantisation_is_off_by_half_a_step_at_most(codec: str, steps: int) -> None:
    tensor = torch.randn(4, 33)
    half = float(tensor.max() - tensor.min()) / steps / 2
    assert float((decode(encode(tensor, codec)) - tensor).abs().max()) <= half * 1.001


def test_stochastic_rounding_is_right_in_the_mean() -> None:
    torch.manual_seed(0)
    tensor = torch.tensor([0.0, 0.3, 1.0, 255.0])
    mean = torch.stack([decode(encode(tensor, "int8", stochastic=True)) for _ in range(4000)]).mean(
        0
    )
    torch.testing.assert_close(mean, tensor, atol=0.03, rtol=0)


@pytest.mark.parametrize("codec", CODECS)
def test_values_that_are_not_finite_survive(codec: str) -> None:
    tensor = torch.tensor([1.0, float("nan"), float("inf"), -2.0])
    torch.testing.assert_close(decode(encode(tensor, codec)), tensor, equal_nan=True)


def test_equal_values_survive() -> None:
    tensor = torch.full((3, 3), 1.5)
    assert torch.equal(decode(encode(tensor, "int8")), tensor)


def test_few_bits_are_entropy_coded() -> None:
    tensor = torch.relu(torch.randn(64, 64))
    packed = encode(tensor, "minmax4")
    assert len(packed["indices"]) < tensor.numel() * 4 / 8


def test_an_unknown_codec_is_named() -> None:
    with pytest.raises(ValueError, match="'int9' is unknown"):
        encode(torch.ones(2), "int9")


@pytest.mark.parametrize("codec", CODECS)
def test_gradients_keep_eight_bits_at_least(codec: str) -> None:
    gradients = torch.randn(4, 33)
    step = float(gradients.max() - gradients.min()) / 255
    restored = decode(encode(gradients, gradient_codec(codec), stochastic=True))
    assert float((restored - gradients).abs().max()) <= step * 1.001


@pytest.mark.parametrize("codec", ["int8+zstd", "minmax4"])
def test_a_wrong_size_is_refused(codec: str) -> None:
    packed = encode(torch.randn(100), codec)
    with pytest.raises(ValueError, match="packed tensor"):
        decode({**packed, "shape": (99,)})
    with pytest.raises(ValueError, match="packed tensor"):
        decode({**packed, "shape": (1 << 40,)})
    with pytest.raises(ValueError, match="packed tensor"):
        decode({**packed, "indices": packed["indices"][:5]})
