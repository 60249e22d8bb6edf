"""Nested Python values as a JSON skeleton and a flat list of tensors; nothing is ever unpickled.

`pack` takes a value apart into what `json` can write and the tensors that it holds; `unpack` puts
it together again on another tier. Classes (dataclasses, named tuples, enumerations) travel by name
and are looked up among what that tier has already imported; none of their code runs.

    list                    a JSON array
    None, bool, int, str    themselves, and finite floats
    everything else         {"$": kind, ...}, where tensors, arrays and bytes are positions in the
    list of tensors
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections import OrderedDict
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from enum import Enum, Flag
from pathlib import Path
from typing import Any

import numpy as np
import torch

MAX_DEPTH = 100
_NUMPY_KINDS = frozenset("biufcSUmM")
_UNFIT = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError)
_BUILTINS = (dict, list, tuple, set, frozenset, str, bytes, int, float, complex)


def pack(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """Takes a value apart.

    Args:
        value: `None`, numbers, text, bytes, tensors, NumPy arrays, paths, dates, enumerations,
            dataclass instances, and lists, tuples, named tuples, dictionaries and sets of them.

    Returns:
        The skeleton, which `json` can write, and the tensors, detached, each once however often it
        occurs.

    Raises:
        TypeError: If the value holds something else; the message says where.
        ValueError: If it is nested deeper than 100 levels, as a list that holds itself is.
    """
    packer = _Packer()
    return packer.pack(value, "value", 0), packer.tensors


def unpack(skeleton: Any, tensors: list[torch.Tensor]) -> Any:
    """Puts together what `pack` took apart.

    Raises:
        ValueError: If the skeleton was not made by `pack`, or names a class that this tier has not
            imported.
    """
    try:
        return _unpack(skeleton, tensors, 0)
    except _UnpackError:
        raise
    except _UNFIT as error:
        raise _UnpackError(f"this is not a packed value: {error!r}") from error


class _UnpackError(ValueError):
    """An error that says what is wrong."""


class _Packer:
    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._positions: dict[int, int] = {}
        self._kept: list[Any] = []

    def pack(self, value: Any, path: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError(
                f"{path[:200]} is nested deeper than {MAX_DEPTH} levels; does it hold itself?"
            )
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return value if -(2**63) <= value < 2**63 else {"$": "int", "hex": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {"$": "float", "text": repr(value)}
        if kind is list:
            return [self.pack(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
        if kind in (dict, OrderedDict):
            return {
                "$": "dict" if kind is dict else "ordered",
                "keys": [self.pack(key, f"{path} key {key!r:.80}", depth + 1) for key in value],
                "values": [
                    self.pack(item, f"{path}[{key!r:.80}]", depth + 1)
                    for key, item in value.items()
                ],
            }
        if kind in (tuple, set, frozenset):
            return {
                "$": kind.__name__,
                "items": [
                    self.pack(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)
                ],
            }
        if isinstance(value, torch.Tensor):
            return {"$": "tensor", "at": self._add_tensor(value, path)}
        return self._pack_other(value, path, depth)

    def _pack_other(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if kind is complex:
            parts = [self.pack(part, path, depth + 1) for part in (value.real, value.imag)]
            return {"$": "complex", "parts": parts}
        if kind in (bytes, bytearray):
            raw = torch.from_numpy(np.frombuffer(value, dtype=np.uint8).copy())
            return {"$": kind.__name__, "at": self._add(value, raw)}
        if isinstance(value, (np.ndarray, np.generic)):
            return self._pack_numpy(value, path)
        if kind is torch.Size:
            return {"$": "size", "items": list(value)}
        if kind is torch.dtype:
            return {"$": "dtype", "name": str(value).removeprefix("torch.")}
        if kind is torch.device:
            return {"$": "device", "name": str(value)}
        if isinstance(value, Path):
            return {"$": "path", "text": str(value)}
        if kind in (datetime, time) and isinstance(value.tzinfo, (timezone, type(None))):
            return {"$": kind.__name__, "text": value.isoformat(), "fold": value.fold}
        if kind is date:
            return {"$": "date", "text": value.isoformat()}
        if kind is timedelta:
            return {"$": "timedelta", "parts": [value.days, value.seconds, value.microseconds]}
        if isinstance(value, Enum):
            named = (
                {"name": value.name} if value.name in kind.__members__ else {"value": value.value}
            )
            return {"$": "enum", "class": _class_name(kind, path), **named}
        if _is_namedtuple(kind):
            items = [
                self.pack(item, f"{path}.{name}", depth + 1)
                for name, item in zip(kind._fields, value, strict=True)
            ]
            return {"$": "namedtuple", "class": _class_name(kind, path), "items": items}
        if _is_plain_dataclass(kind):
            fields = [
                field.name for field in dataclasses.fields(value) if hasattr(value, field.name)
            ]
            values = [
                self.pack(getattr(value, name), f"{path}.{name}", depth + 1) for name in fields
            ]
            return {
                "$": "dataclass",
                "class": _class_name(kind, path),
                "fields": fields,
                "values": values,
            }
        raise TypeError(
            f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot travel between "
            "tiers; use tensors, arrays, numbers, text, lists, tuples, dictionaries or dataclasses"
        )

    def _pack_numpy(self, value: Any, path: str) -> Any:
        dtype = value.dtype
        # Of items without bytes, text of no characters, any number could be claimed.
        fits = dtype.kind in _NUMPY_KINDS and dtype.itemsize
        if not fits or type(value) is np.ma.MaskedArray:
            raise TypeError(
                f"{path} is a {type(value).__name__} of dtype {dtype}, which cannot travel "
                "between tiers; use numbers, text or dates"
            )
        array = np.asarray(value)
        raw = torch.from_numpy(np.frombuffer(array.tobytes(), dtype=np.uint8).copy())
        return {
            "$": "array" if isinstance(value, np.ndarray) else "scalar",
            "dtype": array.dtype.str,
            "shape": list(array.shape),
            "at": self._add(value, raw),
        }

    def _add_tensor(self, tensor: torch.Tensor, path: str) -> int:
        if (
            tensor.layout is not torch.strided
            or tensor.is_quantized
            or tensor.device.type == "meta"
        ):
            what = (
                "quantized" if tensor.is_quantized else f"{tensor.layout} on device {tensor.device}"
            )
            raise TypeError(
                f"{path} is a tensor that is {what}; only dense tensors with values can travel "
                "between tiers"
            )
        return self._add(tensor, tensor.detach())

    def _add(self, value: Any, tensor: torch.Tensor) -> int:
        if id(value) not in self._positions:
            self._positions[id(value)] = len(self.tensors)
            self._kept.append(value)  # keeps the id from being given to another object
            self.tensors.append(tensor)
        return self._positions[id(value)]


def _is_namedtuple(kind: type) -> bool:
    fields = getattr(kind, "_fields", None)
    return (
        issubclass(kind, tuple)
        and isinstance(fields, tuple)
        and all(isinstance(name, str) for name in fields)
    )


def _is_plain_dataclass(kind: type) -> bool:
    """Tells whether the fields are all that an instance holds."""
    return dataclasses.is_dataclass(kind) and not issubclass(kind, (*_BUILTINS, torch.nn.Module))


def _class_name(kind: type, path: str) -> str:
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _find(name) is not kind:
        raise TypeError(
            f"{path} is a {name.replace(':', '.')}, which other tiers cannot find by that name; "
            "define the class at the top level of a module that every tier imports"
        )
    return name


def _find(name: str) -> Any:
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        # `vars`, not `getattr`: a module's or a class's own `__getattr__` would run code
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    return found


def _find_class(name: str, check: Callable[[type], bool], what: str) -> Any:
    found = _find(name)
    if not isinstance(found, type) or not check(found):
        raise _UnpackError(
            f"{name.replace(':', '.')} is not a {what} that this tier has imported; import its "
            "module on every tier"
        )
    return found


def _unpack(skeleton: Any, tensors: list[torch.Tensor], depth: int) -> Any:
    if depth > 2 * MAX_DEPTH:
        raise _UnpackError(
            f"this is not a packed value: it is nested deeper than {2 * MAX_DEPTH} levels"
        )
    if isinstance(skeleton, list):
        return [_unpack(item, tensors, depth + 1) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    kind = skeleton["$"]
    many = _CONTAINERS.get(kind)
    if many is not None:
        return many(skeleton, lambda items: [_unpack(item, tensors, depth + 1) for item in items])
    leaf = _LEAVES.get(kind)
    if leaf is None:
        raise _UnpackError(f"this is not a packed value: its kind is {kind!r}")
    return leaf(skeleton, tensors)


_Many = Callable[[list[Any]], list[Any]]


def _namedtuple(skeleton: Any, many: _Many) -> Any:
    kind = _find_class(skeleton["class"], _is_namedtuple, "named tuple")
    items = many(skeleton["items"])
    if len(items) != len(kind._fields):
        raise _UnpackError(
            f"{kind.__name__} has {len(kind._fields)} fields here, and {len(items)} arrived"
        )
    return tuple.__new__(kind, items)


def _dataclass(skeleton: Any, many: _Many) -> Any:
    kind = _find_class(skeleton["class"], _is_plain_dataclass, "dataclass")
    fields = skeleton["fields"]
    known = {field.name for field in dataclasses.fields(kind)}
    if not known.issuperset(fields):
        raise _UnpackError(
            f"{kind.__name__} has the fields {sorted(known)} here, and {fields} arrived"
        )
    instance = object.__new__(kind)
    for name, value in zip(fields, many(skeleton["values"]), strict=True):
        object.__setattr__(instance, name, value)
    return instance


def _complex(skeleton: Any, many: _Many) -> complex:
    real, imag = many(skeleton["parts"])
    return complex(real, imag)


def _enum(skeleton: Any, _: list[torch.Tensor]) -> Any:
    kind = _find_class(skeleton["class"], lambda found: issubclass(found, Enum), "enumeration")
    if "name" in skeleton:
        return kind.__members__[skeleton["name"]]
    if not issubclass(kind, Flag):
        raise _UnpackError(f"{kind.__name__} has no member of the value {skeleton['value']!r}")
    return kind(int(skeleton["value"]))


def _array(skeleton: Any, tensors: list[torch.Tensor]) -> Any:
    dtype = np.dtype(str(skeleton["dtype"]))
    if dtype.kind not in _NUMPY_KINDS or not dtype.itemsize:
        raise _UnpackError(f"this is not a packed value: an array of dtype {dtype}")
    raw = tensors[_position(skeleton)].numpy()
    return raw.copy().view(dtype).reshape(skeleton["shape"])


def _dtype(skeleton: Any, _: list[torch.Tensor]) -> torch.dtype:
    found = vars(torch).get(skeleton["name"])
    if not isinstance(found, torch.dtype):
        raise _UnpackError(f"this version of torch has no dtype {skeleton['name']!r}")
    return found


def _position(skeleton: Any) -> int:
    at = skeleton["at"]
    if type(at) is not int or at < 0:
        raise _UnpackError(f"this is not a packed value: a tensor at position {at!r}")
    return at


def _float(skeleton: Any, _: list[torch.Tensor]) -> float:
    if skeleton["text"] not in ("nan", "inf", "-inf"):
        raise _UnpackError(f"this is not a packed value: the number {skeleton['text']!r:.80}")
    return float(skeleton["text"])


_CONTAINERS: dict[str, Callable[[Any, _Many], Any]] = {
    "dict": lambda s, many: dict(zip(many(s["keys"]), many(s["values"]), strict=True)),
    "ordered": lambda s, many: OrderedDict(zip(many(s["keys"]), many(s["values"]), strict=True)),
    "tuple": lambda s, many: tuple(many(s["items"])),
    "set": lambda s, many: set(many(s["items"])),
    "frozenset": lambda s, many: frozenset(many(s["items"])),
    "namedtuple": _namedtuple,
    "dataclass": _dataclass,
    "complex": _complex,
}

_LEAVES: dict[str, Callable[[Any, list[torch.Tensor]], Any]] = {
    "int": lambda s, _: int(s["hex"], 16),
    "float": _float,
    "tensor": lambda s, tensors: tensors[_position(s)],
    "bytes": lambda s, tensors: tensors[_position(s)].numpy().tobytes(),
    "bytearray": lambda s, tensors: bytearray(tensors[_position(s)].numpy().tobytes()),
    "array": _array,
    "scalar": lambda s, tensors: _array(s, tensors)[()],
    "size": lambda s, _: torch.Size(s["items"]),
    "dtype": _dtype,
    "device": lambda s, _: torch.device(s["name"]),
    "path": lambda s, _: Path(s["text"]),
    "datetime": lambda s, _: datetime.fromisoformat(s["text"]).replace(fold=s["fold"]),
    "time": lambda s, _: time.fromisoformat(s["text"]).replace(fold=s["fold"]),
    "date": lambda s, _: date.fromisoformat(s["text"]),
    "timedelta": lambda s, _: timedelta(*s["parts"]),
    "enum": _enum,
}
