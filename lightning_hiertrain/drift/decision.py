"""Whether another schedule is worth a switch; pure functions of what is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from lightning_hiertrain.drift.estimates import Expected
from lightning_hiertrain.planning import predict
from lightning_hiertrain.profiles import AffineTime, LayerProfile, LinkProfile, Profile
from lightning_hiertrain.schedule import Schedule

_HORIZON_STEPS = 100
"""Within so many steps a switch must have paid for itself."""
_LEAST_PAUSE, _MOST_PAUSE = 4, 512
"""Steps after a switch in which nothing is decided."""
_SOON = 32
"""A switch so many steps after the last one, or twice its pause, doubles the pause."""
_LOOK_AGAIN = 8
"""After so many steps what was not worth a switch is looked at again, later at doubled ones."""


def drifted_profile(
    profile: Profile, slowness: Mapping[str, float], bytes_per_second: Mapping[str, float]
) -> Profile:
    """Returns a profile with tiers and links as they are now.

    Args:
        profile: What was measured or given.
        slowness: By which factor everything takes longer on a tier.
        bytes_per_second: What links carry, by name.
    """
    names = profile.topology

    def rate(link: LinkProfile) -> float:
        named = names.link(*link.between)
        assert named is not None
        return bytes_per_second.get(named.name, link.bandwidth_bytes_per_second)

    return replace(
        profile,
        tiers={
            name: replace(
                tier,
                optimizer_seconds=slowness.get(name, 1.0) * tier.optimizer_seconds,
                overhead_seconds=slowness.get(name, 1.0) * tier.overhead_seconds,
                transfer_seconds_per_byte=slowness.get(name, 1.0) * tier.transfer_seconds_per_byte,
                loss_seconds=_scaled(tier.loss_seconds, slowness.get(name, 1.0)),
            )
            for name, tier in profile.tiers.items()
        },
        dealing_seconds=_scaled(profile.dealing_seconds, slowness.get(profile.data_tier, 1.0)),
        layers=tuple(_scaled_layer(layer, slowness) for layer in profile.layers),
        links=tuple(replace(link, bandwidth_bytes_per_second=rate(link)) for link in profile.links),
    )


def expected_busy(profile: Profile, schedule: Schedule, *, overlap: bool) -> Expected:
    """Returns how long each tier should be busy in a step."""
    busy = predict(profile, schedule, overlap=overlap).busy_seconds
    working = {schedule.owner, *schedule.prefix_workers}
    return Expected(
        seconds={tier: busy[tier] for tier in profile.tiers if tier in working},
        idle_tiers=frozenset(tier for tier in profile.tiers if tier not in working),
    )


def switch_seconds(profile: Profile, old: Schedule, new: Schedule) -> float:
    """Returns how long weights and states travel when another schedule is put in force."""
    through = [0]
    for layer in profile.layers:
        through.append(through[-1] + layer.parameter_bytes)

    def held(tier: str) -> int:
        return through[old.shares[tier].num_layers] if tier in old.shares else 0

    def seconds(tier: str, num_bytes: int) -> float:
        if tier == old.owner or num_bytes <= 0:
            return 0.0
        return num_bytes / profile.bytes_per_second(old.owner, tier)

    state = profile.optimizer_state_bytes
    state = 2 * through[-1] if state is None else state  # that of Adam
    total = seconds(new.owner, through[-1] - held(new.owner) + state)
    for worker in new.prefix_workers:
        total += seconds(worker, through[new.shares[worker].num_layers] - held(worker))
    return total


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of planning anew."""

    schedule: Schedule
    """The best one now."""
    current_seconds: float
    """A step under the schedule in force, as predicted now or measured, whichever is less."""
    new_seconds: float
    switch_seconds: float
    is_worth_it: bool


def judge(
    profile: Profile,
    current: Schedule,
    *,
    plan: Callable[[Profile], Schedule],
    measured_seconds: float,
    overlap: bool,
    least_saving: float,
    steps_left: float,
) -> Verdict:
    """Plans anew and says whether to switch.

    Args:
        profile: What tiers and links are now.
        current: The schedule in force.
        plan: Makes the best schedule from a profile.
        measured_seconds: A step under `current`, as it was measured lately.
        overlap: Whether transfers overlap with computation.
        least_saving: The part of a step that must be saved.
        steps_left: How many steps are to come.
    """
    new = plan(profile)
    predicted = predict(profile, current, overlap=overlap).step_seconds
    # Where the prediction is off, the more cautious of the two counts.
    now = min(predicted, measured_seconds)
    then = predict(profile, new, overlap=overlap).step_seconds
    cost = switch_seconds(profile, current, new)
    saved = now - then
    pays = saved * min(steps_left, _HORIZON_STEPS) > cost
    return Verdict(
        schedule=new,
        current_seconds=now,
        new_seconds=then,
        switch_seconds=cost,
        is_worth_it=saved > least_saving * now and pays,
    )


class Patience:
    """Says when something may be decided.

    A switch that follows soon upon another doubles the pause behind it. What was not worth a switch
    is looked at again, at growing distances.
    """

    def __init__(self) -> None:
        self._pause, self._distance = _LEAST_PAUSE, _LOOK_AGAIN
        self._step = self._until = 0
        self._switched: int | None = None
        self._again: int | None = None

    def step(self) -> None:
        """Notes a step."""
        self._step += 1

    @property
    def allows(self) -> bool:
        """Whether something may be decided now."""
        return self._step >= self._until

    @property
    def wants_another_look(self) -> bool:
        """Whether to look again at what was not worth a switch."""
        return self._again is not None and self._step >= self._again

    def drifted(self) -> None:
        """Notes that something has drifted."""
        self._distance = _LOOK_AGAIN

    def switched(self) -> None:
        """Notes a switch because of drift."""
        soon = max(_SOON, 2 * self._pause)
        if self._switched is not None and self._step - self._switched <= soon:
            self._pause = min(2 * self._pause, _MOST_PAUSE)
        else:
            self._pause = _LEAST_PAUSE
        self._switched, self._again = self._step, None
        self._until = self._step + self._pause
        self._distance = _LOOK_AGAIN

    def refused(self) -> None:
        """Notes that another schedule would not be worth it."""
        self._again = self._step + self._distance
        self._distance = min(2 * self._distance, _MOST_PAUSE)


def _scaled(time: AffineTime, factor: float) -> AffineTime:
    return replace(time, fixed=factor * time.fixed, per_sample=factor * time.per_sample)


def _scaled_layer(layer: LayerProfile, slowness: Mapping[str, float]) -> LayerProfile:
    def scaled(times: Mapping[str, AffineTime]) -> dict[str, AffineTime]:
        return {tier: _scaled(time, slowness.get(tier, 1.0)) for tier, time in times.items()}

    return replace(
        layer,
        forward_seconds=scaled(layer.forward_seconds),
        backward_seconds=scaled(layer.backward_seconds),
    )
