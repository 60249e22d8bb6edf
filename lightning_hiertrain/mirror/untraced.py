"""Running a step of the user's module a second time so that nobody can tell."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch import LightningModule
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_hiertrain.mirror.attributes import Attributes
from lightning_hiertrain.mirror.quiet import without_logs


@contextmanager
def without_trace(module: LightningModule, attributes: Attributes) -> Iterator[None]:
    """A context in which a module's code changes no attribute and logs nothing.

    Args:
        module: The module.
        attributes: Watches it.
    """
    trainer, before = module._trainer, attributes.snapshot()
    loggers = [] if trainer is None else trainer._loggers
    if trainer is not None:
        trainer._loggers = [DummyLogger() for _ in loggers]
    try:
        with without_logs(module):
            yield
    finally:
        if trainer is not None:
            trainer._loggers = loggers
        attributes.restore(before)
