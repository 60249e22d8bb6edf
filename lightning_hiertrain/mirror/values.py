"""Values of a user's step in a form that `transport.packing` can carry.

Packing knows the plain containers; here their relatives (a default dictionary, a deque, a model's
output class) become plain ones, tensors lose their graph, and what cannot travel is refused or left
out.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from lightning_hiertrain.partition.counts import RowCount
from lightning_hiertrain.transport.packing import pack

_SCALARS = frozenset([type(None), bool, int, float, str])
_SEQUENCES = (list, tuple, set, frozenset)
_NODE_BYTES = 8


class UnmirrorableError(TypeError):
    """A value that cannot be carried to another tier, or is larger than allowed."""


class Carrier:
    """Makes values fit to travel.

    Args:
        budget_bytes: The most that one value may take, `None` for no limit.
        substitute: Called with the type of a leaf that cannot travel, and the leaf becomes `None`;
            without it such a leaf is an error.
    """

    def __init__(
        self,
        *,
        budget_bytes: int | None = None,
        substitute: Callable[[type], None] | None = None,
    ) -> None:
        self._budget_bytes = budget_bytes
        self._substitute = substitute
        self._spent_bytes = 0

    def carry(self, value: Any) -> Any:
        """Returns an equal value that `pack` accepts.

        Raises:
            UnmirrorableError: If a leaf cannot travel or the value exceeds the budget.
        """
        self._spent_bytes = 0
        return self._carry(value)

    def _carry(self, value: Any) -> Any:
        kind = type(value)
        if kind is RowCount:
            value, kind = int(value), int
        if kind in _SCALARS:
            self._spend(_NODE_BYTES + (len(value) if kind is str else 0))
            return value
        if isinstance(value, Tensor):
            return self._carry_tensor(value)
        self._spend(_NODE_BYTES)
        if kind in _SEQUENCES:
            return kind(map(self._carry, value))
        if kind is OrderedDict:
            return OrderedDict((self._carry(k), self._carry(v)) for k, v in value.items())
        if isinstance(value, Mapping):
            return {self._carry(k): self._carry(v) for k, v in value.items()}
        if isinstance(value, deque):
            return [self._carry(item) for item in value]
        return self._carry_rare(value)

    def _carry_tensor(self, value: Tensor) -> Tensor | None:
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            self._give_up(type(value), "it is not a dense tensor with values")
            return None
        self._spend(value.numel() * value.element_size())
        # A copy: sending takes the bytes later, and the user's code may change them before.
        return value.detach().clone() if value.device.type == "cpu" else value.detach().cpu()

    def _carry_rare(self, value: Any) -> Any:
        if isinstance(value, np.ndarray | bytes):
            self._spend(value.nbytes if isinstance(value, np.ndarray) else len(value))
        try:
            _, tensors = pack(value)
        except (TypeError, ValueError) as error:
            return self._give_up(type(value), str(error))
        self._spend(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
        return value

    def _spend(self, num_bytes: int) -> None:
        self._spent_bytes += num_bytes
        if self._budget_bytes is not None and self._spent_bytes > self._budget_bytes:
            raise UnmirrorableError(f"the value takes more than {self._budget_bytes} bytes")

    def _give_up(self, cls: type, reason: str) -> Any:
        if self._substitute is None:
            raise UnmirrorableError(f"a {cls.__qualname__} cannot travel: {reason}")
        self._substitute(cls)
        return None


def carry_or_none(value: Any) -> Any:
    """Returns a value fit to travel, `None` if it cannot."""
    try:
        return Carrier().carry(value)
    except UnmirrorableError:
        return None


def placed(value: Any, device: torch.device | None) -> Any:
    """Returns a value that has arrived with its tensors on a device."""
    if device is None or device.type == "cpu":
        return value
    return move_data_to_device(value, device)
