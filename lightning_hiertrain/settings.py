"""What the user asked of the strategy, read from files where it was given as such, and checked."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_hiertrain.planning import POLICIES
from lightning_hiertrain.planning.codecs import candidates
from lightning_hiertrain.profiles import Profile
from lightning_hiertrain.schedule import Schedule
from lightning_hiertrain.topology import KEY_CHARACTERS, Topology
from lightning_hiertrain.transport.codecs import check_codec


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of `HierTrainStrategy`, which documents them."""

    tiers: tuple[str, ...]
    data_tier: str
    schedule: Schedule | None
    profile: Profile | None
    policy: str
    topology: Topology | None
    keys_folder: Path | None
    """Where private keys lie unless `private_key` says so: beside the topology file."""
    private_key: str | Path | None
    overlap: bool
    compression: bool | tuple[str, ...]
    accuracy_loss_limit: float
    keep_inputs_on_data_tier: bool
    least_depth: int
    profile_steps: int
    profile_seconds: float
    timeout_seconds: float
    silence_seconds: float
    on_tier_lost: str
    replan_when: float | None = 0.1

    @classmethod
    def of(
        cls,
        *,
        schedule: Schedule | str | Path | None,
        profile: Profile | str | Path | None,
        topology: Topology | str | Path | None,
        compression: bool | str | Sequence[str],
        **others: Any,
    ) -> Settings:
        """Returns what the arguments of the strategy say; files are read."""
        if not isinstance(compression, bool):
            compression = (compression,) if isinstance(compression, str) else tuple(compression)
        return cls(
            schedule=Schedule.from_json(schedule) if isinstance(schedule, str | Path) else schedule,
            profile=Profile.from_json(profile) if isinstance(profile, str | Path) else profile,
            topology=Topology.from_json(topology) if isinstance(topology, str | Path) else topology,
            keys_folder=Path(topology).parent if isinstance(topology, str | Path) else None,
            compression=compression,
            **others,
        )

    def __post_init__(self) -> None:
        self._check_types()
        tiers = self.tiers
        if len(set(tiers)) != len(tiers) or len(tiers) < 2:
            raise ValueError(f"`tiers` must name two or more different tiers, got {tiers}")
        if self.data_tier not in tiers:
            raise ValueError(f"`data_tier={self.data_tier!r}` is not one of `tiers={tiers}`")
        if self.policy not in POLICIES:
            raise ValueError(
                f"`policy={self.policy!r}` is unknown; choose one of {sorted(POLICIES)}"
            )
        for name in ("profile_steps", "profile_seconds", "timeout_seconds", "silence_seconds"):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"`{name}` must be above 0, got {value!r}")
        if self.replan_when is not None and not 0 <= self.replan_when < 1:
            raise ValueError(
                "`replan_when` is the part of a step that a new schedule must save, from 0 to "
                f"below 1, or None for never; got {self.replan_when!r}"
            )
        if self.on_tier_lost not in ("continue", "stop"):
            raise ValueError(
                f"`on_tier_lost` must be 'continue' or 'stop', got {self.on_tier_lost!r}"
            )
        if isinstance(self.least_depth, bool) or not isinstance(self.least_depth, int):
            raise TypeError(f"`least_depth` must be a whole number, got {self.least_depth!r}")
        if self.least_depth < 1:
            raise ValueError(f"`least_depth` must be at least 1, got {self.least_depth}")
        if not self.accuracy_loss_limit >= 0:
            raise ValueError(
                f"`accuracy_loss_limit` must be at least 0, got {self.accuracy_loss_limit!r}"
            )
        if self.schedule is not None and self.profile is not None:
            raise ValueError(
                "`schedule` and `profile` exclude each other: a given schedule is used as it is; "
                "leave out `profile`, or leave out `schedule` to plan from the profile"
            )
        codecs = () if isinstance(self.compression, bool) else self.compression
        for codec in (*codecs, *(self.schedule.codecs.values() if self.schedule else ())):
            check_codec(codec)
        if self.topology is not None and self.topology.names != tiers:
            raise ValueError(
                f"the topology has the tiers {self.topology.names}, `tiers` are {tiers}; "
                "name the same in the same order"
            )
        if self.schedule is not None:
            self._check_names("schedule", self.schedule.shares)
        if self.profile is not None:
            self._check_names("profile", self.profile.tiers)
            if self.profile.data_tier != self.data_tier:
                raise ValueError(
                    f"the profile is one with the data on tier {self.profile.data_tier!r}, "
                    f"`data_tier` is {self.data_tier!r}; pass the same, or change the profile: "
                    f"`dataclasses.replace(profile, data_tier={self.data_tier!r})`"
                )

    def _check_types(self) -> None:
        for name, cls in (("schedule", Schedule), ("profile", Profile), ("topology", Topology)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, cls):
                raise TypeError(
                    f"`{name}` must be a `{cls.__name__}` or a path, got {type(value).__name__!r}; "
                    f"a dictionary becomes one by `{cls.__name__}.from_dict`"
                )
        for name in ("overlap", "keep_inputs_on_data_tier"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"`{name}` must be True or False, got {getattr(self, name)!r}")
        key = self.private_key
        is_key_itself = isinstance(key, str) and len(key) == KEY_CHARACTERS
        if key is not None and not is_key_itself and not Path(key).is_file():
            raise ValueError(
                f"`private_key` must be the file of this tier's key; there is no {str(key)!r}"
            )

    @property
    def codecs(self) -> tuple[str, ...]:
        """The codecs to measure."""
        return candidates(self.policy, self.compression)

    @property
    def measures(self) -> bool:
        """Whether a run has to measure before it can plan."""
        return self.schedule is None and self.profile is None

    def _check_names(self, what: str, names: Collection[str]) -> None:
        if not set(names) <= set(self.tiers):
            raise ValueError(
                f"the {what} is for the tiers {tuple(names)}, `tiers` are {self.tiers}"
            )
