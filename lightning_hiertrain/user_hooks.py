"""What a user's hooks and callbacks may do besides the step, and what that asks of the tiers.

After a step the owner alone has all weights. Hooks and callbacks that read weights need them where
they run, and those that change weights (clamping, averaging, swapping) must change them everywhere.
Which ones do cannot be told from outside, so those that Lightning itself brings are known here and
any other one is taken to do both at the ends of epochs, and to change weights between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import LambdaCallback, StochasticWeightAveraging
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_hiertrain.session import Session

_LIBRARIES = ("lightning", "pytorch_lightning", "lightning_hiertrain")
_USING_WEIGHTS = (LambdaCallback, StochasticWeightAveraging)
_AT_EACH_STEP = tuple(
    getattr(lightning_callbacks, name)
    for name in ("WeightAveraging",)
    if hasattr(lightning_callbacks, name)
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
        self.read_weights_at_steps = any(isinstance(x, _AT_EACH_STEP) for x in found)
        """Whether all tiers need all weights after each step."""


class BringWeights(Callback):
    """Gives all tiers all weights before other callbacks read them.

    Args:
        session: Returns this tier's part in the run.
    """

    def __init__(self, session: Callable[[], Session]) -> None:
        self._session = session
        self._at_steps = False
        self._trainer: Trainer | None = None

    def attach(self, trainer: Trainer, hooks: UserHooks) -> None:
        """Joins a trainer's callbacks, as the first one, if others read weights."""
        self.detach()
        self._at_steps = hooks.read_weights_at_steps
        if self._at_steps or hooks.read_weights_at_epochs:
            self._trainer = trainer
            trainer.callbacks.insert(0, self)  # type: ignore[attr-defined]

    def detach(self) -> None:
        """Leaves the trainer's callbacks."""
        if self._trainer is not None:
            callbacks: list[Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
            callbacks[:] = [callback for callback in callbacks if callback is not self]
            self._trainer = None

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        """Follows a step, of which Lightning says whether it was one."""
        if self._at_steps:
            self._session().bring_weights_everywhere()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Comes first of all callbacks."""
        self._session().bring_weights_everywhere()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Comes before any tier's callback looks at the weights."""
        if trainer.state.fn == "fit":
            self._session().bring_weights_everywhere()


def _uses_weights(callback: Callback) -> bool:
    if type(callback).__module__.partition(".")[0] not in _LIBRARIES:
        return True
    return isinstance(callback, (*_USING_WEIGHTS, *_AT_EACH_STEP))
