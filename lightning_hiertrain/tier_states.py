"""Weights, optimizer states and checkpoints of a run whose newest state is on the owner."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from torch.optim import Optimizer

from lightning_hiertrain.checkpoint_files import WholeFiles
from lightning_hiertrain.execution.optimizers import with_own_kernels
from lightning_hiertrain.tier_processes import TierProcesses

log = logging.getLogger(__name__)


class TierStates(TierProcesses):
    """The part of the strategy that collects states on rank 0 and spreads them again."""

    _followed: Any = None
    """The Trainer's part that restores checkpoints, while it follows rank 0."""

    def follow_rank_zero_checkpoints(self, trainer: Trainer) -> None:
        """Lets all tiers go on from the checkpoint that rank 0 has chosen, or from none.

        `ckpt_path="last"` is looked up in a folder, and that of rank 0 alone has checkpoints.
        """
        connector = trainer._checkpoint_connector
        resume = type(connector).resume_start

        def resume_start(checkpoint_path: str | Path | None = None, **kwargs: Any) -> None:
            assert self._collectives is not None
            own = None if checkpoint_path is None else str(checkpoint_path)
            chosen = self._collectives.broadcast(own, self._tier_of_rank[0])
            resume(connector, chosen, **kwargs)

        vars(connector)["resume_start"] = resume_start
        self._followed = connector

    def choose_own_checkpoints(self) -> None:
        """Takes back what `follow_rank_zero_checkpoints` has changed."""
        if self._followed is not None:
            vars(self._followed).pop("resume_start", None)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the newest weights on rank 0, nothing elsewhere; all call it together."""
        self.session.settle()
        if not self._is_interrupted:
            self.session.bring_weights(self._tier_of_rank[0])
        return super().lightning_module_state_dict() if self.is_global_zero else {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the owner's optimizer state on rank 0 and nothing elsewhere.

        The precision plugin, whose own state Lightning writes next, gets the owner's as well: the
        loss is scaled there.
        """
        session, rank_zero = self.session, self._tier_of_rank[0]
        owner = session.replicas.owner
        state: dict[str, Any] = super().optimizer_state(optimizer) if session.tier == owner else {}
        if self._is_interrupted or owner == rank_zero:
            return state
        scaling = self.precision_plugin.state_dict()
        moved = session.replicas.move((state, scaling), owner, rank_zero)
        if moved is None:
            return {}
        state, scaling = moved
        if scaling:
            self.precision_plugin.load_state_dict(scaling)
        return state

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads the optimizers' states of a checkpoint, whatever tier they were made on."""
        states = [
            with_own_kernels(optimizer, state)
            for optimizer, state in zip(
                self.optimizers, checkpoint["optimizer_states"], strict=False
            )
        ]
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """What reads and writes checkpoints: the user's plugin, or files that are always whole."""
        if self._checkpoint_io is None:
            self._checkpoint_io = WholeFiles()
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = WholeFiles()  # kept if it wraps none yet
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    def _whole_files(self) -> WholeFiles | None:
        io: CheckpointIO | None = self.checkpoint_io
        while isinstance(io, _WrappingCheckpointIO):
            io = io.checkpoint_io
        return io if isinstance(io, WholeFiles) else None

    def on_exception(self, exception: BaseException) -> None:
        """Says on rank 0 from where the run can be resumed."""
        files = self._whole_files() if self.is_global_zero else None
        if files is not None and files.last_path is not None:
            log.warning("training has not come to its end: %s", files.last_good())
        super().on_exception(exception)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Writes a checkpoint on rank 0; upon an error only if this tier has the newest weights."""
        owner = self.session.replicas.owner
        if self._is_interrupted and self.is_global_zero and owner != self.session.tier:
            log.warning(
                "no checkpoint is written to %s: the newest weights are on tier %s, which an error "
                "has cut off; use the last regular checkpoint",
                filepath,
                owner,
            )
            return
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(
        self, checkpoint_path: str | Path, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Reads a checkpoint on rank 0 and gives it to all tiers."""
        assert self._collectives is not None
        source, checkpoint = self._tier_of_rank[0], None
        if self.is_global_zero:
            checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        loaded: dict[str, Any] = self._collectives.broadcast(checkpoint, source)
        self.session.replicas.all_are_equal()
        return loaded

    def on_train_end(self) -> None:
        """Gives all tiers the final weights; none ends its training before all have come so far."""
        self.session.end_training()
        self.barrier("end of training")
