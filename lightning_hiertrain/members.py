"""Which tiers take part, and what happens when one of them dies."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from lightning_hiertrain.schedule import Schedule
from lightning_hiertrain.transport.network import Network

log = logging.getLogger(__name__)

Replan = Callable[[Schedule], Schedule]
"""Makes a schedule for the tiers left in place of one that names a tier which has died."""


class Members:
    """The tiers that are left, as all of them agree.

    The data tier, the owner and the tier that writes checkpoints are needed; any other one may die.
    The owner makes up for what is missing of the step at hand (`execution/substitute.py`); between
    two updates the data tier tells all who has died and the schedule for those that are left.

    Args:
        network: The links of this tier.
        needed: The tiers that are always needed.
        replan: Makes the new schedule, on the data tier; `None` if every loss ends the run.
        on_lost: Told at once of each tier that dies, on another thread.
    """

    def __init__(
        self,
        network: Network,
        needed: tuple[str, ...],
        *,
        replan: Replan | None,
        on_lost: Callable[[str], None],
    ) -> None:
        self._names = network.topology.names
        self._membership = network.membership
        self._always = needed
        self._replan = replan
        self._on_lost = on_lost
        self.lost: dict[str, str] = {}
        """The tiers that have died and why, as all know since the last update."""
        self.need()

    @property
    def left(self) -> tuple[str, ...]:
        """The tiers that have not died, as this one sees it now."""
        spared = self._membership.spared
        return tuple(name for name in self._names if name not in spared)

    def need(self, *owners: str) -> None:
        """Says which tiers own the step, now or soon."""
        if self._replan is not None:
            self._membership.need((*self._always, *owners))
            self._membership.on_lost = self._notice

    def news(self, schedule: Schedule) -> dict[str, Any] | None:
        """Returns what all tiers must be told before the next mini-batch, `None` for nothing.

        Args:
            schedule: The one that it would be dealt out by.
        """
        spared = self._membership.spared
        working = {schedule.owner, *schedule.prefix_workers}
        is_broken = self._replan is not None and not working.isdisjoint(spared)
        if spared.keys() == self.lost.keys() and not is_broken:
            return None
        new = self._replan(schedule) if self._replan is not None and is_broken else None
        return {"lost": spared, "schedule": None if new is None else new.to_dict()}

    def hear(self, news: dict[str, Any] | None) -> Schedule | None:
        """Takes in what `news` returned on the data tier, or another one who had some.

        Returns:
            The schedule to put in force, `None` if the other one stays.
        """
        if news is None:
            return None
        if news["lost"] is not None:
            self.lost = news["lost"]
        if news["schedule"] is None:
            return None
        schedule = Schedule.from_dict(news["schedule"])
        level = logging.WARNING if news["lost"] is not None else logging.INFO
        log.log(level, "the schedule is now\n%s", schedule.grid())
        return schedule

    def _notice(self, tier: str) -> None:
        log.warning(
            "tier %r is lost (%s); training goes on with %s",
            tier,
            self._membership.spared[tier],
            ", ".join(self.left),
        )
        self._on_lost(tier)
