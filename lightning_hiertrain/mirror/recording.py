"""One recording of what a user's step or hook does to the outside."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_hiertrain.mirror.reductions import reduction_name

if TYPE_CHECKING:
    from lightning_hiertrain.mirror.mirroring import Mirror


class Recording:
    """What the code that runs meanwhile does to the outside. `Mirror.record` makes it."""

    def __init__(
        self,
        mirror: Mirror,
        *,
        batch_size: int | None,
        own_samples: int | None,
        goes_on: bool,
    ) -> None:
        self.batch_size = batch_size
        self.own_samples = own_samples
        self._goes_on = goes_on
        self._mirror = mirror
        self._calls: list[list[Any]] = []
        self._before: tuple[Any, ...] | None = mirror.snapshot()

    def payload(self, output: Any = None, *, ends: bool = False) -> dict[str, Any]:
        """Returns what was recorded, fit to travel.

        A surrounding recording gives any number of payloads, each with what came after the one
        before; any other gives one, at its end.

        Args:
            output: What the step or hook returned. Leaves that cannot travel become `None`.
            ends: Whether a surrounding recording gives no more payloads.

        Raises:
            RuntimeError: If the recording is over.
        """
        if self._before is None:
            raise RuntimeError("this recording has given its payload; begin another one")
        changes = self._mirror.changes(self._before)
        calls, self._calls = self._calls, []
        self._before = self._mirror.snapshot() if self._goes_on and not ends else None
        return {
            "logs": [
                (fx, name, value.cpu() if isinstance(value, Tensor) else value, kwargs)
                for fx, name, value, kwargs in calls
            ],
            **changes,
            "loggers": self._mirror.loggers.take(),
            "stops": self._mirror.stops,
            "output": self._mirror.carry_output(output),
            "batch_size": self.batch_size,
        }

    def add_log(self, fx: str | None, name: str, value: Any, kwargs: dict[str, Any]) -> None:
        """Keeps one call of `self.log` that Lightning has accepted."""
        carried = {key: item for key, item in kwargs.items() if key != "sync_dist_group"}
        if "reduce_fx" in carried:
            carried["reduce_fx"] = reduction_name(carried["reduce_fx"], name)
        self._calls.append([fx, name, self._mirror.carry_logged(value), carried])
