"""How a run begins: the chain of layers is found and a schedule chosen.

Both are decided on the data tier and broadcast.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_hiertrain.checks import (
    check_privacy,
    check_profile,
    check_schedule,
    check_targets,
)
from lightning_hiertrain.drift import DriftWatch
from lightning_hiertrain.errors import LinkError, TraceError
from lightning_hiertrain.meeting import tell
from lightning_hiertrain.partition import LayerChain, trace_step
from lightning_hiertrain.partition.isolation import same_chance
from lightning_hiertrain.partition.rows import num_samples
from lightning_hiertrain.planning import plan
from lightning_hiertrain.profiles import Profile
from lightning_hiertrain.sandbox import Sandbox
from lightning_hiertrain.schedule import Schedule, Share
from lightning_hiertrain.session import Session
from lightning_hiertrain.settings import Settings

log = logging.getLogger(__name__)

_REPLANNING_SECONDS = 3.0
"""For a new schedule when a tier has died; all tiers left wait for it."""


class _StepFailed(Exception):
    """The user's own step ended with an error, which is not a refusal of ours."""

    def __init__(self, error: ValueError) -> None:
        super().__init__(str(error))
        self.error = error


def open_run(
    session: Session,
    make_sandbox: Callable[[], Sandbox],
    batch: Any,
    settings: Settings,
    profile: Profile | None,
) -> None:
    """Finds the chain of layers and the first schedule; all tiers call this together.

    Without a schedule or profile the data tier does everything until the profile is measured: its
    data need not travel, and the steps are real ones.

    Args:
        session: This tier's part in the run.
        make_sandbox: Makes a copy of the module to trace; called on the data tier.
        batch: The first mini-batch, on the data tier.
        settings: What the user asked for.
        profile: What was given or measured in an earlier run.

    Raises:
        MisconfigurationException: If the model or batch cannot be divided, or what was given does
            not fit them.
    """

    def decide() -> tuple[LayerChain, Schedule]:
        sandbox = make_sandbox()
        try:
            with sandbox.isolated():
                chain = trace_step(sandbox.training_step, sandbox.module, batch)
        except TraceError:
            raise
        except ValueError as error:
            raise _StepFailed(error) from error
        if settings.keep_inputs_on_data_tier:
            check_targets(chain)
        return chain, _first_schedule(session, chain, num_samples(batch), settings, profile)

    try:
        chain, schedule = _decided(session, decide)
    except _StepFailed as failed:
        raise failed.error from None
    session.use_chain(chain)
    if profile is not None:
        session.expect_rates(profile)
        watch_drift(session, profile, settings)
    session.adopt(schedule)


def plan_and_adopt(session: Session, profile: Profile, settings: Settings) -> None:
    """Plans on the data tier and puts the schedule in force; all tiers call this together."""
    assert session.mini_batch is not None
    session.expect_rates(profile)
    samples = session.mini_batch.schedule.batch_size
    schedule = _decided(session, lambda: _plan(session, profile, samples, settings))
    seconds = schedule.predicted_seconds  # unknown if one tier is left
    predicted = "" if seconds is None else f", predicted step {seconds:.4g} s"
    watch_drift(session, profile, settings)
    rank_zero_info(f"HierTrain: schedule by policy {settings.policy}{predicted}\n{schedule.grid()}")
    session.adopt(schedule)


def watch_drift(session: Session, profile: Profile, settings: Settings) -> None:
    """Begins to watch for what differs from a profile; all tiers call this together.

    Not if the user wants none of it, has given a schedule, or has chosen a policy that leaves no
    choice.

    Args:
        session: This tier's part in the run.
        profile: What was given or measured.
        settings: What the user asked for.
    """
    least_saving = settings.replan_when
    if least_saving is None or settings.schedule is not None or settings.policy.startswith("all-"):
        return

    def plan_again(drifted: Profile) -> Schedule:
        assert session.mini_batch is not None
        samples = session.mini_batch.schedule.batch_size
        return _plan(session, drifted, samples, settings, _REPLANNING_SECONDS)

    def steps_left() -> float:
        trainer = session.module.trainer
        return trainer.max_steps - trainer.global_step if trainer.max_steps > 0 else math.inf

    session.watch = DriftWatch(
        session.network,
        session.data_tier,
        profile,
        plan=plan_again,
        overlap=settings.overlap,
        least_saving=least_saving,
        steps_left=steps_left,
        believe=session.expect_rates,
    )


def replan(
    session: Session, profile: Profile | None, settings: Settings, old: Schedule
) -> Schedule:
    """Makes, on the data tier, a schedule for the tiers left when one has died.

    Without a profile, or if none can be planned, the owner takes over the samples of those lost.

    Args:
        session: This tier's part in the run.
        profile: What was given or measured, with the tiers lost.
        settings: What the user asked for.
        old: The schedule that names a tier which has died.
    """
    left, samples = session.members.left, old.batch_size
    profile = session.watch.believed or profile
    if profile is not None and settings.schedule is None:
        for policy in dict.fromkeys((settings.policy, "hiertrain")):
            try:
                with same_chance():
                    chosen = replace(settings, policy=policy)
                    return _plan(session, profile, samples, chosen, _REPLANNING_SECONDS)
            except ValueError as error:
                log.debug("no schedule by policy %s for %s: %s", policy, left, error)
    if old.owner not in left:  # it was to be put in force and never was
        return session.whole_step_on(session.data_tier, samples)
    return old.without(set(old.shares) - set(left))


def _first_schedule(
    session: Session,
    chain: LayerChain,
    samples: int,
    settings: Settings,
    profile: Profile | None,
) -> Schedule:
    if settings.schedule is not None:
        check_schedule(settings.schedule, chain, samples)
        if settings.keep_inputs_on_data_tier:
            check_privacy(settings.schedule, settings.data_tier, settings.least_depth)
        return settings.schedule
    if profile is not None:
        check_profile(profile, chain, type(session.module).__name__)
        session.use_chain(chain)
        return _plan(session, profile, samples, settings)
    everything = Share(num_layers=len(chain), num_samples=samples)
    return Schedule(owner=session.data_tier, shares={session.data_tier: everything})


def _plan(
    session: Session,
    profile: Profile,
    samples: int,
    settings: Settings,
    limit_seconds: float | None = None,
) -> Schedule:
    assert session.chain is not None
    left = session.members.left
    if left == (session.data_tier,):
        return session.whole_step_on(session.data_tier, samples)
    chain = session.chain
    whole = chain.needs_whole_shares(len(chain))
    return plan(
        profile.restricted_to(left),
        batch_size=samples,
        policy=settings.policy,
        overlap=settings.overlap,
        compression=settings.compression,
        accuracy_loss_limit=settings.accuracy_loss_limit,
        keep_inputs_on_data_tier=settings.keep_inputs_on_data_tier,
        least_depth=settings.least_depth,
        chunk_counts=(1,) if whole else (1, 4),
        least_samples=min(chain.least_samples(len(chain)), samples),
        time_limit_seconds=limit_seconds,
    )


def _decided(session: Session, decide: Callable[[], Any]) -> Any:
    """Returns on all tiers what the data tier decides, or raises its refusal on all of them."""
    answer: dict[str, Any] = {}
    if session.is_data_tier:
        try:
            with same_chance():
                answer = {"value": decide()}
        except ValueError as error:
            log.debug("refused", exc_info=True)
            answer = {"error": str(error)}
        except BaseException as error:
            # At once: whoever called the loop (a tuner) may come to collectives before it is told.
            tell(session.network, error)
            raise
    try:
        answer = session.collectives.broadcast(answer, session.data_tier)
    except LinkError:
        if "error" not in answer:
            raise
        # The others were quicker to end with it.
    if "error" in answer:
        raise MisconfigurationException(answer["error"])
    return answer["value"]
