"""Why a step has no cut at all, in terms of the user's own lines."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_hiertrain.partition.chain import Kind, LayerChain, RowShape
from lightning_hiertrain.partition.recording import RecordedCall, Recording


def obstacle(
    recording: Recording,
    shapes: Sequence[tuple[RowShape | None, ...]],
    last_use: Sequence[int],
    refuted: LayerChain,
) -> str:
    """Says what stands against the first cut that there could have been.

    Args:
        recording: What the step did.
        shapes: The shapes of each call's outputs; `None` for one in which no samples lie.
        last_use: For each call, the last call that reads its result.
        refuted: The chain whose cuts were found and did not hold when tried with numbers.

    Returns:
        A sentence without its full stop.
    """
    calls = recording.calls
    if refuted.layers:
        first = calls[refuted.layers[0].last_call]
        lengths = ", ".join(f"`len` ({place})" for place in dict.fromkeys(recording.lengths))
        return (
            f"{first.named} might have ended the first layer, but with the samples divided there "
            "the step gave another result than with all of them together: something counts "
            "samples too early, mixes them or is drawn for all of them at once"
            f"{f'; look at {lengths}' if lengths else ''}"
        )
    main = [i for i, call in enumerate(calls) if call.kind is Kind.MAIN]
    if not main:
        return "the step passes the batch through no parameter"
    index = next((i for i in main if _carries_samples(calls[i], shapes[i])), None)
    if index is None:
        return (
            f"{calls[main[0]].named} returns no floating-point tensor with the rows of each "
            "sample apart from the others'"
        )
    kept = next((i for i in range(index) if _is_carried(i, calls, shapes, last_use, index)), index)
    if kept != index:
        return (
            f"while {calls[index].named} runs, the result of {calls[kept].named} waits to be "
            f"{_use(recording, kept, last_use[kept])}"
        )
    return f"the result of {calls[index].named} is {_use(recording, index, last_use[index])}"


def _carries_samples(call: RecordedCall, shapes: tuple[RowShape | None, ...]) -> bool:
    return call.single and call.outputs[0].is_floating_point() and shapes[0] is not None


def _is_carried(
    index: int,
    calls: Sequence[RecordedCall],
    shapes: Sequence[tuple[RowShape | None, ...]],
    last_use: Sequence[int],
    past: int,
) -> bool:
    """Tells whether a result that depends on samples or chance is used after a later call."""
    call = calls[index]
    shared = call.kind is Kind.CONSTANT and (
        call.chance or any(shape is not None for shape in shapes[index])
    )
    return (call.kind is Kind.MAIN or shared) and last_use[index] > past


def _use(recording: Recording, index: int, user: int) -> str:
    if index in recording.escaped:
        place = recording.escape_places.get(index)
        if place:
            return f"read by Python ({place})"
        return "returned by the step or kept by the module"
    if user < 0:
        return "used by nothing"
    return f"used by {recording.calls[user].named}"
