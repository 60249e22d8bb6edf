"""What is trained and how fast: settings that a hook on the owner may change in mid-run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_hiertrain.errors import HierTrainError
from lightning_hiertrain.execution.optimizers import KERNELS


class TrainedSettings:
    """Which parameters are trained, and the numbers in the optimizers' groups, as they are now.

    Args:
        module: The user's module.
        optimizers: Its optimizers.
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._module = module
        self._optimizers = optimizers
        self._before = self._now()

    def changed(self) -> dict[str, Any] | None:
        """Returns them as they are now, `None` if nothing has changed."""
        now = self._now()
        return None if now == self._before else now

    def adopt(self, changed: Mapping[str, Any] | None) -> None:
        """Makes them what `changed` returned on another tier.

        Raises:
            HierTrainError: If the optimizers have other groups than there.
        """
        if changed is None:
            return
        trained = set(changed["trained"])
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad != (name in trained):
                parameter.requires_grad_(name in trained)
        for optimizer, groups in zip(self._optimizers, changed["groups"], strict=True):
            if len(groups) != len(optimizer.param_groups):
                raise HierTrainError(
                    f"a hook has left the optimizer {len(groups)} parameter groups on the owner, "
                    f"here it has {len(optimizer.param_groups)}; add groups in "
                    "`on_train_epoch_start` or in a callback, which run on every tier"
                )
            for group, numbers in zip(optimizer.param_groups, groups, strict=True):
                group.update(numbers)

    def _now(self) -> dict[str, Any]:
        return {
            "trained": [name for name, p in self._module.named_parameters() if p.requires_grad],
            "groups": [
                [_numbers(group) for group in optimizer.param_groups]
                for optimizer in self._optimizers
            ],
        }


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in group.items()
        if key not in KERNELS
        and (
            isinstance(value, bool | int | float)
            or (isinstance(value, tuple) and all(isinstance(x, int | float) for x in value))
        )
    }
