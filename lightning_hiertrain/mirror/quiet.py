"""A user's step that another tier ends: here it leaves no log and no count behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_PLAIN = (bool, int, float, str, type(None))


def quietly(module: nn.Module, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a step of a module that logs nothing and leaves its plain attributes as they are.

    A prefix worker runs the beginning of a step, several times if it goes by chunks. What the owner
    logged and counted in the whole of it comes later, once.

    Args:
        module: A LightningModule.
        step: Its step, called with a batch.
    """

    def run(batch: Any) -> Any:
        kept = [(vars(child), _plain(vars(child))) for child in module.modules()]
        try:
            with without_logs(module):
                return step(batch)
        finally:
            for attributes, before in kept:
                attributes.update(before)

    return run


@contextmanager
def without_logs(module: nn.Module) -> Iterator[None]:
    """A context in which `self.log` of a LightningModule does nothing."""
    values = vars(module)
    before = values.get("log")
    values["log"] = _log_nothing
    try:
        yield
    finally:
        del values["log"]
        if before is not None:
            values["log"] = before


def _plain(attributes: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in attributes.items() if isinstance(value, _PLAIN)}


def _log_nothing(*_: Any, **__: Any) -> None:
    """Takes the place of `self.log`."""
