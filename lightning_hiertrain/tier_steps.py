"""The training step and its relatives as Lightning calls them: a part on every tier, one result."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from lightning_hiertrain.execution.settings import TrainedSettings
from lightning_hiertrain.tier_states import TierStates
from lightning_hiertrain.user_hooks import UserHooks


class TierSteps(TierStates):
    """The part of the strategy that runs steps."""

    _hooks: UserHooks | None = None
    _weight: int | None = None
    """The size of the batch that is evaluated, by Lightning's rules."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs this tier's part of the user's `training_step`; all tiers return its output."""
        assert self.lightning_module is not None
        training_step, rest = self.lightning_module.training_step, args[1:]

        def step(batch: Any) -> Any:
            with self._in_step():
                return training_step(batch, *rest, **kwargs)

        return self.session.run_training_step(step)

    @contextmanager
    def _in_step(self) -> Generator[None, None, None]:
        """Where training steps run: what is compiled cannot be divided, so it runs as written."""
        with torch.compiler.set_stance("force_eager"), self.precision_plugin.train_step_context():
            yield

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the user's `validation_step` on the owner; returns its output on every tier."""
        assert self.lightning_module is not None
        return self._evaluate("validation", super().validation_step, args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the user's `test_step` on the owner; returns its output on every tier."""
        return self._evaluate("test", super().test_step, args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the user's `predict_step` on the owner; returns its output on every tier."""
        return self._evaluate("prediction", super().predict_step, args, kwargs)

    def _evaluate(
        self,
        what: str,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        run = functools.partial(step, *args, **kwargs)
        session = self.session
        return session.calls.run_on(session.evaluator, run, self._weight, f"end a {what} step")

    def _run_hook(
        self, name: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        session, module = self.session, self.lightning_module
        assert module is not None
        settings = TrainedSettings(session.parameters, self.optimizers)

        def run() -> tuple[Any, Any]:
            before = settings.now()
            return original(*args, **kwargs), settings.changed_since(before)

        leader = session.owner if module.trainer.training else session.evaluator
        output, changed = session.calls.run_on(leader, run, None, f"end the hook `{name}`")
        settings.adopt(changed)
        return output

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Runs this tier's part of the backward pass; the owner ends it with all gradients."""
        module = self.lightning_module
        assert module is not None

        def on_owner(end_backward: Callable[[], None]) -> Tensor:
            loss = self.precision_plugin.pre_backward(closure_loss, module)
            self.precision_plugin.backward(loss, module, optimizer, *args, **kwargs)
            end_backward()
            return self.precision_plugin.post_backward(loss, module)

        result = self.session.run_backward(on_owner)
        return closure_loss.detach() if result is None else result

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """A context in which gradients add up on each tier and are not exchanged."""
        # Who looks at gradients after a backward shall see those of the whole mini-batch.
        self.session.accumulate(self._hooks is None or not self._hooks.read_gradients)
        try:
            yield
        finally:
            self.session.accumulate(False)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Runs the optimizer on the owner and returns the prefix workers their new weights."""

        def on_owner(whole_closure: Callable[[], Any]) -> Any:
            return super(TierSteps, self).optimizer_step(optimizer, whole_closure, model, **kwargs)

        if not self.session.is_owner:
            # What the optimizer's own `step` would note for the learning-rate scheduler.
            optimizer._opt_called = True  # type: ignore[attr-defined]
        return self.session.run_optimizer_step(closure, on_owner)
