"""What changes in a module's plain attributes while a step or a hook runs.

`self.best = ...` and `self.outputs.append(loss)` are compared before and after, and what changed is
carried to the other tiers. The comparison runs in every step and must be cheap: a whole `__dict__`
is copied and compared at once, and only containers, tensors and small objects of the user's own
classes are looked into.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric

from lightning_hiertrain.mirror.metrics import METRIC_INTERNAL
from lightning_hiertrain.mirror.values import Carrier, UnmirrorableError, placed
from lightning_hiertrain.partition.calls import tensors_in

log = logging.getLogger(__name__)

ATTRIBUTE_BYTES = 4096
"""The most that one changed attribute may take on its way to the other tiers."""
LIST_LIMIT = 16384
"""Containers longer than this are not looked into."""
DEEP_LIMIT = 256
"""In containers longer than this, only the entries are compared, not what they contain."""

_MISSING = object()
_LIBRARIES = frozenset(
    ["torch", "torchvision", "torchmetrics", "torchaudio", "lightning", "pytorch_lightning",
     "lightning_fabric", "lightning_hiertrain", "lightning_utilities", "numpy", "builtins",
     "collections", "functools", "logging", "typing", "types", "pathlib", "omegaconf",
     "jsonargparse", "contextlib", "threading", "multiprocessing", "concurrent", "random",
     "datetime", "re", "weakref", "abc", "enum"]
)  # fmt: skip
_STATIC_LIBRARIES = frozenset(["torch", "torchvision", "torchmetrics"])
_IGNORED_CLASSES = (
    nn.Module, Dataset, DataLoader, LightningDataModule, Callback, Trainer, Logger, Enum, type,
    torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.Generator, BaseException,
)  # fmt: skip
_CONTAINERS = (list, tuple, dict, set, frozenset, deque, OrderedDict, defaultdict, Counter)
_INTERNAL = frozenset(vars(LightningModule())) | frozenset(
    ["_hparams", "_hparams_name", "_hparams_initial", "log"]
)


class _Kind(Enum):
    PLAIN = 0
    CONTAINER = 1
    ARRAY = 2
    OBJECT = 3


_kinds: dict[type, _Kind] = {}


def _kind(cls: type) -> _Kind:
    found = _kinds.get(cls)
    if found is None:
        found = _kinds[cls] = _classify(cls)
    return found


def _classify(cls: type) -> _Kind:
    if cls in _CONTAINERS:
        return _Kind.CONTAINER
    if issubclass(cls, Tensor | np.ndarray):
        return _Kind.ARRAY
    if issubclass(cls, _IGNORED_CLASSES) or cls.__module__.partition(".")[0] in _LIBRARIES:
        return _Kind.PLAIN
    return _Kind.OBJECT


@dataclass(kw_only=True)
class _Holder:
    """An object whose attributes are watched."""

    path: str
    attribute: str | None
    values: dict[str, Any]
    internal: frozenset[str]
    static: bool


@dataclass(kw_only=True)
class _Watched:
    key: str
    value: Any
    frozen: Any


@dataclass(kw_only=True)
class _Before:
    holder: _Holder
    values: dict[str, Any]
    watched: list[_Watched]


class Attributes:
    """Finds which attributes changed between two moments, and changes another process's copy."""

    def __init__(self) -> None:
        self.unmirrored: dict[str, tuple[str, str | None, str]] = {}
        """Attributes that changed on the owner and were not carried, by name: where to find them,
        by the path of a module, an attribute of it that holds an object, and the key in that."""
        self._modules: Mapping[str, nn.Module] = {}
        self._holders: list[_Holder] = []
        self._carrier = Carrier(budget_bytes=ATTRIBUTE_BYTES)

    def watch(self, modules: Mapping[str, nn.Module]) -> None:
        """Watches these modules, named by path, from now on."""
        self._modules = modules
        self._holders = []
        for path, module in modules.items():
            internal = _INTERNAL
            if isinstance(module, Metric):
                internal = internal | METRIC_INTERNAL | frozenset(module._defaults)
            static = type(module).__module__.partition(".")[0] in _STATIC_LIBRARIES
            self._holders.append(
                _Holder(
                    path=path,
                    attribute=None,
                    values=vars(module),
                    internal=internal,
                    static=static,
                )
            )

    def snapshot(self) -> list[_Before]:
        """Returns the attributes as they are now."""
        return [
            _Before(holder=holder, values=holder.values.copy(), watched=_watched(holder))
            for holder in self._all_holders()
        ]

    def changes(self, before: list[_Before]) -> list[dict[str, Any]]:
        """Returns which attributes are different now, fit to travel."""
        return [entry for item in before if (entry := self._changes(item)) is not None]

    def restore(self, before: list[_Before]) -> None:
        """Takes back what was set, deleted, added to or removed from since a snapshot."""
        for item in before:
            values = item.holder.values
            for key in values.keys() - item.values.keys():
                del values[key]
            values.update(item.values)
            for watched in item.watched:
                if not _still(watched.value, watched.frozen):
                    _refill(watched.value, watched.frozen)

    def apply(self, changes: Iterable[Mapping[str, Any]], device: torch.device | None) -> None:
        """Makes the changes that another tier's `changes` returned."""
        for entry in changes:
            target: Any = self._modules.get(entry["path"])
            if target is not None and entry["attribute"] is not None:
                target = vars(target).get(entry["attribute"])
            if not hasattr(target, "__dict__"):
                log.debug("%(path)r has no %(attribute)r on this tier", entry)
                continue
            values = vars(target)
            for key, value in entry["values"].items():
                assign(values, key, placed(value, _home(values.get(key), device)))
            for key, (length, items) in entry["grown"].items():
                _extend(values, key, length, placed(items, _home(values.get(key), device)))
            for key in entry["deleted"]:
                values.pop(key, None)

    def large_changes(self) -> list[dict[str, Any]]:
        """Returns what was too large to travel after each step, as it is now, for `apply`."""
        entries: list[dict[str, Any]] = []
        for name, (path, attribute, key) in list(self.unmirrored.items()):
            target: Any = self._modules.get(path)
            if target is not None and attribute is not None:
                target = vars(target).get(attribute)
            if not hasattr(target, "__dict__") or key not in vars(target):
                del self.unmirrored[name]
                continue
            try:
                values = {key: Carrier().carry(vars(target)[key])}
            except UnmirrorableError:
                continue
            del self.unmirrored[name]
            entry = {"path": path, "attribute": attribute, "values": values}
            entries.append({**entry, "grown": {}, "deleted": []})
        return entries

    def _all_holders(self) -> Iterator[_Holder]:
        for holder in self._holders:
            yield holder
            if holder.static:
                continue
            for key, value in holder.values.items():
                if _kind(type(value)) is not _Kind.OBJECT or key in holder.internal:
                    continue
                if hasattr(value, "__dict__"):
                    yield _Holder(
                        path=holder.path,
                        attribute=key,
                        values=vars(value),
                        internal=frozenset(),
                        static=False,
                    )

    def _changes(self, before: _Before) -> dict[str, Any] | None:
        holder, old, new = before.holder, before.values, before.holder.values
        changed: dict[str, Any] = {}
        deleted: list[str] = []
        if not _same(new, old):
            for key, value in new.items():
                if key not in holder.internal and not _same(value, old.get(key, _MISSING)):
                    changed[key] = None
            deleted = [key for key in old if key not in new and key not in holder.internal]
        for item in before.watched:
            same_object = new.get(item.key, _MISSING) is item.value
            if item.key in changed or (same_object and not _still(item.value, item.frozen)):
                changed[item.key] = item.frozen
        if not changed and not deleted:
            return None
        entry: dict[str, Any] = {"path": holder.path, "attribute": holder.attribute}
        entry |= {"values": {}, "grown": {}, "deleted": deleted}
        for key, frozen in changed.items():
            self._carry(entry, key, new[key], frozen)
        return entry

    def _carry(self, entry: dict[str, Any], key: str, value: Any, frozen: Any) -> None:
        if isinstance(value, FunctionType | MethodType | nn.Module):
            return
        name = ".".join(filter(None, (entry["path"], entry["attribute"], key)))
        grown = None
        if isinstance(value, list) and isinstance(frozen, _FrozenList):
            grown = _growth(value, frozen)
        try:
            if grown is not None and name not in self.unmirrored:
                entry["grown"][key] = (len(frozen.items), self._carrier.carry(grown))
            else:
                entry["values"][key] = self._carrier.carry(value)
                self.unmirrored.pop(name, None)
        except UnmirrorableError as error:
            if name not in self.unmirrored:
                log.debug("the attribute %r stays on the owner: %s", name, error)
            self.unmirrored[name] = (entry["path"], entry["attribute"], key)


class _FrozenList:
    __slots__ = ("deep", "items")

    def __init__(self, items: list[Any], deep: list[Any] | None) -> None:
        self.items = items
        self.deep = deep


def _watched(holder: _Holder) -> list[_Watched]:
    if holder.static:
        return []
    return [
        _Watched(key=key, value=value, frozen=_freeze(value))
        for key, value in holder.values.items()
        if _kind(type(value)) in (_Kind.CONTAINER, _Kind.ARRAY) and key not in holder.internal
    ]


def _freeze(value: Any) -> Any:
    if isinstance(value, Tensor):
        if not value.is_inference():
            return value._version
        return value.clone() if value.nbytes <= ATTRIBUTE_BYTES else None
    if isinstance(value, np.ndarray):
        return value.copy() if value.nbytes <= ATTRIBUTE_BYTES else None
    if not isinstance(value, _CONTAINERS):
        return None
    if len(value) > LIST_LIMIT:
        return len(value)
    deep = [_freeze(item) for item in _values(value)] if len(value) <= DEEP_LIMIT else None
    if isinstance(value, list):
        return _FrozenList(value.copy(), deep)
    return (value.copy() if hasattr(value, "copy") else value, deep)


def _still(value: Any, frozen: Any) -> bool:
    if frozen is None:
        return True
    if isinstance(value, Tensor):
        if isinstance(frozen, Tensor):
            return torch.equal(value, frozen)
        return bool(value._version == frozen)
    if isinstance(value, np.ndarray):
        return np.array_equal(value, frozen)
    if isinstance(frozen, int):
        return len(value) == frozen
    pair = (frozen.items, frozen.deep) if isinstance(frozen, _FrozenList) else frozen
    items, deep = pair
    if len(value) != len(items) or not _same(value, items):
        return False
    return deep is None or all(map(_still, _values(value), deep))


def _values(container: Any) -> Any:
    return container.values() if isinstance(container, dict) else container


def _refill(value: Any, frozen: Any) -> None:
    """Puts back what an object held, as far as it was looked into; it stays the same object."""
    items = frozen.items if isinstance(frozen, _FrozenList) else frozen
    if isinstance(items, tuple) and isinstance(value, dict | set | deque):
        items = items[0]
    if isinstance(value, list) and isinstance(items, list):
        value[:] = items
    elif isinstance(value, dict | set) and isinstance(items, dict | set):
        value.clear()
        value.update(items)
    elif isinstance(value, deque) and isinstance(items, deque):
        value.clear()
        value.extend(items)
    elif isinstance(value, np.ndarray) and isinstance(items, np.ndarray):
        value[...] = items


def _same(first: Any, second: Any) -> bool:
    if first is second:
        return True
    try:
        return type(first) is type(second) and bool(first == second)
    except (RuntimeError, ValueError, TypeError):
        return False


def _growth(value: list[Any], frozen: _FrozenList) -> list[Any] | None:
    old = frozen.items
    if len(value) <= len(old) or any(a is not b for a, b in zip(value, old, strict=False)):
        return None
    if frozen.deep is not None and not all(map(_still, value, frozen.deep)):
        return None
    return value[len(old) :]


def _home(current: Any, device: torch.device | None) -> torch.device | None:
    """Returns where an attribute's tensors are on this tier: not all follow the module."""
    return next((tensor.device for tensor in tensors_in(current)), device)


def assign(values: dict[str, Any], key: str, value: Any) -> None:
    """Puts a value that has arrived in the place of an attribute.

    A container is filled, not replaced: it keeps its class and whoever else refers to it.
    """
    current: Any = values.get(key)
    both_dicts = isinstance(current, dict) and isinstance(value, dict)
    if both_dicts or (isinstance(current, set) and isinstance(value, set)):
        current.clear()
        current.update(value)
    elif isinstance(current, list | deque) and isinstance(value, list):
        current.clear()
        current.extend(value)
    else:
        values[key] = value


def _extend(values: dict[str, Any], key: str, length: int, items: list[Any]) -> None:
    current = values.get(key)
    if isinstance(current, list) and len(current) >= length:
        current[length:] = items
    else:
        log.debug("the list %r is shorter on this tier than on the owner and stays as it is", key)
