"""Callbacks that may ask the Trainer for something on one tier and not on another.

A callback runs on every tier. One that looks at the clock, or that acts on rank 0 alone, would stop
one tier's loop, or save a checkpoint there, and leave the others waiting.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator
from types import CodeType
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_hiertrain.mirror.saves import save_all, saves_noted

_STOP = "should_stop"
_LIBRARIES = ("lightning", "pytorch_lightning", "lightning_hiertrain")
_HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_train_"))
_HOOKS += tuple(name for name in vars(Callback) if name.startswith("on_validation_"))


class Agreement:
    """Makes all tiers stop, or save a checkpoint, if one of them has been asked to.

    Args:
        all_gather: Returns every tier's value on all tiers.
    """

    def __init__(self, all_gather: Callable[[Any], list[Any]]) -> None:
        self._all_gather = all_gather
        self._wrapped: list[tuple[Callback, str, Any]] = []

    def attach(self, trainer: Trainer) -> None:
        """Lets the tiers agree after each hook of a callback whose code speaks of such things."""
        self.detach()
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        for callback in filter(_may_differ, callbacks):
            for name in _HOOKS:
                if is_overridden(name, callback, Callback):
                    self._wrapped.append((callback, name, vars(callback).get(name)))
                    setattr(callback, name, self._agreeing(getattr(callback, name)))

    def detach(self) -> None:
        """Takes back every change to the callbacks."""
        for callback, name, own in reversed(self._wrapped):
            vars(callback).pop(name)
            if own is not None:
                setattr(callback, name, own)
        self._wrapped.clear()

    def _agreeing(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def agreeing(trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
            with saves_noted(trainer) as saves:
                result = hook(trainer, *args, **kwargs)
            stops, asked = zip(*self._all_gather((trainer.should_stop, saves)), strict=True)
            trainer.should_stop = any(stops)
            save_all(trainer, next(filter(None, asked), []))
            return result

        return agreeing


def _may_differ(callback: Callback) -> bool:
    return mentions(callback, {_STOP}) or (
        mentions(callback, {"save_checkpoint"}) and _looks_at_ranks(callback)
    )


def _looks_at_ranks(callback: Callback) -> bool:
    is_decorated = any(hasattr(value, "__wrapped__") for value in vars(type(callback)).values())
    return is_decorated or mentions(callback, {"is_global_zero", "global_rank", "local_rank"})


def mentions(callback: Callback, names: Collection[str]) -> bool:
    """Tells whether the code of a callback of the user's own speaks of one of these names."""
    own = [c for c in type(callback).__mro__ if c.__module__.partition(".")[0] not in _LIBRARIES]
    values = [value for cls in own for value in vars(cls).values()] + list(vars(callback).values())
    wanted = frozenset(names)
    return any(wanted & _names(code) for value in values for code in _codes(value))


def _codes(value: Any) -> Iterator[CodeType]:
    value = getattr(value, "__func__", value)
    if inspect.isfunction(value):
        yield inspect.unwrap(value).__code__


def _names(code: CodeType) -> set[str]:
    inner = [_names(x) for x in code.co_consts if isinstance(x, CodeType)]
    return {*code.co_names, *(x for x in code.co_consts if isinstance(x, str))}.union(*inner)
