"""Buffers that a step changes, such as the running statistics of batch normalisation.

Every tier changes them by the samples that it runs. After each update the owner takes the mean of
what the tiers have made of a buffer, weighted by the samples that each of them ran through it, and
returns it; a running variance gets the spread between the shares' means on top. A buffer of whole
numbers (how many batches there were) is the owner's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_hiertrain.execution.feed import MiniBatch
from lightning_hiertrain.execution.statistics import (
    ShareStatistics,
    merged_variance,
    recent_fractions,
)
from lightning_hiertrain.partition.chain import LayerChain

_COMPARED_ELEMENTS = 1 << 16
"""A larger buffer counts as changed when its version does, for example not by a `.data` access."""


class Buffers:
    """The buffers of one tier's copy of the module.

    Args:
        module: The user's module.
        chain: Its chain of layers.
    """

    def __init__(self, module: nn.Module, chain: LayerChain) -> None:
        self._module = module
        self._modules = list(module.modules())
        self._values_per_sample = chain.values_per_sample
        self._before: dict[str, Tensor | int] | None = None
        self._rows: Counter[str] = Counter()
        self._batches = 0
        """Mini-batches since the last update."""
        self._shared: dict[str, set[str]] = {}
        self._lent: dict[str, dict[str, Tensor]] = {}
        """On the owner: the buffers of prefix workers that have died, as they would be."""

    def __bool__(self) -> bool:
        return any(x is not None for each in self._modules for x in each._buffers.values())

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
        self._batches += 1

    @contextmanager
    def lent_to(self, worker: str) -> Iterator[None]:
        """A context, on the owner, in which the buffers are those of a prefix worker that died."""
        marked = {n: x for n, x in (self._before or {}).items() if isinstance(x, Tensor)}
        own = {name: self._buffers[name].detach().clone() for name in marked}
        self._put({**marked, **self._lent.get(worker, {})})
        try:
            yield
        finally:
            buffers = self._buffers
            self._lent[worker] = {name: buffers[name].detach().clone() for name in marked}
            self._put(own)

    def changed_for(self, worker: str) -> dict[str, Tensor]:
        """Returns the buffers that have changed while they were lent to a prefix worker."""
        before = self._before or {}
        return {
            name: value
            for name, value in self._lent.get(worker, {}).items()
            if not torch.equal(value, torch.as_tensor(before[name]))
        }

    def _put(self, values: Mapping[str, Tensor]) -> None:
        buffers = self._buffers
        for name, value in values.items():
            buffers[name].data.copy_(value)  # a graph that has saved it does not mind

    @torch.no_grad()
    def merge(self, reports: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Merges, on the owner, what the prefix workers have made of the buffers into its own.

        Args:
            reports: The changed buffers by prefix worker.
        """
        buffers, total = self._buffers, sum(self._rows.values())
        merged = self._variances(buffers, reports)
        for name in {name for report in reports.values() for name in report}:
            buffer = buffers[name]
            if buffer.is_floating_point() and name not in merged:
                parts = [
                    state[name].to(buffer.device) * (rows / total)
                    for rows, state in self._runs(name, buffers, reports)
                ]
                merged[name] = torch.stack(parts).sum(0)
        for worker, report in reports.items():
            self._shared.setdefault(worker, set()).update(report)
        for name, value in merged.items():
            buffers[name].copy_(value)
        self._rows.clear()
        self._lent.clear()
        self._batches, self._before = 0, None

    def _runs(
        self,
        name: str,
        buffers: Mapping[str, Tensor],
        reports: Mapping[str, Mapping[str, Tensor]],
    ) -> list[tuple[int, Mapping[str, Tensor]]]:
        """Returns who has changed a buffer: by how many samples, and the buffers as they are there.

        Samples of a worker that has not changed it passed it on the owner.
        """
        workers = [(self._rows[x], report) for x, report in reports.items() if name in report]
        rest = sum(self._rows.values()) - sum(rows for rows, _ in workers)
        return [(rest, buffers), *workers] if rest else [*workers]

    def _variances(
        self, buffers: Mapping[str, Tensor], reports: Mapping[str, Mapping[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Returns the merged running variances of the layers that several tiers ran."""
        merged: dict[str, Tensor] = {}
        before = self._before or {}
        for path, values in self._values_per_sample.items():
            layer = self._module.get_submodule(path)
            if not isinstance(layer, _BatchNorm):
                continue
            mean, variance, count = (
                f"{path}.{name}".lstrip(".")
                for name in ("running_mean", "running_var", "num_batches_tracked")
            )
            if all(variance not in report for report in reports.values()):
                continue
            old_mean, old = before[mean], before[variance]
            assert isinstance(old_mean, Tensor)
            assert isinstance(old, Tensor)
            shares = [
                ShareStatistics(
                    values=rows * values / self._batches,
                    mean=state.get(mean, old_mean).to(old.device),
                    variance=state[variance].to(old.device),
                )
                for rows, state in self._runs(variance, buffers, reports)
            ]
            fractions = recent_fractions(layer, int(buffers[count]) - int(before[count]))
            if fractions and sum(share.values for share in shares) > 1:
                merged[variance] = merged_variance(old, shares, fractions)
        return merged

    def shared_with(self, worker: str) -> dict[str, Tensor]:
        """Returns the buffers that a prefix worker changes, as they are on the owner."""
        names = self._shared.get(worker, ())
        return {n: buffer.detach().clone() for n, buffer in self._buffers.items() if n in names}


def _is_same(buffer: Tensor, old: Tensor | int) -> bool:
    return buffer._version == old if isinstance(old, int) else torch.equal(buffer, old)
