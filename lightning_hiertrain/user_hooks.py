"""What a user's hooks and callbacks may do besides the step, and what that asks of the tiers.

After a step the owner alone has all weights. Hooks and callbacks that read weights need them where
they run, and those that change weights (clamping, averaging, swapping) must change them everywhere.
Which ones do cannot be told from outside. Those that Lightning itself brings are known here; any
other one is taken to do both at the ends of epochs and to change weights between steps, and is
watched for whether it reads them there.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import LambdaCallback, StochasticWeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.overrides import TorchFunctionMode

from lightning_hiertrain.agreement import mentions
from lightning_hiertrain.errors import HierTrainError
from lightning_hiertrain.partition.calls import Function, function_name, tensors_in
from lightning_hiertrain.partition.withheld import ASKED
from lightning_hiertrain.session import Session

log = logging.getLogger(__name__)

_LIBRARIES = ("lightning", "pytorch_lightning", "lightning_hiertrain")
_USING_WEIGHTS = (LambdaCallback, StochasticWeightAveraging)
_AT_EACH_STEP = tuple(
    getattr(lightning_callbacks, name)
    for name in ("WeightAveraging",)
    if hasattr(lightning_callbacks, name)
)
_SPEAKING_OF_WEIGHTS = (
    *("state_dict", "parameters", "named_parameters", "weight", "bias"),
    *("eval", "forward", "predict_step"),
)
"""Names that code mentions which uses weights, perhaps not in the first step yet."""
_ALL_WEIGHTS = (
    "the callback `%s` uses the weights between steps: all weights travel to all tiers after every "
    "step, which takes time; if the end of an epoch will do, use `on_train_epoch_end`"
)
_BETWEEN_STEPS = ("on_train_batch_start", "on_train_batch_end", "optimizer_step")
_AT_EPOCHS = (
    *("on_train_epoch_start", "on_train_epoch_end", "on_train_end"),
    *(
        f"on_validation_{event}"
        for event in ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end")
    ),
    *("on_validation_model_eval", "on_validation_model_train", "on_save_checkpoint"),
)


class UserHooks:
    """The hooks of one run.

    Args:
        trainer: The run's trainer.
        module: The user's module.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        found: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        foreign = [callback for callback in found if _uses_weights(callback)]

        def overrides(names: Iterable[str], callbacks: Iterable[Callback]) -> bool:
            return any(
                is_overridden(name, module) for name in names if hasattr(LightningModule, name)
            ) or any(
                is_overridden(name, callback, Callback)
                for name in names
                if hasattr(Callback, name)
                for callback in callbacks
            )

        self.read_gradients = overrides(["on_after_backward"], found)
        """Whether gradients must be complete after each backward, also while they accumulate."""
        self.change_weights = overrides((*_BETWEEN_STEPS, *_AT_EPOCHS), foreign)
        """Whether weights may be others after a step than those that the step has made."""
        self.read_weights_at_epochs = overrides(_AT_EPOCHS, foreign)
        """Whether all tiers need all weights at the ends of epochs and before validation."""
        self.between_steps = [
            (callback, name)
            for callback in foreign
            if not isinstance(callback, _AT_EACH_STEP)
            for name in _BETWEEN_STEPS
            if hasattr(Callback, name) and is_overridden(name, callback, Callback)
        ]
        """Callbacks that may need all weights after each step, and the names of the hooks."""
        speaking = [x for x, _ in self.between_steps if mentions(x, _SPEAKING_OF_WEIGHTS)]
        if speaking:
            log.warning(_ALL_WEIGHTS, type(speaking[0]).__name__)
        self.read_weights_at_steps = bool(speaking) or any(
            isinstance(x, _AT_EACH_STEP) for x in found
        )
        """Whether all tiers need all weights after each step."""


class BringWeights(Callback):
    """Gives all tiers all weights before other callbacks read them.

    Callbacks of the user's own that run between steps are watched: if one has used a weight after
    the first step, on any tier, all weights travel after every step. If none has, one that does so
    later is stopped with an error.

    Args:
        session: Returns this tier's part in the run.
    """

    def __init__(self, session: Callable[[], Session]) -> None:
        self._session = session
        self._at_steps = False
        self._undecided = False
        self._steps = 0
        self._used: str | None = None
        self._watched: list[tuple[Callback, str, Any]] = []
        self._trainer: Trainer | None = None

    def attach(self, trainer: Trainer, hooks: UserHooks) -> None:
        """Joins a trainer's callbacks, as the first one, if others read weights."""
        self.detach()
        self._at_steps, self._steps, self._used = hooks.read_weights_at_steps, 0, None
        self._undecided = not self._at_steps and bool(hooks.between_steps)
        if not (self._at_steps or self._undecided or hooks.read_weights_at_epochs):
            return
        self._trainer = trainer
        trainer.callbacks.insert(0, self)  # type: ignore[attr-defined]
        for callback, name in hooks.between_steps:
            self._watched.append((callback, name, vars(callback).get(name)))
            setattr(callback, name, self._watching(callback, getattr(callback, name)))

    def detach(self) -> None:
        """Leaves the trainer's callbacks."""
        for callback, name, own in self._watched:
            vars(callback).pop(name)
            if own is not None:
                setattr(callback, name, own)
        self._watched.clear()
        if self._trainer is not None:
            callbacks: list[Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
            callbacks[:] = [callback for callback in callbacks if callback is not self]
            self._trainer = None

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        """Comes before those that are watched."""
        self._steps += 1
        if self._undecided and self._steps > 1:
            self._undecided = False
            answers = self._session().collectives.all_gather(self._used)
            users = [answer for answer in answers if answer is not None]
            self._at_steps = bool(users)
            if users:
                log.warning(_ALL_WEIGHTS, users[0])
        if self._at_steps or self._undecided:
            self._session().bring_weights_everywhere()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Comes first of all callbacks."""
        self._session().bring_weights_everywhere()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Comes before any tier's callback looks at the weights."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._session().bring_weights_everywhere()

    def _watching(self, callback: Callback, hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def watched(trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> Any:
            if self._at_steps:
                return hook(trainer, pl_module, *args, **kwargs)
            with _Watch(pl_module, functools.partial(self._note_use, type(callback).__name__)):
                return hook(trainer, pl_module, *args, **kwargs)

        return watched

    def _note_use(self, callback: str) -> None:
        if self._undecided:
            self._used = callback
            return
        session = self._session()
        if not session.is_owner:
            raise HierTrainError(
                f"the callback `{callback}` uses the weights between steps on tier "
                f"{session.tier!r}; after a step only tier {session.owner!r} has all of them. Use "
                "them in `on_train_epoch_end`, or after every step from the first one on: then all "
                "weights travel to all tiers after every step"
            )


class _Watch(TorchFunctionMode):
    """Tells of each use of a module's parameters."""

    def __init__(self, module: LightningModule, used: Callable[[], None]) -> None:
        super().__init__()
        self._parameters = {id(parameter) for parameter in module.parameters()}
        self._used = used

    def __torch_function__(
        self,
        func: Function,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function_name(func) not in ASKED and any(
            id(tensor) in self._parameters for tensor in tensors_in((args, kwargs))
        ):
            self._used()
        return func(*args, **kwargs)


def _uses_weights(callback: Callback) -> bool:
    if type(callback).__module__.partition(".")[0] not in _LIBRARIES:
        return True
    return isinstance(callback, (*_USING_WEIGHTS, *_AT_EACH_STEP))
