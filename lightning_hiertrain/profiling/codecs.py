"""Measuring the link codecs on this model: time to pack and unpack, bytes left, accuracy lost.

Every tier packs and unpacks what crosses a few cuts, activations and gradients, and notes the
seconds for each byte. One tier also finds out what a codec does to the training: it trains a copy
of the module on a calibration batch, by a few steps of Adam, until the loss has fallen by half, and
then looks how far the loss moves when the activations at a cut are packed and unpacked on the way
(forward only). The figure is that move in relation to the fall: after half of it, the relative
change of the loss; where there was no time to get so far, a greater one.

Why that stands for accuracy: the loss is what every training step has, whatever the task, and it
reacts before the accuracy does, which moves only when a decision tips over. It is taken after some
training, and in relation to what was learnt, because a fresh model answers the same to everything:
its loss hardly moves even if a cut carries two bits. On LeNet-5 a move of 1 % separates the codecs
that cost accuracy in a whole training from those that do not (docs/compression.md). Gradients need
no figure of their own: they are packed to 8 bits at least and rounded by chance, and so are right
in the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hiertrain.accelerators import synchronise
from lightning_hiertrain.partition import LayerChain, Passage
from lightning_hiertrain.partition.calls import tensors_in
from lightning_hiertrain.partition.isolation import same_chance
from lightning_hiertrain.partition.passage import Tap
from lightning_hiertrain.partition.rows import batch_leaves, num_samples, with_leaves
from lightning_hiertrain.profiles import CodecProfile
from lightning_hiertrain.transport.codecs import decode, encode, gradient_codec
from lightning_hiertrain.transport.wire import packed_bytes

_MOST_CUTS = 4
_MOST_TRAINING_STEPS = 100
_LEARNING_RATE = 1e-3
_FALLEN = 0.5
_LEAST_FALL = 0.01
_FEWEST_REPETITIONS = 3
_MOST_REPETITIONS = 20
_LEAST_LOSS = 1e-12
_DIVERGED = 1e3
"""Stands for a loss that is not finite."""


@dataclass(frozen=True, kw_only=True)
class CodecTimes:
    """What one codec takes on one tier, for each byte before packing."""

    encode_seconds_per_byte: float
    decode_seconds_per_byte: float
    bytes_ratio: float
    """Bytes on the wire for each byte."""


def sampled_cuts(chain: LayerChain) -> tuple[int, ...]:
    """Returns the cuts with the largest outputs, of several with the same size the last."""
    last_of_size = {layer.output_bytes_per_sample: i + 1 for i, layer in enumerate(chain)}
    largest = sorted(last_of_size, reverse=True)[:_MOST_CUTS]
    return tuple(last_of_size[size] for size in largest)


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """What crosses a cut."""

    activations: Tensor
    gradients: Tensor | None
    """On the way back, `None` if none go."""


def crossings(
    chain: LayerChain, step: Callable[[Any], Any], batch: Any, cuts: Sequence[int]
) -> list[Crossing]:
    """Returns what crosses the cuts in one step.

    Args:
        chain: The step's chain.
        step: A step of a copy of the user's module; returns the loss as its first tensor.
        batch: A few rows.
        cuts: How many layers lie in front of each; those where no floating values cross are left
            out.
    """
    outputs: dict[int, Tensor] = {}
    values: dict[int, Tensor] = {}

    def note(cut: int) -> Tap:
        def tap(output: Tensor) -> Tensor:
            outputs[cut], values[cut] = output, output.detach().clone()
            return output

        return tap

    with same_chance():
        loss = _loss(chain, step, batch, {cut: note(cut) for cut in cuts})
        kept = [cut for cut in cuts if values[cut].is_floating_point()]
        learning = [cut for cut in kept if loss.requires_grad and outputs[cut].requires_grad]
        gradients: dict[int, Tensor | None] = {}
        if learning:
            found = torch.autograd.grad(loss, [outputs[c] for c in learning], allow_unused=True)
            gradients = dict(zip(learning, found, strict=True))
    return [Crossing(activations=values[cut], gradients=gradients.get(cut)) for cut in kept]


def time_codecs(
    crossing: Sequence[Crossing], codecs: Sequence[str], *, seconds: float
) -> dict[str, CodecTimes]:
    """Times every codec on this tier, on activations and gradients alike.

    Args:
        crossing: What to pack.
        codecs: Names of the codecs.
        seconds: About how long to measure in all; each codec is tried three times at least.
    """
    share = seconds / max(1, len(codecs) * len(crossing))
    return {codec: _time_codec(crossing, codec, share) for codec in codecs}


def _time_codec(crossing: Sequence[Crossing], codec: str, share: float) -> CodecTimes:
    packing = unpacking = 0.0
    raw = packed = 0
    tensors = [(x.activations, codec, False) for x in crossing]
    tensors += [
        (x.gradients, gradient_codec(codec), True) for x in crossing if x.gradients is not None
    ]
    for tensor, name, is_gradient in tensors:
        tries: list[tuple[float, float]] = []
        deadline = perf_counter() + share / 2
        while len(tries) <= _FEWEST_REPETITIONS or (
            perf_counter() < deadline and len(tries) < _MOST_REPETITIONS
        ):
            start = _now(tensor.device)
            content = encode(tensor, name, stochastic=is_gradient)
            middle = _now(tensor.device)
            decode(content).to(tensor.device)
            tries.append((middle - start, _now(tensor.device) - middle))
        packing += median(seconds for seconds, _ in tries[1:])
        unpacking += median(seconds for _, seconds in tries[1:])
        raw += tensor.nbytes
        packed += packed_bytes(content)
    return CodecTimes(
        encode_seconds_per_byte=packing / max(raw, 1),
        decode_seconds_per_byte=unpacking / max(raw, 1),
        bytes_ratio=packed / raw if raw else 1.0,
    )


def _now(device: torch.device) -> float:
    synchronise(device)
    return perf_counter()


def accuracy_losses(
    chain: LayerChain,
    step: Callable[[Any], Any],
    module: nn.Module,
    batch: Any,
    cuts: Sequence[int],
    codecs: Sequence[str],
    *,
    seconds: float,
) -> dict[str, float]:
    """Returns by how much each codec moves the training loss, relative to its fall; see above.

    Args:
        chain: The step's chain.
        step: A step of a copy of the user's module; returns the loss as its first tensor.
        module: That copy, which is trained a little.
        batch: The calibration batch.
        cuts: Where activations are packed, one cut at a time; the worst one counts. After the first
            cut the time may end the others.
        codecs: Names of the codecs.
        seconds: About how long this may take.
    """
    start = perf_counter()
    with same_chance():
        first, now = _train(chain, step, module, batch, start + seconds / 2)
    scale = max(first - now, _LEAST_FALL * abs(first), _LEAST_LOSS)
    moved = dict.fromkeys(codecs, 0.0)
    for cut in cuts:
        for codec in codecs:
            if cut != cuts[0] and perf_counter() > start + seconds:
                return _with_fewer_bits(moved)

            def tap(output: Tensor, codec: str = codec) -> Tensor:
                return decode(encode(output, codec)).to(output.device)

            with same_chance():
                loss = _loss(chain, step, batch, {cut: tap})
            move = abs(float(loss.detach()) - now) / scale
            moved[codec] = max(moved[codec], move if math.isfinite(move) else _DIVERGED)
    return _with_fewer_bits(moved)


def _with_fewer_bits(moved: Mapping[str, float]) -> dict[str, float]:
    """Lets no `minmaxN` look better than one of more bits: it would be by chance."""
    return {
        codec: max(
            move,
            *(other for name, other in moved.items() if _bits(name) >= _bits(codec) > 0),
            0.0,
        )
        for codec, move in moved.items()
    }


def _bits(codec: str) -> int:
    bits = codec.removeprefix("minmax")
    return int(bits) if bits != codec else 0


def _train(
    chain: LayerChain,
    step: Callable[[Any], Any],
    module: nn.Module,
    batch: Any,
    deadline: float,
) -> tuple[float, float]:
    """Trains until the loss has fallen by half; returns the first loss and the last."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=_LEARNING_RATE) if parameters else None
    first = None
    for done in range(_MOST_TRAINING_STEPS + 1):
        with same_chance():
            loss = _loss(chain, step, batch, {})
        now = float(loss.detach())
        first = now if first is None else first
        ends = now <= _FALLEN * first or perf_counter() > deadline or done == _MOST_TRAINING_STEPS
        if ends or optimizer is None or not loss.requires_grad:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for parameter in parameters:
        parameter.grad = None
    assert first is not None
    return first, now


def _loss(
    chain: LayerChain, step: Callable[[Any], Any], batch: Any, taps: Mapping[int, Tap]
) -> Tensor:
    batch = with_leaves(batch, [leaf.clone() for leaf in batch_leaves(batch)])
    rows = num_samples(batch)
    passage = Passage(chain, batch_leaves(batch), num_rows=rows, taps=taps)
    with torch.enable_grad(), passage:
        result = step(batch)
    passage.check_complete()
    return next(tensors_in(result))


def codec_profiles(
    times: Mapping[str, Mapping[str, CodecTimes]],
    losses: Mapping[str, float],
    calibrator: str,
) -> dict[str, CodecProfile]:
    """Puts what the tiers measured together.

    Args:
        times: By tier, then by codec.
        losses: Accuracy losses by codec.
        calibrator: The tier that measured them, on the calibration batch; its ratios count.
    """
    return {
        codec: CodecProfile(
            bytes_ratio=times[calibrator][codec].bytes_ratio,
            encode_seconds_per_byte={t: x[codec].encode_seconds_per_byte for t, x in times.items()},
            decode_seconds_per_byte={t: x[codec].decode_seconds_per_byte for t, x in times.items()},
            accuracy_loss=loss,
        )
        for codec, loss in losses.items()
    }
