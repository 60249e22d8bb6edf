"""Loaders of tokens for the tiers without data, and what the data tier tells them about each batch.

A loader whose length is sure needs no message. For any other one the data tier says before each
batch that there is one, so that all tiers leave the loop together.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.fabric.utilities.data import has_iterable_dataset
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from torch.utils.data import BatchSampler, DataLoader

from lightning_hiertrain.partition.withheld import Withheld

Share = Callable[[Any], Any]
"""Gives the data tier's argument to all tiers; the others pass `None`."""


_NO_BATCH = (
    "a callback reads `batch` on a tier that has none of its samples; read it in a callback where "
    "`trainer.strategy.tier` is the data tier, or return what is needed from the step"
)


class BatchToken:
    """Stands for a mini-batch on a tier that does not have it.

    Lightning infers a batch's size by looking for tensors in it and finds one of no bytes here.

    Args:
        index: Which batch of its loader it is.
        num_samples: Samples in the batch, if known.
    """

    __slots__ = ("index", "num_samples")

    def __init__(self, index: int, num_samples: int | None = None) -> None:
        self.index = index
        self.num_samples = num_samples

    def sized(self, num_samples: int) -> BatchToken:
        """Returns the same token with a known size."""
        return BatchToken(self.index, num_samples)

    def __iter__(self) -> Iterator[torch.Tensor]:
        # Lightning looks for the batch's size; anyone else unpacks it.
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        if caller.partition(".")[0] not in ("lightning", "pytorch_lightning"):
            raise TypeError(_NO_BATCH)
        if self.num_samples is None:
            return iter(())
        return iter((Withheld((self.num_samples, 0), reason=_NO_BATCH),))

    def __getitem__(self, key: Any) -> Any:
        raise TypeError(_NO_BATCH)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{_NO_BATCH} (asked for `{name}`)")

    def __repr__(self) -> str:
        return f"BatchToken({self.index}, num_samples={self.num_samples})"


def sized_token(batch: Any, num_samples: int) -> BatchToken:
    """Returns a token of known size for what the loops yield without data.

    Args:
        batch: A token, or for combined loaders the structure of tokens that stands for one batch.
        num_samples: Samples in the mini-batch.
    """
    if isinstance(batch, BatchToken):
        return batch.sized(num_samples)
    inner = batch.values() if isinstance(batch, dict) else batch
    tokens = [sized_token(item, num_samples) for item in inner or () if item is not None]
    return max(tokens, key=lambda token: token.index, default=BatchToken(0, num_samples))


class RemoteLoader:
    """Yields a token for each batch that the data tier's loader yields.

    Args:
        share: Asks the data tier before each batch; `None` if the length is sure.
        length: Number of batches, `None` if unknown.
        data_tier: The tier that has the data, for the error messages.
    """

    def __init__(
        self, *, share: Share | None = None, length: int | None = None, data_tier: str
    ) -> None:
        self._share = share
        self._length = length
        self._data_tier = data_tier
        self._closed = False

    def close(self) -> None:
        """Ends the connection with the data tier; further iteration is an error."""
        self._closed = True

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"the loader on tier {self._data_tier!r} has no length")
        return self._length

    def __iter__(self) -> Iterator[BatchToken]:
        index = 0
        while self._share is not None or (self._length is not None and index < self._length):
            if self._closed:
                raise RuntimeError(
                    f"this loader has no data outside a run; iterate on tier {self._data_tier!r}"
                )
            if self._share is not None:
                note = self._share(None)
                if note is None:
                    return
                self._take(note)
            yield BatchToken(index)
            index += 1

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the dataset and its loader exist on tier {self._data_tier!r} alone; "
            f"here the loader has no attribute {name!r}"
        )

    def _take(self, note: Any) -> None:
        """Uses what the data tier says about the coming batch."""


class IndexedRemoteLoader(RemoteLoader):
    """A loader of tokens that knows which samples are in each batch, for prediction writers."""

    def __init__(
        self, *, share: Share | None = None, length: int | None = None, data_tier: str
    ) -> None:
        super().__init__(share=share, length=length, data_tier=data_tier)
        self.batch_sampler = _IndexBatchSamplerWrapper(BatchSampler([], 1, drop_last=False))
        self.batch_sampler.seen_batch_indices = []

    def __iter__(self) -> Iterator[BatchToken]:
        self.batch_sampler.seen_batch_indices = []
        return super().__iter__()

    def _take(self, note: Any) -> None:
        self.batch_sampler.seen_batch_indices.append(note)


class StatefulRemoteLoader(RemoteLoader):
    """A loader of tokens whose state in a checkpoint is the data tier's."""

    def __init__(self, *, share_state: Share, **options: Any) -> None:
        super().__init__(**options)
        self._share_state = share_state

    def state_dict(self) -> dict[str, Any]:
        state = self._share_state(None)
        return state if isinstance(state, dict) else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Does nothing: the data tier resumes its own loader."""


class AnnouncedLoader:
    """The data tier's loader, which says before each batch that there is one.

    Everything else is the user's loader itself: attributes are read from it and set on it.

    Args:
        loader: The user's loader.
        share: Says it to all tiers.
    """

    _own = frozenset(["_loader", "_share", "_share_state"])

    def __init__(self, loader: Any, *, share: Share) -> None:
        self._loader = loader
        self._share = share

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        # At once, not at the first batch: a loader starts workers and draws random numbers here.
        return self._announce(iter(self._loader))

    def _announce(self, batches: Iterator[Any]) -> Iterator[Any]:
        for index, batch in enumerate(batches):
            self._share(self._note(index))
            yield batch
        self._share(None)

    def __getattr__(self, name: str) -> Any:
        if name in AnnouncedLoader._own:
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in AnnouncedLoader._own:
            object.__setattr__(self, name, value)
        else:
            setattr(self._loader, name, value)

    def _note(self, index: int) -> Any:
        sampler = getattr(self._loader, "batch_sampler", None)
        if isinstance(sampler, _IndexBatchSamplerWrapper):
            return [int(sample) for sample in sampler.seen_batch_indices[index]]
        return True


class StatefulAnnouncedLoader(AnnouncedLoader):
    """An announced loader that gives its state to the tier that writes the checkpoint."""

    def __init__(self, loader: Any, *, share: Share, share_state: Share) -> None:
        super().__init__(loader, share=share)
        self._share_state = share_state

    def state_dict(self) -> dict[str, Any]:
        state = self._loader.state_dict()
        self._share_state(state)
        return dict(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state)


def has_sure_length(loader: object) -> bool:
    """Returns whether a loader certainly yields as many batches as its length says."""
    if isinstance(loader, list | tuple | range):
        return True
    if not isinstance(loader, DataLoader) or has_iterable_dataset(loader):
        return False
    cls = type(loader)
    if cls.__iter__ is not DataLoader.__iter__ or cls.__len__ is not DataLoader.__len__:
        return False
    batches: Any = loader.batch_sampler
    if isinstance(batches, _IndexBatchSamplerWrapper):
        batches = batches._batch_sampler
    if batches is not None and type(batches) is not BatchSampler:
        return False
    sampler = loader.sampler if batches is None else batches.sampler
    return type(sampler).__module__.startswith("torch.utils.data")
