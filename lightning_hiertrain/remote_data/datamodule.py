"""The user's datamodule on tiers that have no data: its attributes, none of its work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import LightningDataModule

from lightning_hiertrain.mirror.values import Carrier, UnmirrorableError

LOADER_HOOKS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")
BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
ATTRIBUTE_BYTES = 64 * 1024
"""The most that one attribute set in `setup` may take on its way to the other tiers."""

_CONTAINERS = (list, dict, set)
_MISSING = object()
_REAL = "_hiertrain_real"


class _Fixed:
    """A method that an instance's own attribute of that name does not hide."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __get__(self, instance: Any, owner: type | None = None) -> Callable[..., Any]:
        return self._function

    def __set__(self, instance: Any, value: Any) -> None:
        raise AttributeError("the hooks of a datamodule cannot be replaced during a run")


def stand_in(
    real: LightningDataModule, hooks: Mapping[str, Callable[..., Any]]
) -> LightningDataModule:
    """Returns an object that is the user's datamodule but for some hooks.

    It is of a class derived from the user's and shares its attributes: what is set on one is read
    on the other.

    Args:
        real: The user's datamodule.
        hooks: Functions by hook name, called without `self`.
    """
    cls = type(real)
    namespace: dict[str, Any] = {name: _Fixed(function) for name, function in hooks.items()}
    namespace |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    namespace[_REAL] = real
    metaclass: Any = type(cls)
    made: LightningDataModule = object.__new__(metaclass(cls.__name__, (cls,), namespace))
    object.__setattr__(made, "__dict__", vars(real))
    return made


def unwrapped(datamodule: Any) -> Any:
    """Returns the user's datamodule for a stand-in, and anything else as it is."""
    return getattr(type(datamodule), _REAL, datamodule)


def new_attributes(datamodule: LightningDataModule, before: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the plain attributes that `prepare_data` and `setup` have set, fit to travel."""
    carrier = Carrier(budget_bytes=ATTRIBUTE_BYTES)
    found = {}
    for name, value in vars(datamodule).items():
        if name == "trainer" or (
            value is before.get(name, _MISSING) and not isinstance(value, _CONTAINERS)
        ):
            continue
        try:
            found[name] = carrier.carry(value)
        except UnmirrorableError:
            continue
    return found
