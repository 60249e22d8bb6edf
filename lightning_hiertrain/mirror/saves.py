"""Checkpoints that the user's code asks for by itself where other tiers do not run it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer


@contextmanager
def saves_noted(trainer: Trainer) -> Iterator[list[Any]]:
    """Notes the checkpoints that code which runs on one tier alone asks for.

    All tiers must take part in saving one: do so with `save_all`, soon.
    """
    noted: list[Any] = []

    def note(filepath: Any, weights_only: bool | None = None, storage_options: Any = None) -> None:
        noted.append((str(filepath), weights_only))

    values = vars(trainer)
    before = values.get("save_checkpoint")
    values["save_checkpoint"] = note
    try:
        yield noted
    finally:
        del values["save_checkpoint"]
        if before is not None:
            values["save_checkpoint"] = before


def save_all(trainer: Trainer, noted: Iterable[Any]) -> None:
    """Saves the checkpoints that were noted on one tier; all tiers call this together."""
    for filepath, weights_only in noted:
        trainer.save_checkpoint(filepath, weights_only)
