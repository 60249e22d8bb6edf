"""Calls that a user's step or hook makes to a logger itself, carried to the tier that writes logs.

`self.logger.experiment.add_image(...)` and `self.logger.log_metrics(...)` do nothing outside rank
0, and the owner need not be rank 0.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.fabric.loggers.logger import _DummyExperiment
from lightning.pytorch.loggers import Logger

from lightning_hiertrain.mirror.values import Carrier, UnmirrorableError

log = logging.getLogger(__name__)

_Record = Callable[[str, bool, tuple[Any, ...], dict[str, Any]], None]
_RECORD = "_hiertrain_record"
_classes: dict[type, Any] = {}


class LoggerCalls:
    """Records and replays calls to loggers.

    Args:
        loggers: The Trainer's loggers, on every tier the same in the same order.
        writes: Whether this tier's loggers write: whether it is rank 0.
    """

    def __init__(self, loggers: Sequence[Logger], *, writes: bool) -> None:
        self._loggers = tuple(loggers)
        self._writes = writes
        self._calls: list[Any] = []
        self._warned: set[str] = set()

    @contextmanager
    def record(self) -> Iterator[None]:
        """Records while the context is open, on a tier that does not write."""
        classes = [type(logger) for logger in self._loggers]
        if self._writes:
            yield
            return
        try:
            for index, logger in enumerate(self._loggers):
                vars(logger)[_RECORD] = self._recorder(index)
                logger.__class__ = _recording_class(type(logger))
            yield
        finally:
            for logger, cls in zip(self._loggers, classes, strict=True):
                logger.__class__ = cls
                vars(logger).pop(_RECORD, None)

    def take(self) -> list[Any]:
        """Returns what was recorded, fit to travel, and forgets it."""
        calls, self._calls = self._calls, []
        return calls

    def replay(self, calls: Sequence[Any]) -> None:
        """Makes the calls that `take` returned on another tier, if this one writes."""
        if not self._writes:
            return
        for index, name, on_experiment, args, kwargs in calls:
            if index < len(self._loggers):
                target: Any = self._loggers[index]
                target = target.experiment if on_experiment else target
                if target is not None:
                    getattr(target, name)(*args, **kwargs)

    def _recorder(self, index: int) -> _Record:
        def record(
            name: str, on_experiment: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> None:
            carrier = Carrier()
            try:
                carried = carrier.carry(args), carrier.carry(kwargs)
            except UnmirrorableError as error:
                if name not in self._warned:
                    self._warned.add(name)
                    log.warning(
                        "what `%s` of a logger was given on the owner is not logged: %s; it is "
                        "logged if the owner is rank 0, or as a tensor or an array",
                        name,
                        error,
                    )
                return
            self._calls.append((index, name, on_experiment, *carried))

        return record


class _Experiment:
    """Stands for the writer that a logger has on rank 0 alone."""

    def __init__(self, record: _Record) -> None:
        self._record = record

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> None:
            self._record(name, True, args, kwargs)

        return call

    def __getitem__(self, index: Any) -> _DummyExperiment:
        return _DummyExperiment()


def _recording_class(cls: Any) -> Any:
    if cls not in _classes:
        names = [
            name for name in dir(cls) if name.startswith("log_") and callable(getattr(cls, name))
        ]
        namespace: dict[str, Any] = {name: _recorded(cls, name) for name in names}
        if isinstance(getattr(cls, "experiment", None), property):
            namespace["experiment"] = property(_recorded_experiment(cls))
        namespace |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        _classes[cls] = type(cls)(cls.__name__, (cls,), namespace)
    return _classes[cls]


def _recorded(cls: Any, name: str) -> Callable[..., Any]:
    original = getattr(cls, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        vars(self)[_RECORD](name, False, args, kwargs)
        return original(self, *args, **kwargs)

    return method


def _recorded_experiment(cls: Any) -> Callable[[Any], Any]:
    def experiment(self: Any) -> Any:
        found = cls.experiment.fget(self)
        # What `rank_zero_only` makes of a property, and what `rank_zero_experiment` does.
        if found is None or isinstance(found, _DummyExperiment):
            return _Experiment(vars(self)[_RECORD])
        return found

    return experiment
