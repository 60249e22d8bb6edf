"""Keeps Lightning's loops alike on all tiers while the data tier alone has datasets."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.utilities._pytree import _tree_flatten
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.utils._pytree import tree_map, tree_unflatten

from lightning_hiertrain.mirror.attributes import assign
from lightning_hiertrain.remote_data.datamodule import (
    BATCH_HOOKS,
    LOADER_HOOKS,
    new_attributes,
    stand_in,
    unwrapped,
)
from lightning_hiertrain.remote_data.loaders import (
    AnnouncedLoader,
    IndexedRemoteLoader,
    RemoteLoader,
    StatefulAnnouncedLoader,
    StatefulRemoteLoader,
    has_sure_length,
)
from lightning_hiertrain.transport.packing import pack

log = logging.getLogger(__name__)

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class Broadcaster(Protocol):
    """What is needed of `transport.Collectives`."""

    def broadcast(self, value: Any, source: str, *, timeout_seconds: float | None = None) -> Any:
        """Returns one tier's value on all tiers."""


class RemoteData:
    """Builds and iterates datasets on the data tier alone.

    Args:
        trainer: The Trainer, with the run's model and data attached.
        module: The user's LightningModule.
        is_data_tier: Whether this process is the data tier's.
        data_tier: The tier that has the data.
        collectives: Carries the data tier's answers to the others.
        patience_seconds: How long the others wait while the data tier downloads or builds datasets.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        *,
        is_data_tier: bool,
        data_tier: str,
        collectives: Broadcaster,
        patience_seconds: float = 3600.0,
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._is_data_tier = is_data_tier
        self._data_tier = data_tier
        self._collectives = collectives
        self._patience_seconds = patience_seconds
        self._undo: list[Callable[[], None]] = []
        self._loaders: list[RemoteLoader] = []
        self._datamodule: LightningDataModule | None = None
        self._attributes_before: dict[str, Any] = {}
        self._active = False
        self._shares_state = False

    def install(self) -> None:
        """Puts the data's stand-ins in place. All tiers call it, once the collectives work.

        Raises:
            MisconfigurationException: If a step takes `dataloader_iter`, or the tiers run different
                scripts.
        """
        self.restore()
        self._active = True
        self._refuse_dataloader_iter()
        self._find_datamodule()
        self._greet()
        loops = self._trainer.fit_loop
        for loop in (
            loops,
            loops.epoch_loop.val_loop,
            self._trainer.validate_loop,
            self._trainer.test_loop,
            self._trainer.predict_loop,
        ):
            self._patch(loop, "_data_source", _SharedSource(loop._data_source, self))
        self._patch(self._trainer._data_connector, "prepare_data", self._prepare_data)
        if self._datamodule is not None:
            self._install_datamodule(self._datamodule)
        if not self._is_data_tier:
            self._patch(self._module, "_on_before_batch_transfer", _same_batch)
            for name in LOADER_HOOKS:
                if is_overridden(name, self._module):
                    self._patch(self._module, name, self._refused(name))
        if getattr(self._trainer, "_val_check_time_interval", None) is not None:
            self._share_validation_time()

    def process_dataloader(self, loader: Any) -> Any:
        """Returns the loader to iterate on this tier; `Strategy.process_dataloader` calls it."""
        if not self._active:
            return loader
        return self._announced(loader) if self._is_data_tier else self._remote()

    def restore(self) -> None:
        """Takes back every change to the Trainer and the module. A second call does nothing.

        On tiers without data `trainer.datamodule` stays the stand-in, so that `teardown` and a
        checkpoint written after the run do not meet a datamodule that was never set up.
        """
        self._active = False
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        for loader in self._loaders:
            loader.close()
        self._loaders.clear()

    def share(self, value: Any, *, patiently: bool = False) -> Any:
        """Returns the data tier's value on all tiers."""
        if not self._active:
            return value
        return self._collectives.broadcast(
            value,
            self._data_tier,
            timeout_seconds=self._patience_seconds if patiently else None,
        )

    def request_loaders(self, source: _DataLoaderSource) -> Any:
        """Returns the loaders of one loop, built by the user's code on the data tier."""
        if self._is_data_tier:
            loaders = source.dataloader()
            self.share(_describe(loaders), patiently=True)
            return loaders
        description = self.share(None, patiently=True)
        loaders = tree_map(lambda _: self._new(RemoteLoader), description["structure"])
        mode = description["mode"]
        return loaders if mode is None else CombinedLoader(loaders, mode)

    def _refuse_dataloader_iter(self) -> None:
        for name in STEPS:
            step = getattr(self._module, name)
            if callable(step) and is_param_in_hook_signature(
                step, "dataloader_iter", explicit=True
            ):
                raise MisconfigurationException(
                    f"{type(self._module).__name__}.{name} takes `dataloader_iter`, but only the "
                    f"data tier has a loader; take `batch, batch_idx` instead"
                )

    def _find_datamodule(self) -> None:
        self._datamodule = unwrapped(getattr(self._trainer, "datamodule", None))

    def _greet(self) -> None:
        own = None if self._datamodule is None else type(self._datamodule).__qualname__
        told = self.share({"datamodule": own, "writes": self._trainer.is_global_zero})
        self._shares_state = not told["writes"]
        if told["datamodule"] != own:
            raise MisconfigurationException(
                f"the data tier {self._data_tier!r} runs with the datamodule "
                f"{told['datamodule']}, this tier with {own}; run the same script on every tier"
            )

    def _install_datamodule(self, datamodule: LightningDataModule) -> None:
        if self._is_data_tier:
            self._attributes_before = dict(vars(datamodule))
            self._patch(datamodule, "setup", self._setup_and_share(datamodule))
            if is_overridden("state_dict", datamodule):
                self._patch(datamodule, "state_dict", self._state_and_share(datamodule))
            return
        hooks: dict[str, Callable[..., Any]] = {
            **{name: self._refused(name) for name in LOADER_HOOKS},
            **dict.fromkeys(BATCH_HOOKS, _same_batch),
            **dict.fromkeys(("prepare_data", "teardown", "load_state_dict", "on_exception"), _pass),
            "setup": self._receive_setup,
            "state_dict": self._receive_state,
        }
        self._trainer.datamodule = stand_in(datamodule, hooks)  # type: ignore[attr-defined]

    def _prepare_data(self) -> None:
        if self._is_data_tier:
            if self._datamodule is not None and is_overridden("prepare_data", self._datamodule):
                call._call_lightning_datamodule_hook(self._trainer, "prepare_data")
            if is_overridden("prepare_data", self._module):
                call._call_lightning_module_hook(self._trainer, "prepare_data")
        self.share(None, patiently=True)

    def _setup_and_share(self, datamodule: LightningDataModule) -> Callable[..., None]:
        original = datamodule.setup

        def setup(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            self.share(new_attributes(datamodule, self._attributes_before), patiently=True)

        return setup

    def _receive_setup(self, *_: Any, **__: Any) -> None:
        if self._active and self._datamodule is not None:
            for key, value in self.share(None, patiently=True).items():
                assign(vars(self._datamodule), key, value)

    def _state_and_share(self, datamodule: LightningDataModule) -> Callable[[], Any]:
        original = datamodule.state_dict

        def state_dict() -> Any:
            state = original()
            self._share_state(state)
            return state

        return state_dict

    def _receive_state(self) -> Any:
        overridden = self._datamodule is not None and is_overridden("state_dict", self._datamodule)
        return (self._share_state(None) or {}) if overridden else {}

    def _share_state(self, state: Any) -> Any:
        # When an exception ends one tier, its callbacks may save a checkpoint there alone.
        if not self._shares_state or not self._active or self._trainer.interrupted:
            return state
        return self.share(state)

    def _announced(self, loader: Any) -> Any:
        length = sized_len(loader)
        stateful = isinstance(loader, _Stateful)
        indexed = isinstance(getattr(loader, "batch_sampler", None), _IndexBatchSamplerWrapper)
        indexed = indexed and any(
            isinstance(callback, BasePredictionWriter)
            for callback in self._trainer.callbacks  # type: ignore[attr-defined]
        )
        announced = stateful or indexed or length is None or not has_sure_length(loader)
        self.share(
            {"length": length, "announced": announced, "stateful": stateful, "indexed": indexed}
        )
        if stateful:
            return StatefulAnnouncedLoader(loader, share=self.share, share_state=self._share_state)
        return AnnouncedLoader(loader, share=self.share) if announced else loader

    def _remote(self) -> RemoteLoader:
        told = self.share(None)
        options: dict[str, Any] = {"length": told["length"]}
        if told["announced"]:
            options["share"] = self.share
        if told["stateful"]:
            return self._new(StatefulRemoteLoader, share_state=self._share_state, **options)
        return self._new(IndexedRemoteLoader if told["indexed"] else RemoteLoader, **options)

    def _new(self, cls: type[RemoteLoader], **options: Any) -> RemoteLoader:
        loader = cls(data_tier=self._data_tier, **options)
        self._loaders.append(loader)
        return loader

    def _refused(self, name: str) -> Callable[..., Any]:
        def refuse(*_: Any, **__: Any) -> Any:
            raise RuntimeError(
                f"`{name}()` was called on a tier without data; the dataset exists on tier "
                f"{self._data_tier!r} alone. For the number of steps use "
                f"`trainer.estimated_stepping_batches` or `trainer.num_training_batches`"
            )

        return refuse

    def _share_validation_time(self) -> None:
        # Clocks differ: without this, tiers would disagree about the batch after which to validate.
        loop = self._trainer.fit_loop.epoch_loop
        original = loop._should_check_val_fx

        def should_check(*args: Any, **kwargs: Any) -> bool:
            return bool(self.share(original(*args, **kwargs)))

        self._patch(loop, "_should_check_val_fx", should_check)

    def _patch(self, target: Any, name: str, value: Any) -> None:
        values = vars(target)
        had, old = name in values, values.get(name)

        def undo() -> None:
            if had:
                values[name] = old
            else:
                values.pop(name, None)

        self._undo.append(undo)
        values[name] = value


class _SharedSource(_DataLoaderSource):
    """Where a loop's loaders come from: the user's code on the data tier, its answer elsewhere."""

    def __init__(self, inner: _DataLoaderSource, data: RemoteData) -> None:
        super().__init__(inner.instance, inner.name)
        self._inner = inner
        self._data = data

    def dataloader(self) -> Any:
        return self._data.request_loaders(self._inner)


def _describe(loaders: Any) -> dict[str, Any]:
    combined = isinstance(loaders, CombinedLoader)
    flat, spec = _tree_flatten(loaders.iterables if combined else loaders)
    structure = tree_unflatten(list(range(len(flat))), spec)
    try:
        pack(structure)
    except TypeError:
        structure = list(range(len(flat)))
    return {"structure": structure, "mode": loaders._mode if combined else None}


def _same_batch(batch: Any, *_: Any, **__: Any) -> Any:
    return batch


def _pass(*_: Any, **__: Any) -> None:
    return None
