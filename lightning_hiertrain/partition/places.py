"""Which line of the user's code is being run."""

from __future__ import annotations

import os
import sys
from types import FrameType

_LIBRARIES = frozenset(
    [
        *("torch", "lightning", "pytorch_lightning", "lightning_fabric", "lightning_hiertrain"),
        *("contextlib", "functools", "typing", "copy"),
    ]
)
"""Packages whose lines tell the user nothing. A model library such as torchvision is none."""


def running_line() -> str:
    """Returns the innermost line of the user's code, or of a model library's, that is being run.

    Returns:
        For example `"train.py:31"`, empty if there is none.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").split(".")[0] not in _LIBRARIES:
            return f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _short(filename: str) -> str:
    """Returns a path relative to the working directory, if the file lies below it."""
    below = os.getcwd() + os.sep
    return filename.removeprefix(below)
