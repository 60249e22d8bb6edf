"""What is trained and how fast: settings that a hook on the owner may change in mid-run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_hiertrain.errors import HierTrainError
from lightning_hiertrain.execution.optimizers import KERNELS

_Settings = tuple[list[bool], list[list[dict[str, Any]]]]


class TrainedSettings:
    """Which parameters are trained, and the numbers in the optimizers' groups.

    Args:
        parameters: The module's, by name.
        optimizers: Its optimizers.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]
    ) -> None:
        self._parameters = parameters
        self._optimizers = optimizers

    def now(self) -> _Settings:
        """Returns them as they are now, for `changed_since`."""
        trained = [parameter.requires_grad for parameter in self._parameters.values()]
        groups = [[_numbers(g) for g in optimizer.param_groups] for optimizer in self._optimizers]
        return trained, groups

    def changed_since(self, before: _Settings) -> dict[str, Any] | None:
        """Returns them, fit to travel, `None` if nothing has changed."""
        now = self.now()
        if now == before:
            return None
        trained, groups = now
        names = [
            name for name, is_trained in zip(self._parameters, trained, strict=True) if is_trained
        ]
        return {"trained": names, "groups": groups}

    def adopt(self, changed: Mapping[str, Any] | None) -> None:
        """Makes them what `changed_since` returned on another tier.

        Raises:
            HierTrainError: If the optimizers have other groups than there.
        """
        if changed is None:
            return
        trained = set(changed["trained"])
        for name, parameter in self._parameters.items():
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
