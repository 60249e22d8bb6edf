"""Where logs go, known on every tier: where rank 0 writes them.

Lightning asks rank 0 each time somebody reads `trainer.log_dir`, and so waits in vain where one
tier alone reads it. Here all tiers hear of it once, at the start of a run.
"""

from __future__ import annotations

from types import FrameType

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_hiertrain.transport.collectives import Collectives

_NUMBERED = (CSVLogger, TensorBoardLogger)
"""Loggers that number their runs by the folders that are there."""
_ASKING = Trainer.log_dir.fget.__code__  # type: ignore[attr-defined]


def share_log_folder(trainer: Trainer, collectives: Collectives, rank_zero: str) -> str | None:
    """Returns rank 0's `trainer.log_dir` and numbers this tier's loggers as there.

    Args:
        trainer: The run's trainer.
        collectives: For telling all tiers, which call this together.
        rank_zero: The tier that writes.
    """
    numbered = [logger for logger in trainer.loggers if isinstance(logger, _NUMBERED)]
    versions = [logger.version for logger in numbered]
    versions, folder = collectives.broadcast((versions, _folder(trainer)), rank_zero)
    for logger, version in zip(numbered, versions, strict=False):
        logger._version = version
    return None if folder is None else str(folder)


def asks_for_log_folder(frame: FrameType | None) -> bool:
    """Whether a call came from `trainer.log_dir`."""
    return frame is not None and frame.f_code is _ASKING


def _folder(trainer: Trainer) -> str | None:
    if not trainer.loggers:
        return str(trainer.default_root_dir)
    first = trainer.loggers[0]
    folder = first.log_dir if isinstance(first, _NUMBERED) else first.save_dir
    return None if folder is None else str(folder)
