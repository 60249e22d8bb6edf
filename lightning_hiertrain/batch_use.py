"""Which hooks read the mini-batch itself, where the tier that runs them need not have it."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterable
from types import CodeType
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities.model_helpers import is_overridden

_LIBRARIES = ("lightning", "pytorch_lightning", "lightning_hiertrain")
TRAINING_HOOKS = ("on_train_batch_start", "on_train_batch_end")
EVALUATION_HOOKS = (
    *(f"on_{x}_batch_{y}" for x in ("validation", "test", "predict") for y in ("start", "end")),
    "write_on_batch_end",
)


def reading_batches(
    callbacks: Iterable[Callback], hooks: Iterable[str], *, but_rank_zero: bool
) -> list[str]:
    """Returns the names of the user's callbacks whose code reads its argument `batch`.

    Args:
        callbacks: The Trainer's callbacks.
        hooks: The hooks to look at.
        but_rank_zero: Whether those under `rank_zero_only` do not count, because rank 0 has the
            samples.
    """
    own = [x for x in callbacks if type(x).__module__.partition(".")[0] not in _LIBRARIES]
    return [
        type(callback).__name__
        for callback in own
        if any(
            _reads(callback, name, base, but_rank_zero=but_rank_zero)
            for name in hooks
            for base in (Callback, BasePredictionWriter)
            if isinstance(callback, base) and hasattr(base, name)
        )
    ]


def module_reads_batches(module: LightningModule) -> bool:
    """Whether a hook of the module around training steps reads its argument `batch`."""
    return any(_reads(module, name, LightningModule) for name in TRAINING_HOOKS)


def _reads(hooked: Any, name: str, base: type, *, but_rank_zero: bool = False) -> bool:
    if not is_overridden(name, hooked, base):
        return False
    hook = getattr(hooked, name)
    inner = inspect.unwrap(hook)
    code = getattr(getattr(inner, "__func__", inner), "__code__", None)
    outer = getattr(getattr(hook, "__func__", hook), "__code__", None)
    if code is None or (but_rank_zero and _is_rank_zero_only(outer)):
        return False
    position = list(inspect.signature(getattr(base, name)).parameters).index("batch")
    if "self" not in code.co_varnames[:1]:
        position -= 1
    names = code.co_varnames[: code.co_argcount]
    return position < len(names) and _loads(code, names[position])


def _is_rank_zero_only(code: CodeType | None) -> bool:
    return code is not None and code.co_filename.endswith("rank_zero.py")


def _loads(code: CodeType, name: str) -> bool:
    for step in dis.get_instructions(code):
        named = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        if name in named and step.opname.startswith("LOAD"):
            return True
    return False
