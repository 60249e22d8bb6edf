"""Weights that a tier needs no memory for, because its own are outdated and no layer of it runs."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Iterator

import torch
from torch import nn

log = logging.getLogger(__name__)

_HOLDERS = 2
"""Who refers to a parameter's memory if nothing else shares it: the parameter and who asks."""


class Unheld:
    """The parameters of one tier that hold no memory now.

    In the place of each stands one number, expanded to its shape: it is not a number, so that who
    reads an outdated weight by mistake notices. The parameter itself stays the same object, and so
    do the optimizer's and the user's references to it.

    Args:
        module: The user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._strides: dict[str, tuple[int, ...]] = {}
        """Of the memory that a parameter had, by its name."""

    def release(self, names: Iterable[str]) -> None:
        """Frees the memory of parameters, but for what they share with other tensors."""
        for name, parameter in self._named(set(names).difference(self._strides)):
            if parameter.numel() <= 1 or _is_shared(parameter):
                continue
            self._strides[name] = parameter.stride()
            parameter.data = parameter.new_full((), _number(parameter)).expand(parameter.shape)

    def hold(self, names: Iterable[str]) -> None:
        """Gives parameters memory again, with whatever is in it."""
        for name, parameter in self._named(self._strides.keys() & set(names)):
            stride = self._strides.pop(name)
            parameter.data = torch.empty_strided(
                parameter.shape, stride, dtype=parameter.dtype, device=parameter.device
            )

    def close(self) -> None:
        """Gives all of them memory of their own, for a module that goes on being used."""
        left = list(self._named(set(self._strides)))
        if not left:
            return
        log.warning(
            "training has not come to its end: this tier has no newest weights of %d parameters "
            "(%s, ...), they are not numbers now; load a checkpoint",
            len(left),
            left[0][0],
        )
        self.hold(name for name, _ in left)
        with torch.no_grad():
            for _, parameter in left:
                parameter.fill_(_number(parameter))

    def _named(self, names: Collection[str]) -> Iterator[tuple[str, nn.Parameter]]:
        if not names:
            return iter(())
        return ((name, x) for name, x in self._module.named_parameters() if name in names)


def _number(parameter: nn.Parameter) -> float:
    """Returns what stands for a weight that is not here."""
    return math.nan if parameter.is_floating_point() or parameter.is_complex() else 0


def _is_shared(parameter: nn.Parameter) -> bool:
    """Tells whether other tensors lie in the same memory, which would then not be freed."""
    try:
        holders = torch._C._storage_Use_Count(parameter.untyped_storage()._cdata)
    except (AttributeError, NotImplementedError, RuntimeError):
        return True  # a tensor without memory of its own kind
    return bool(holders != _HOLDERS)
