"""A copy of the user's module whose steps leave no trace, for tracing and for measuring."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.optim import Optimizer

from lightning_hiertrain.partition.calls import tensors_in
from lightning_hiertrain.partition.isolation import same_chance

_OF_TORCH = vars(torch.nn.Module()).keys()
_CHANGEABLE = (list, dict, set, deque, Tensor)
_LOOKED_INTO = 10_000
"""A longer container is copied as a whole, not what it contains."""


class Sandbox:
    """Runs training steps of a copy of the module.

    No log, no metric, no gradient and no random number reaches the original.

    Args:
        module: The user's module, attached to its trainer.
        optimizers: Its optimizers, copied along so that a step of them can be timed.
        context: Makes the context in which steps run, for example that of the precision plugin.
    """

    def __init__(
        self,
        module: LightningModule,
        optimizers: Sequence[Optimizer],
        context: Callable[[], Any],
    ) -> None:
        self._trainer = module.trainer
        self._context = context
        memo = _shared(module)
        self.module, self.optimizers = copy.deepcopy((module, list(optimizers)), memo)
        for child in self.module.modules():
            # A LightningModule's copy has no trainer, but its step may ask it for the epoch.
            if isinstance(child, LightningModule):
                child._trainer = self._trainer
        self._logged: list[Any] = []
        vars(self.module)["log"] = self._log
        for parameter in self.module.parameters():
            parameter.grad = None
        self._attributes = _Attributes(self.module)

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """A context in which loggers are deaf and random numbers are given back at the end.

        A step that asks the Trainer to stop is not heard either.
        """
        loggers, stops = self._trainer._loggers, self._trainer.should_stop
        self._trainer._loggers = [DummyLogger() for _ in loggers]
        try:
            with same_chance():
                yield
        finally:
            self._trainer._loggers = loggers
            self._trainer.should_stop = stops

    def training_step(self, batch: Any) -> tuple[Any, ...]:
        """Runs one training step of the copy.

        Returns:
            The loss, then everything else that outlives the step: its output, the logged values and
            the tensors kept as attributes.
        """
        self._logged.clear()
        output = self._run(batch)
        loss = _loss_of(output)
        # Not the buffers: counters in them differ from step to step.
        kept = [
            value
            for child in self.module.modules()
            for key, value in vars(child).items()
            if key not in _OF_TORCH
        ]
        return loss, output, list(self._logged), list(tensors_in(kept))

    def loss(self, batch: Any) -> Any:
        """Runs one training step of the copy and returns nothing but its loss."""
        self._logged.clear()
        return _loss_of(self._run(batch))

    def _run(self, batch: Any) -> Any:
        with torch._C.DisableTorchFunction():  # what is done here is not part of the step
            self._attributes.restore()
        step = self.module.training_step
        with_index = is_param_in_hook_signature(step, "batch_idx", min_args=2)
        with self._context():
            return step(batch, 0) if with_index else step(batch)

    def _log(
        self, name: str, value: Any, *args: Any, batch_size: int | None = None, **kwargs: Any
    ) -> None:
        self._logged.append((value, batch_size))


class _Attributes:
    """The plain attributes of a module, put back before each step.

    Metrics add up and lists grow from step to step (`self.outputs.append(loss)`); two steps on the
    same samples shall do the same.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        tensors = (*module.parameters(), *module.buffers())
        self._untouched = {id(tensor): tensor for tensor in tensors}
        self._kept = []
        for child in module.modules():
            values = vars(child)
            plain = {key: value for key, value in values.items() if key not in _OF_TORCH}
            changeable = {
                key: self._copy(value)
                for key, value in plain.items()
                if isinstance(value, _CHANGEABLE)
            }
            self._kept.append((values, plain, changeable))

    def restore(self) -> None:
        for values, plain, changeable in self._kept:
            self._keep_made(values, plain, changeable)
            for key in values.keys() - plain.keys() - _OF_TORCH:
                del values[key]
            values.update(plain)
            values.update((key, self._copy(value)) for key, value in changeable.items())

    def _keep_made(
        self, values: dict[str, Any], plain: dict[str, Any], changeable: dict[str, Any]
    ) -> None:
        """Keeps tensors that a step makes once and finds again: tables of positions, masks."""
        for key, value in values.items():
            is_new = key not in _OF_TORCH and plain.get(key) is None
            if is_new and isinstance(value, Tensor) and not value.requires_grad:
                plain[key] = value
                changeable[key] = self._copy(value)

    def _copy(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            kept = value.requires_grad or id(value) in self._untouched
            return value if kept else value.clone()
        if not isinstance(value, _CHANGEABLE):
            return value
        if len(value) <= _LOOKED_INTO:
            if isinstance(value, list):
                return [self._copy(item) for item in value]
            if isinstance(value, dict):
                copied = copy.copy(value)
                copied.update((key, self._copy(item)) for key, item in value.items())
                return copied
        return copy.copy(value)


def _loss_of(output: Any) -> Any:
    return output.get("loss") if isinstance(output, Mapping) else output


def _shared(module: LightningModule) -> dict[int, Any]:
    """Returns a memo for `deepcopy` that shares what must not or cannot be copied."""
    memo: dict[int, Any] = {id(module._trainer): module._trainer}
    if module._fabric is not None:
        memo[id(module._fabric)] = module._fabric
    for child in module.modules():
        for value in vars(child).values():
            if id(value) in memo or isinstance(value, (Tensor, torch.nn.Module)):
                continue
            try:
                copy.deepcopy(value, dict(memo))
            except Exception:
                memo[id(value)] = value
    return memo
