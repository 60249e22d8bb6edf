"""Weights, optimizer states and checkpoints of a run whose newest state is on the owner."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from lightning_hiertrain.tier_processes import TierProcesses

log = logging.getLogger(__name__)


class TierStates(TierProcesses):
    """The part of the strategy that collects states on rank 0 and spreads them again."""

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns the newest weights on rank 0, nothing elsewhere; all call it together."""
        self.session.settle()
        if not self._is_interrupted:
            self.session.bring_weights(self._tier_of_rank[0])
        return super().lightning_module_state_dict() if self.is_global_zero else {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns the owner's optimizer state on rank 0 and nothing elsewhere."""
        session, rank_zero = self.session, self._tier_of_rank[0]
        owner = session.replicas.owner
        state = super().optimizer_state(optimizer) if session.tier == owner else None
        if self._is_interrupted:
            return state or {}
        return session.replicas.move(state, owner, rank_zero) or {}

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
        self.session.bring_weights_everywhere()
        self.barrier("end of training")
