"""Fetching a training batch one step ahead, so that its samples travel during the step before."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_hiertrain.execution import DealtBatch
from lightning_hiertrain.remote_data.datamodule import BATCH_HOOKS, unwrapped
from lightning_hiertrain.remote_data.loaders import AnnouncedLoader

_NOTHING = object()


class _Peekable:
    """An iterator that can show its next item before it is asked for."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._peeked: Any = _NOTHING
        self.was_peeked = False
        """Whether the item returned last had been shown before."""

    def __iter__(self) -> _Peekable:
        return self

    def __next__(self) -> Any:
        self.was_peeked = self._peeked is not _NOTHING
        if not self.was_peeked:
            return next(self._iterator)
        item, self._peeked = self._peeked, _NOTHING
        return item

    def peek(self) -> Any:
        """Returns the next item, or `None` at the end."""
        if self._peeked is _NOTHING:
            try:
                self._peeked = next(self._iterator)
            except StopIteration:
                return None
        return self._peeked


class LookAhead:
    """Looks at the next training batch on the data tier.

    It does so only where nobody can tell: not past the end of an epoch or a validation, not where
    hooks transform batches, and not for a loader whose end is unknown.

    Args:
        trainer: The run's trainer.
        module: The user's module.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._trainer = trainer
        self._next: DealtBatch | None = None
        self._hooked = any(is_overridden(name, module) for name in BATCH_HOOKS)
        datamodule = unwrapped(getattr(trainer, "datamodule", None))
        if datamodule is not None:
            self._hooked |= any(is_overridden(name, datamodule) for name in BATCH_HOOKS)

    def take(self, batch: Any, move: Callable[[Any], Any]) -> DealtBatch:
        """Returns the training batch that the loop has fetched.

        Args:
            batch: The batch.
            move: Moves a batch to this tier's accelerator.
        """
        known, self._next = self._next, None
        iterator = self._iterator()
        if known is not None and iterator is not None and iterator.was_peeked:
            return replace(known, was_dealt=True)
        return _dealt(move(batch))

    def following(self, move: Callable[[Any], Any]) -> DealtBatch | None:
        """Returns the batch that the loop will fetch next, `None` if that cannot be known."""
        iterator = self._iterator()
        if iterator is None or self._hooked or self._epoch_pauses():
            return None
        item = iterator.peek()
        if item is not None:
            self._next = _dealt(move(self._trainer.precision_plugin.convert_input(item[0])))
        return self._next

    def _iterator(self) -> _Peekable | None:
        fetcher = self._trainer.fit_loop._data_fetcher
        if type(fetcher) is not _PrefetchDataFetcher or fetcher.length is None or fetcher.batches:
            return None
        if any(isinstance(x, AnnouncedLoader) for x in fetcher.combined_loader.flattened):
            return None
        if not isinstance(fetcher.iterator, _Peekable):
            fetcher.iterator = _Peekable(fetcher.iterator)  # type: ignore[arg-type]
        return fetcher.iterator

    def _epoch_pauses(self) -> bool:
        """Whether validation or the end of the epoch follows the batch at hand."""
        trainer = self._trainer
        loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
        assert fetcher is not None
        if fetcher.done or getattr(trainer, "_val_check_time_interval", None) is not None:
            return True
        by_epoch = trainer.check_val_every_n_epoch is not None
        interval = trainer.val_check_batch
        # The loop counts the batch at hand only after it has moved it.
        index = 1 + (loop.batch_idx if by_epoch else loop.total_batch_idx)
        if interval is None or not trainer.enable_validation:
            return False
        return (index + 1) % interval == 0


def _dealt(moved: Any) -> DealtBatch:
    return DealtBatch(content=moved, weight=batch_size(moved))


def batch_size(batch: Any) -> int | None:
    """Returns the batch size that Lightning infers, `None` if it finds none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return int(extract_batch_size(batch))
        except (MisconfigurationException, RecursionError):
            return None
