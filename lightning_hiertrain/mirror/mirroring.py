"""Records on the owner what a step or hook does to the outside, and replays it on the other tiers.

Three processes run the same loops, but `training_step` ends on the owner alone. Early stopping,
checkpoints, schedulers, progress bars and loggers run on every tier and must see the same values.
"""

from __future__ import annotations

import functools
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_hiertrain.mirror.attributes import Attributes
from lightning_hiertrain.mirror.loggers import LoggerCalls
from lightning_hiertrain.mirror.metrics import find_metrics, load_metric, mark, metric_changes
from lightning_hiertrain.mirror.recording import Recording
from lightning_hiertrain.mirror.reductions import reduction
from lightning_hiertrain.mirror.untraced import without_trace
from lightning_hiertrain.mirror.values import Carrier, carry_or_none, placed
from lightning_hiertrain.partition.calls import aside
from lightning_hiertrain.partition.counts import RowCount

log = logging.getLogger(__name__)

OWNER_HOOKS = (
    *(
        f"on_{stage}_{event}"
        for stage in ("train", "validation", "test", "predict")
        for event in ("batch_start", "batch_end", "epoch_end", "end")
    ),
    *(
        f"on_{stage}_{event}"
        for stage in ("validation", "test", "predict")
        for event in ("start", "epoch_start")
    ),
    "on_before_zero_grad",
)
"""LightningModule hooks that run on the owner alone.

They may use the batch or what a step left in the module, and neither is whole elsewhere.
`on_before_zero_grad` is the usual place for a moving average of the weights, and only the owner has
all of them. Weights that are swapped in for a validation are swapped out where it ends. Hooks that
come before training (`setup`, `configure_*`, `on_fit_start`, `on_train_start`) run everywhere, and
so does `on_train_epoch_start`. Those that the precision plugin calls (`on_before_backward`,
`on_after_backward`, `on_before_optimizer_step`, `configure_gradient_clipping`) run on the owner
alone by themselves: record around its optimizer step.
"""

_RunHook = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
_LOG_PARAMETERS = tuple(inspect.signature(LightningModule.log).parameters)[3:]
_SYNC_WARNING = r"It is recommended to use `self\.log\(.*sync_dist=True\)`"


class Mirror:
    """Records on the owner and replays elsewhere.

    Args:
        module: The user's LightningModule, attached to a Trainer.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._attributes = Attributes()
        self._modules: dict[str, nn.Module] = {}
        self._num_children = -1
        self._metrics: dict[str, Metric] = {}
        self._available_fns: dict[int, tuple[Metric, Any]] = {}
        self._recording: Recording | None = None
        self._replaying = False
        self._in_user_code = False
        self._log_depth = 0
        self._hooks: dict[str, Any] = {}
        self._warned: set[str] = set()
        trainer = module._trainer
        self.loggers = LoggerCalls(
            () if trainer is None else trainer.loggers,
            writes=trainer is None or trainer.is_global_zero,
        )
        warnings.filterwarnings("ignore", message=_SYNC_WARNING)
        self._filter = warnings.filters[0]

    @property
    def trainer(self) -> Trainer:
        """The Trainer of the module."""
        trainer: Trainer = self._module.trainer
        return trainer

    @property
    def stops(self) -> bool:
        """Whether the Trainer has been asked to stop."""
        return self._module._trainer is not None and self._module._trainer.should_stop

    @property
    def unmirrored(self) -> frozenset[str]:
        """Attributes that changed on the owner and could not travel: elsewhere they are stale."""
        return frozenset(self._attributes.unmirrored)

    @contextmanager
    def record(
        self,
        batch_size: int | None = None,
        own_samples: int | None = None,
        *,
        surrounding: bool = False,
    ) -> Iterator[Recording]:
        """Records what the module's code does while the context is open.

        Inside another recording it goes on with that one.

        Args:
            batch_size: Samples in the mini-batch, by which Lightning weighs epoch means; `None`
                leaves Lightning to infer it.
            own_samples: Rows of the mini-batch that the owner's step sees as its input. A
                `self.log(batch_size=len(x))` of that number means the mini-batch, and is corrected.
            surrounding: Whether the context is around Lightning's own code, such as an optimizer
                step, rather than a step or hook. Hooks met there still go through `wrap_hooks`'s
                `run`; a hook that the user's code calls by itself does not.
        """
        self.set_batch_size(batch_size)
        was_in_user_code, self._in_user_code = self._in_user_code, not surrounding
        try:
            if self._recording is not None:
                self._recording.batch_size = batch_size or self._recording.batch_size
                self._recording.own_samples = own_samples
                yield self._recording
            else:
                recording = Recording(
                    self,
                    batch_size=batch_size,
                    own_samples=own_samples,
                    goes_on=surrounding,
                )
                with self._patched_log(recording):
                    yield recording
        finally:
            self._in_user_code = was_in_user_code

    def without_trace(self) -> AbstractContextManager[None]:
        """Returns a context in which the module's code changes no attribute and logs nothing."""
        self._refresh()
        return without_trace(self._module, self._attributes)

    def replay(self, payload: dict[str, Any]) -> Any:
        """Does what the owner's code did.

        Args:
            payload: What `Recording.payload` returned on the owner.

        Returns:
            What the owner's step or hook returned, its tensors detached, on the module's device.
        """
        module = self._module
        self._refresh()
        self.set_batch_size(payload["batch_size"])
        self._attributes.apply(payload["attributes"], module.device)
        for path, state in payload["metrics"].items():
            load_metric(self._metric_at(path), state)
        fx_before = module._current_fx_name
        self._replaying = True
        try:
            for fx, name, value, kwargs in payload["logs"]:
                module._current_fx_name = fx
                self._replay_log(name, value, kwargs)
        finally:
            module._current_fx_name = fx_before
            self._replaying = False
        self.loggers.replay(payload["loggers"])
        if payload["stops"] and module._trainer is not None:
            module._trainer.should_stop = True
        return placed(payload["output"], module.device)

    def set_batch_size(self, batch_size: int | None) -> None:
        """Tells Lightning the size of the mini-batch, for epoch means of what this batch logs.

        Args:
            batch_size: The size; `None` changes nothing.
        """
        trainer = self._module._trainer
        results = trainer._results if trainer is not None and batch_size is not None else None
        if results is not None:
            results.batch_size = batch_size

    def wrap_hooks(self, run: _RunHook) -> tuple[str, ...]:
        """Lets `run` decide where the user's hooks run.

        Args:
            run: Called as `run(name, original, args, kwargs)` in place of the hook; it returns the
                hook's result.

        Returns:
            The hooks that are overridden and now go through `run`. The others stay untouched.
        """
        values = vars(self._module)
        for name in OWNER_HOOKS:
            if name in self._hooks or not hasattr(LightningModule, name):
                continue
            if is_overridden(name, self._module):
                original = getattr(self._module, name)
                self._hooks[name] = values.get(name)
                values[name] = self._wrapped(name, original, run)
        return tuple(self._hooks)

    def close(self) -> None:
        """Takes back every change to the module, its metrics and the warning filters.

        The mirror may be used again; then it finds the module's metrics anew.
        """
        for name, shadowed in self._hooks.items():
            _restore(vars(self._module), name, shadowed)
        self._hooks.clear()
        for metric, function in self._available_fns.values():
            metric.distributed_available_fn = function
        self._available_fns.clear()
        self._num_children = -1
        if self._filter in warnings.filters:
            warnings.filters.remove(self._filter)  # type: ignore[attr-defined]

    def snapshot(self) -> tuple[Any, ...]:
        """Returns the module's attributes and metric states as they are now."""
        self._refresh()
        metrics = [mark(path, metric) for path, metric in self._metrics.items()]
        return self._attributes.snapshot(), metrics

    def changes(self, before: tuple[Any, ...]) -> dict[str, Any]:
        """Returns what is different from a snapshot, fit to travel."""
        attributes, metrics = before
        changed = {item.path: metric_changes(item) for item in metrics}
        return {
            "attributes": self._attributes.changes(attributes),
            "metrics": {path: state for path, state in changed.items() if state is not None},
        }

    def large_changes(self) -> list[dict[str, Any]]:
        """Returns the attributes that have changed and are too large to travel after each step."""
        return self._attributes.large_changes()

    def adopt_attributes(self, changes: list[dict[str, Any]]) -> None:
        """Makes the changes that `large_changes` returned on another tier."""
        self._refresh()
        self._attributes.apply(changes, self._module.device)

    def carry_logged(self, value: Any) -> Any:
        """Returns a value given to `self.log`, fit to travel."""
        if isinstance(value, Metric):
            return {"path": self._metric_path(value), "cache": carry_or_none(value._forward_cache)}
        if isinstance(value, Tensor):
            return value.detach().clone()
        if isinstance(value, np.generic):
            return value.item()
        return value if isinstance(value, bool | int | float) else float(value)

    def carry_output(self, output: Any) -> Any:
        """Returns an output fit to travel, with one warning for each type of leaf that is not."""

        def substitute(cls: type) -> None:
            if cls.__qualname__ not in self._warned:
                self._warned.add(cls.__qualname__)
                log.warning(
                    "the output of a step holds a %s, which cannot travel to other tiers; "
                    "callbacks there see None in its place",
                    cls.__qualname__,
                )

        return Carrier(substitute=substitute).carry(output)

    @contextmanager
    def _patched_log(self, recording: Recording) -> Iterator[None]:
        values = vars(self._module)
        shadowed = values.get("log")
        values["log"] = functools.partial(self._record_log, recording, self._module.log)
        self._recording = recording
        try:
            with self.loggers.record():
                yield
        finally:
            self._recording = None
            _restore(values, "log", shadowed)

    def _refresh(self) -> None:
        if self._num_children == sum(len(m._modules) for m in self._modules.values()):
            return
        self._modules = dict(self._module.named_modules())
        self._num_children = sum(len(m._modules) for m in self._modules.values())
        self._attributes.watch(self._modules)
        self._metrics = find_metrics(self._modules)
        for metric in self._metrics.values():
            if id(metric) not in self._available_fns:
                self._available_fns[id(metric)] = (metric, metric.distributed_available_fn)
                metric.distributed_available_fn = _never

    def _metric_path(self, metric: Metric) -> str:
        for path, known in (*self._metrics.items(), *find_metrics(self._modules).items()):
            if known is metric:
                return path
        raise ValueError(
            f"the logged {type(metric).__name__} is not an attribute of "
            f"{type(self._module).__name__}; other tiers cannot find it: make it one"
        )

    def _metric_at(self, path: str) -> Metric:
        if path not in self._metrics:
            self._metrics = find_metrics(self._modules)
        if path not in self._metrics:
            raise ValueError(
                f"there is no metric {path!r} in {type(self._module).__name__} on this tier, only "
                f"{sorted(self._metrics)}; create metrics in __init__, setup or configure_model, "
                f"which run on every tier"
            )
        return self._metrics[path]

    def _record_log(
        self,
        recording: Recording,
        original: Callable[..., Any],
        name: str,
        value: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        kwargs |= dict(zip(_LOG_PARAMETERS, args, strict=False))
        given, meant = kwargs.get("batch_size"), recording.batch_size
        if isinstance(given, RowCount):
            kwargs["batch_size"] = int(given)
        elif given is not None and meant is not None and given == recording.own_samples:
            kwargs["batch_size"] = meant
        if isinstance(value, RowCount):
            value = int(value)
        with aside():
            self._log_depth += 1
            try:
                original(name, value, **kwargs)
            finally:
                self._log_depth -= 1
            if self._log_depth == 0:
                recording.add_log(self._module._current_fx_name, name, value, kwargs)

    def _replay_log(self, name: str, value: Any, kwargs: dict[str, Any]) -> None:
        kwargs = dict(kwargs)
        if "reduce_fx" in kwargs:
            kwargs["reduce_fx"] = reduction(kwargs["reduce_fx"])
        if not isinstance(value, dict):
            self._module.log(name, placed(value, self._module.device), **kwargs)
            return
        metric = self._metric_at(value["path"])
        final = metric._forward_cache
        metric._forward_cache = placed(value["cache"], metric.device)
        try:
            self._module.log(name, metric, **kwargs)
        finally:
            metric._forward_cache = final

    def _wrapped(
        self, name: str, original: Callable[..., Any], run: _RunHook
    ) -> Callable[..., Any]:
        @functools.wraps(original)
        def hook(*args: Any, **kwargs: Any) -> Any:
            if self._in_user_code or self._replaying:
                return original(*args, **kwargs)
            return run(name, original, args, kwargs)

        return hook


def _never() -> bool:
    return False


def _restore(values: dict[str, Any], key: str, shadowed: Any) -> None:
    if shadowed is None:
        values.pop(key, None)
    else:
        values[key] = shadowed
