"""What is asked of an accelerator, whatever its kind: to be waited for, and its random numbers."""

from __future__ import annotations

from typing import Any

import torch


def synchronise(device: torch.device) -> None:
    """Waits until a device has done all that it was given to do; a CPU always has."""
    own = torch.accelerator.current_accelerator()
    if device.type != "cpu" and own is not None and own.type == device.type:
        torch.accelerator.synchronize(device)


def random_states() -> Any:
    """Returns the states of the accelerators' random number generators, `None` for none."""
    module = _in_use()
    if module is None:
        return None
    if hasattr(module, "get_rng_state_all"):
        return module.get_rng_state_all()
    return module.get_rng_state()


def set_random_states(states: Any) -> None:
    """Puts back what `random_states` has returned."""
    module = _in_use()
    if states is None or module is None:
        return
    if hasattr(module, "set_rng_state_all"):
        module.set_rng_state_all(states)
    else:
        module.set_rng_state(states)


def seed_accelerators(number: int) -> None:
    """Seeds the accelerators' random number generators."""
    module = _in_use()
    if module is not None:
        getattr(module, "manual_seed_all", module.manual_seed)(number)


def _in_use() -> Any:
    """Returns torch's module for this machine's kind of accelerator, if anything runs on it."""
    device = torch.accelerator.current_accelerator()
    if device is None or device.type == "cpu":
        return None
    module: Any = torch.get_device_module(device)
    is_in_use = getattr(module, "is_initialized", torch.accelerator.is_available)
    return module if is_in_use() else None
