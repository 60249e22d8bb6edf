"""Buffers that a step changes, such as the running statistics of batch normalisation.

Every tier changes them by the samples that it runs. After each update the owner takes the mean of
what the tiers have made of a buffer, weighted by the samples that each of them ran through it, and
returns it. A buffer of whole numbers (how many batches there were) is the owner's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lightning_hiertrain.execution.feed import MiniBatch

_COMPARED_ELEMENTS = 1 << 16
"""A larger buffer counts as changed when its version does, for example not by a `.data` access."""


class Buffers:
    """The buffers of one tier's copy of the module.

    Args:
        module: The user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before: dict[str, Tensor | int] | None = None
        self._rows: Counter[str] = Counter()
        self._shared: dict[str, set[str]] = {}

    def __bool__(self) -> bool:
        return next(self._module.buffers(), None) is not None

    @property
    def _buffers(self) -> dict[str, Tensor]:
        # Found anew: a buffer is another object after the module has moved.
        return dict(self._module.named_buffers())

    def mark(self) -> None:
        """Remembers the buffers before the first mini-batch since the last update."""
        if self._before is None:
            self._before = {
                name: buffer._version
                if buffer.numel() > _COMPARED_ELEMENTS
                else buffer.detach().clone()
                for name, buffer in self._buffers.items()
            }

    def changed(self) -> dict[str, Tensor]:
        """Returns the buffers that are not what they were, and forgets what they were."""
        before, self._before = self._before or {}, None
        return {
            name: buffer.detach().clone()
            for name, buffer in self._buffers.items()
            if name in before and not _is_same(buffer, before[name])
        }

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Takes over what the owner has made of the buffers."""
        buffers = self._buffers
        with torch.no_grad():
            for name, value in values.items():
                buffers[name].copy_(value)

    def count(self, mini_batch: MiniBatch) -> None:
        """Notes, on the owner, how many samples each tier runs."""
        self._rows.update({name: rows for name, _, rows in mini_batch.cuts})
        self._rows[mini_batch.schedule.owner] += mini_batch.owner_rows

    def merge(self, reports: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Merges, on the owner, what the prefix workers have made of the buffers into its own.

        Args:
            reports: The changed buffers by prefix worker.
        """
        buffers, total = self._buffers, sum(self._rows.values())
        sums: dict[str, Tensor] = {}
        owner_rows: Counter[str] = Counter()
        for worker, report in reports.items():
            self._shared.setdefault(worker, set()).update(report)
            for name, value in report.items():
                buffer = buffers[name]
                if buffer.is_floating_point():
                    weighted = value.to(buffer.device) * (self._rows[worker] / total)
                    sums[name] = sums[name] + weighted if name in sums else weighted
                    owner_rows.setdefault(name, total)
                    owner_rows[name] -= self._rows[worker]
        with torch.no_grad():
            for name, value in sums.items():
                buffers[name].mul_(owner_rows[name] / total).add_(value)
        self._rows.clear()

    def shared_with(self, worker: str) -> dict[str, Tensor]:
        """Returns the buffers that a prefix worker changes, as they are on the owner."""
        names = self._shared.get(worker, ())
        return {n: buffer.detach().clone() for n, buffer in self._buffers.items() if n in names}


def _is_same(buffer: Tensor, old: Tensor | int) -> bool:
    return buffer._version == old if isinstance(old, int) else torch.equal(buffer, old)
