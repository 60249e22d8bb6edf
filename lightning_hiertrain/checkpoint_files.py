"""Checkpoint files of which the name means that they are whole.

Lightning's own files go through the folder for temporary files. Where that is another file system,
they are copied to their name piece by piece, and a full disk or a killed process leaves a half one.
Here a file is written beside its name, brought to the disk, and then takes the name in one step.
"""

from __future__ import annotations

import io
import os
import secrets
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO

SUFFIX = ".part"
"""What a file is called at its end until it is whole."""


class WholeFiles(TorchCheckpointIO):
    """Writes a checkpoint to its name as a whole or not at all."""

    def __init__(self) -> None:
        self.last_path: str | None = None
        """The newest checkpoint that was written."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Writes a checkpoint.

        Raises:
            OSError: If it cannot be written, as on a full disk; the message names the last one that
                was, and of this one nothing is left.
        """
        if storage_options is not None or "://" in str(path):  # on no disk of this machine
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            try:
                _write_whole(checkpoint, Path(path))
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"the checkpoint {path} could not be written ({error.strerror}) and nothing is "
                    f"left of it; {self.last_good()}",
                ) from error
        self.last_path = str(path)

    def last_good(self) -> str:
        """Says which checkpoint is the newest."""
        if self.last_path is None:
            return "this run has no other checkpoint"
        return f"the last good checkpoint is {self.last_path}"

    def remove_checkpoint(self, path: str | Path) -> None:
        """Removes a checkpoint."""
        super().remove_checkpoint(path)
        if self.last_path == str(path):
            self.last_path = None


def _write_whole(checkpoint: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{secrets.token_hex(8)}{SUFFIX}")
    try:
        # Into memory first, as Lightning does: torch hides why it could not write to a file.
        content = io.BytesIO()
        torch.save(checkpoint, content)
        with part.open("xb") as file:
            file.write(content.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Brings the name to the disk too, where folders can be."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
