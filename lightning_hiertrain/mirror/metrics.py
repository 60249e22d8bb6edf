"""The states of torchmetrics objects, which live neither in attributes nor in the checkpoint.

A metric is updated in the owner's step alone, but every tier computes and resets it at an epoch's
end. So after each step its states travel, and no tier lets it synchronise by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_hiertrain.mirror.values import Carrier, carry_or_none, placed


class _ProbeMetric(Metric):
    def update(self) -> None:
        """Does nothing; only the attributes that every metric has are wanted."""

    def compute(self) -> None:
        """Does nothing."""


METRIC_INTERNAL = frozenset(vars(_ProbeMetric()))
"""Attributes that torchmetrics itself keeps in every metric."""


@dataclass(frozen=True, kw_only=True)
class MetricMark:
    """A metric before a step."""

    path: str
    metric: Metric
    counters: tuple[Any, ...]
    states: dict[str, tuple[Any, Any]]


def find_metrics(modules: Mapping[str, nn.Module]) -> dict[str, Metric]:
    """Returns every metric by path, those in plain lists and dictionaries included."""
    found: dict[str, Metric] = {}
    for path, module in modules.items():
        if isinstance(module, Metric):
            found[path] = module
            continue
        prefix = f"{path}." if path else ""
        for key, value in vars(module).items():
            if type(value) is dict and key not in ("_modules", "_parameters", "_buffers"):
                entries: Any = value.items()
            elif type(value) in (list, tuple):
                entries = enumerate(value)
            else:
                continue
            for index, item in entries:
                if isinstance(item, Metric):
                    found[f"{prefix}{key}[{index!r}]"] = item
    return found


def mark(path: str, metric: Metric) -> MetricMark:
    """Remembers what a metric holds now."""
    states = {}
    for name in metric._defaults:
        value = getattr(metric, name)
        states[name] = (value.copy(), None) if isinstance(value, list) else (value, _version(value))
    return MetricMark(path=path, metric=metric, counters=_counters(metric), states=states)


def metric_changes(before: MetricMark) -> dict[str, Any] | None:
    """Returns what a metric holds now, `None` if it is what it held before."""
    metric = before.metric
    counted = all(a is b for a, b in zip(_counters(metric), before.counters, strict=True))
    if counted and not _states_changed(metric, before.states):
        return None
    carrier = Carrier()
    states: dict[str, Any] = {}
    grown: dict[str, Any] = {}
    for name in metric._defaults:
        value, (old, _) = getattr(metric, name), before.states.get(name, (None, None))
        if isinstance(value, list) and isinstance(old, list) and _appended(value, old):
            grown[name] = (len(old), carrier.carry(value[len(old) :]))
        else:
            states[name] = carrier.carry(value)
    return {
        "update_count": metric._update_count,
        "computed": carry_or_none(metric._computed),
        "forward_cache": carry_or_none(metric._forward_cache),
        "states": states,
        "grown": grown,
    }


def load_metric(metric: Metric, changes: Mapping[str, Any]) -> None:
    """Makes a metric hold what another tier's `metric_changes` returned."""
    for name, value in changes["states"].items():
        setattr(metric, name, placed(value, metric.device))
    for name, (length, items) in changes["grown"].items():
        setattr(metric, name, [*getattr(metric, name)[:length], *placed(items, metric.device)])
    metric._update_count = changes["update_count"]
    metric._computed = placed(changes["computed"], metric.device)
    metric._forward_cache = placed(changes["forward_cache"], metric.device)


def _counters(metric: Metric) -> tuple[Any, ...]:
    return (metric._update_count, metric._computed, metric._forward_cache)


def _version(value: Any) -> int | None:
    if not isinstance(value, Tensor) or value.is_inference():
        return None
    return value._version


def _states_changed(metric: Metric, before: dict[str, tuple[Any, Any]]) -> bool:
    for name in metric._defaults:
        value, (old, version) = getattr(metric, name), before.get(name, (None, None))
        if isinstance(value, list):
            if not isinstance(old, list) or len(value) != len(old):
                return True
        elif value is not old or _version(value) != version:
            return True
    return False


def _appended(value: list[Any], old: list[Any]) -> bool:
    # Every forward clones the lists, so identity says nothing; list states only grow or are reset.
    if not old or len(value) < len(old):
        return False
    return all(
        isinstance(value[i], Tensor)
        and isinstance(old[i], Tensor)
        and torch.equal(value[i], old[i])
        for i in (0, len(old) - 1)
    )
