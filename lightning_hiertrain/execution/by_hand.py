"""Weights that no optimizer changes, and the user's code does: averages of others, target networks.

Whoever changes them cannot be seen from outside (`.data` leaves no trace), so their contents are
compared. That is done after each of the first steps and after every step from the first change on;
else now and then, and whenever all weights are brought to other tiers.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

_FIRST_STEPS = 3
_EVERY_STEPS = 50


class WeightsByHand:
    """Watches, on the owner, the parameters that its optimizer leaves alone.

    Args:
        parameters: The module's, by name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._watched = set(parameters)
        """Those that no gradient has reached yet."""
        self._digests: dict[str, int] = {}
        self._steps = 0
        self._are_changed = False

    def begin(self) -> None:
        """Takes the frozen ones as they are now for known; every tier does when an owner begins."""
        self._digests = {
            name: _digest(p) for name, p in self._parameters.items() if not p.requires_grad
        }

    def stepped(self) -> list[str]:
        """Returns, after an update whose gradients are still there, which have changed."""
        self._steps += 1
        self._watched -= {name for name in self._watched if self._parameters[name].grad is not None}
        if self._are_changed or self._steps <= _FIRST_STEPS or not self._steps % _EVERY_STEPS:
            return self.changed()
        return []

    def changed(self) -> list[str]:
        """Returns which have changed since they were last compared."""
        changed = []
        for name in self._watched:
            digest = _digest(self._parameters[name])
            if self._digests.setdefault(name, digest) != digest:
                self._digests[name] = digest
                changed.append(name)
        self._are_changed |= bool(changed)
        return sorted(changed)


def _digest(tensor: Tensor) -> int:
    content = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(content.view(torch.uint8).numpy().data)
