"""Lightning's face of the package: `HierTrainStrategy`.

It answers Lightning's calls and hands the work to a `Session`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn

from lightning_hiertrain.agreement import Agreement
from lightning_hiertrain.callbacks import ProfilingCallback
from lightning_hiertrain.checks import check_module, check_trainer
from lightning_hiertrain.launching import Launcher
from lightning_hiertrain.log_folders import share_log_folder
from lightning_hiertrain.lookahead import LookAhead
from lightning_hiertrain.meeting import meet, open_links, tell
from lightning_hiertrain.opening import plan_and_adopt, replan
from lightning_hiertrain.profiles import Profile
from lightning_hiertrain.remote_data import RemoteData
from lightning_hiertrain.schedule import Schedule
from lightning_hiertrain.session import Session
from lightning_hiertrain.settings import Settings
from lightning_hiertrain.tier_batches import TierBatches
from lightning_hiertrain.topology import Topology
from lightning_hiertrain.transport.collectives import Collectives
from lightning_hiertrain.user_hooks import BringWeights, UserHooks

log = logging.getLogger(__name__)


class HierTrainStrategy(TierBatches):
    """Trains one model across a device, an edge server and a cloud machine.

    The result is what one machine would have given.

    Args:
        tiers: Names of the tiers by global rank, lowest first.
        data_tier: The tier whose process builds the dataset and runs the dataloader.
        schedule: A schedule, or a file that holds one, to use as it is: nothing is measured or
            planned.
        profile: A profile, or a file that holds one, to plan from: nothing is measured.
        policy: How to plan: `"hiertrain"` takes the best of all schedules; the others are those of
            other systems.
        topology: The machines, how they reach each other and their public keys, or a file that
            holds this. Without it all tiers are processes of this machine.
        private_key: File with this tier's private key; by default `<tier>.key` beside the topology
            file.
        overlap: Whether transfers overlap with computation: the step is then predicted and carried
            out in chunks and layer by layer. Without, it is the step of the HierTrain paper.
        compression: Whether activations and their gradients may be packed with loss on their way,
            or the codecs to choose from (`"fp16"`, `"int8"`, `"int8+zstd"`). Training is then no
            longer exact.
        accuracy_loss_limit: Codecs with a greater measured loss of accuracy are not used.
        keep_inputs_on_data_tier: Whether raw samples must stay on the data tier, so that only
            activations and targets travel. Validation, test and prediction then run there too.
        least_depth: With `keep_inputs_on_data_tier`: how many layers samples pass, at least, before
            they travel.
        profile_steps: Over how many training steps the measuring is spread; it ends with the first
            epoch at the latest.
        profile_seconds: Time that measuring the layers may take in all on a tier, on top of the
            training steps.
        timeout_seconds: How long a tier waits for another before it gives up, at the start and in
            every step.
        silence_seconds: After how long without a sign of life a tier counts as lost.
        on_tier_lost: What happens when a tier dies that is neither the owner nor the data tier nor
            the one that writes checkpoints: training goes on without it, or stops with an error.
        replan_when: Which part of a step a new schedule must save for the run to switch to it once
            a tier's speed or a link's bandwidth has drifted; `None` for never. A run with a given
            `schedule` keeps it in any case.
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: Set by the Trainer.
        checkpoint_io: Set by the Trainer.
        precision_plugin: Set by the Trainer.

    Raises:
        ValueError: If an argument is impossible.
    """

    def __init__(
        self,
        *,
        tiers: Sequence[str] = ("device", "edge", "cloud"),
        data_tier: str = "device",
        schedule: Schedule | str | Path | None = None,
        profile: Profile | str | Path | None = None,
        policy: Literal[
            "hiertrain", "all-device", "all-edge", "all-cloud", "jointdnn", "jalad"
        ] = "hiertrain",
        topology: Topology | str | Path | None = None,
        private_key: str | Path | None = None,
        overlap: bool = True,
        compression: bool | Sequence[str] = False,
        accuracy_loss_limit: float = 0.01,
        keep_inputs_on_data_tier: bool = False,
        least_depth: int = 1,
        profile_steps: int = 10,
        profile_seconds: float = 15.0,
        timeout_seconds: float = 120.0,
        silence_seconds: float = 10.0,
        on_tier_lost: Literal["continue", "stop"] = "continue",
        replan_when: float | None = 0.1,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._settings = Settings.of(
            tiers=tuple(tiers),
            data_tier=data_tier,
            schedule=schedule,
            profile=profile,
            policy=policy,
            topology=topology,
            private_key=private_key,
            overlap=overlap,
            compression=compression,
            accuracy_loss_limit=accuracy_loss_limit,
            keep_inputs_on_data_tier=keep_inputs_on_data_tier,
            least_depth=least_depth,
            profile_steps=profile_steps,
            profile_seconds=profile_seconds,
            timeout_seconds=timeout_seconds,
            silence_seconds=silence_seconds,
            on_tier_lost=on_tier_lost,
            replan_when=replan_when,
        )
        self._tiers = self._tier_of_rank = self._settings.tiers
        self._profile = self._settings.profile
        self._profiling = ProfilingCallback(
            num_steps=profile_steps, seconds=profile_seconds, codecs=self._settings.codecs
        )
        self._bring_weights = BringWeights(lambda: self.session)
        self._agreement = Agreement(lambda told: self.session.collectives.all_gather(told))

    # What is in force

    @property
    def tier(self) -> str:
        """The tier that this process is."""
        if self._network is not None:
            return self._network.tier
        return os.environ.get("HIERTRAIN_TIER") or self._tiers[self.global_rank]

    @property
    def schedule(self) -> Schedule | None:
        """The schedule in force, `None` before the first training step."""
        return self._session.schedule if self._session is not None else self._settings.schedule

    @property
    def profile(self) -> Profile | None:
        """The profile that was measured or given, `None` if there is none yet."""
        return self._profile

    @property
    def profiling_progress(self) -> float:
        """How far the measuring is, from 0 to 1; 1 if nothing is to be measured."""
        return self._profiling.progress if self._settings.measures else 1.0

    @property
    def measured_step_seconds(self) -> float | None:
        """Median seconds of a training step under the schedule in force, seen from this tier."""
        return self._session.measured_step_seconds if self._session is not None else None

    # The beginning

    def setup_environment(self) -> None:
        """Meets the other tiers and puts the stand-ins for data in place."""
        super().setup_environment()
        assert self.cluster_environment is not None
        assert self.lightning_module is not None
        self.set_world_ranks()
        self._check_world_size(self.cluster_environment.world_size())
        check_trainer(self.lightning_module.trainer)
        if self._network is None or not self._network.is_usable:
            self._connect(self.cluster_environment)
        assert self._network is not None
        assert self._collectives is not None
        module, trainer = self.lightning_module, self.lightning_module.trainer
        self._log_folder = share_log_folder(trainer, self._collectives, self._tier_of_rank[0])
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if self._session is None or not self._session.knows(module):
            self._profile = self._settings.profile  # what was measured was another model
        if self._session is None or self._session.module is not module or is_fitting:
            self._session = Session(
                self._network,
                self._collectives,
                module,
                data_tier=self._settings.data_tier,
                overlap=self._settings.overlap,
                keeps_inputs=self._settings.keep_inputs_on_data_tier,
                writer=self._tier_of_rank[0],
                replan=self._replan if self._settings.on_tier_lost == "continue" else None,
                after=self._session,
            )
        self._session.mirror.wrap_hooks(self._run_hook)
        self._remote_data = RemoteData(
            trainer,
            module,
            is_data_tier=self._session.is_data_tier,
            data_tier=self._settings.data_tier,
            collectives=self._collectives,
        )
        self._remote_data.install()
        self.follow_rank_zero_checkpoints(trainer)
        self._lookahead = LookAhead(trainer, module)
        self._hooks = UserHooks(trainer, module)
        self._session.weights_may_change = self._hooks.change_weights
        self._show_batches(self._session, trainer)
        if is_fitting:
            self._bring_weights.attach(trainer, self._hooks)
            self._agreement.attach(trainer)
        if is_fitting and self._settings.measures and not self._profile:
            self._profiling.attach(trainer)

    def _connect(self, environment: ClusterEnvironment) -> None:
        """Opens the links and meets the other tiers; after a failed or another run, anew."""
        self._session = self._collectives = None
        self._network = open_links(
            self._settings,
            rank=self.global_rank,
            is_one_machine=self.num_nodes == 1,
            main_port=environment.main_port,
        )
        if self._failed_process is not None:
            self._note_failed_process(*self._failed_process)
        self._tier_of_rank = meet(
            self._network, self._settings, self.global_rank, str(self.precision_plugin.precision)
        )
        self._collectives = Collectives(
            self._network, self._tiers, collector=self._settings.data_tier
        )

    def setup(self, trainer: Trainer) -> None:
        """Refuses what cannot work and gives all tiers the same weights."""
        module = self.lightning_module
        assert module is not None
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            check_module(module, self.optimizers)
        self.session.replicas.equalise(self._tier_of_rank[0], self.session.collectives)

    def model_to_device(self) -> None:
        """Moves the module to this tier's device."""
        assert self.model is not None
        self.model.to(self.root_device)

    def adopt_profile(self, profile: Profile) -> None:
        """Plans from a profile and puts the schedule in force from the next optimizer step on.

        All tiers call this together. The data tier plans.

        Args:
            profile: What was measured; the same on all tiers.
        """
        self._profile = profile
        plan_and_adopt(self.session, profile, self._settings)

    def _replan(self, schedule: Schedule) -> Schedule:
        return replan(self.session, self._profile, self._settings, schedule)

    # The end

    def on_exception(self, exception: BaseException) -> None:
        """Tells the other tiers why this one ends."""
        if isinstance(self._launcher, Launcher):
            self._launcher.fail(has_met=self._collectives is not None)
        if self._network is not None:
            tell(self._network, exception)
        super().on_exception(exception)

    def teardown(self) -> None:
        """Takes back every change to the user's objects; the links stay for a later `test()`."""
        if self._session is not None:
            self._session.close()
        self._profiling.detach()
        self._agreement.detach()
        self._bring_weights.detach()
        if self._remote_data is not None:
            self._remote_data.restore()
        self.choose_own_checkpoints()
        super().teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Makes `Trainer(strategy="hiertrain")` work."""
        strategy_registry.register("hiertrain", cls, description=cls.__name__, override=True)
