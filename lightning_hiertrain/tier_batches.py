"""Batches on their way from the data tier's loader to every tier's loop."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_hiertrain.batch_use import (
    EVALUATION_HOOKS,
    TRAINING_HOOKS,
    module_reads_batches,
    reading_batches,
)
from lightning_hiertrain.execution.shown import shown
from lightning_hiertrain.lookahead import LookAhead, batch_size
from lightning_hiertrain.opening import open_run
from lightning_hiertrain.profiles import Profile
from lightning_hiertrain.remote_data import RemoteData, sized_token
from lightning_hiertrain.sandbox import Sandbox
from lightning_hiertrain.session import Session
from lightning_hiertrain.settings import Settings
from lightning_hiertrain.tier_steps import TierSteps

_BATCHES_TRAVEL = (
    "the callback `{}` reads `batch`: whole mini-batches travel to all tiers for it, which takes "
    "time; a hook under `rank_zero_only` does without if rank 0 is the data tier"
)


class TierBatches(TierSteps):
    """The part of the strategy that brings batches to the tiers."""

    _settings: Settings
    _profile: Profile | None
    _remote_data: RemoteData | None = None
    _lookahead: LookAhead | None = None

    def process_dataloader(self, dataloader: Any) -> Any:
        """Puts a stand-in for a dataloader on the tiers that have no data."""
        assert self._remote_data is not None
        return self._remote_data.process_dataloader(dataloader)

    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Moves a batch to this tier's accelerator, and its rows to the other tiers."""
        session, module = self.session, self.lightning_module
        assert module is not None
        move = functools.partial(
            super().batch_to_device, device=device, dataloader_idx=dataloader_idx
        )
        if not module.trainer.training:
            return self._begin_evaluation(batch, move, dataloader_idx)
        lookahead = self._lookahead
        assert lookahead is not None
        whole = lookahead.take(batch, move) if session.is_data_tier else None
        if session.chain is None:
            open_run(
                session,
                self.sandbox,
                None if whole is None else whole.content,
                self._settings,
                self._profile,
            )
        mini_batch = session.begin_training_batch(
            whole, lambda: lookahead.following(move), self.optimizers, self.precision_plugin
        )
        seen = session.shown_batch(whole)
        if whole is not None:
            return whole.content
        if seen is not None:
            return seen
        if session.is_owner:
            assert session.chain is not None
            return shown(mini_batch, session.chain, session.data_tier)
        return sized_token(batch, mini_batch.weight or mini_batch.num_samples)

    def _begin_evaluation(self, batch: Any, move: Callable[[Any], Any], dataloader_idx: int) -> Any:
        session = self.session
        whole = move(batch) if session.is_data_tier else None
        weight = batch_size(whole) if session.is_data_tier else None
        content, self._weight = session.begin_evaluation_batch(whole, weight, dataloader_idx)
        if session.is_data_tier:
            return whole
        has_it = session.tier == session.evaluator or session.showing.evaluation_to_all
        return content if has_it else sized_token(batch, self._weight or 1)

    def sandbox(self) -> Sandbox:
        """Returns a copy of the module to trace and measure."""
        assert self.lightning_module is not None
        return Sandbox(self.lightning_module, self.optimizers, self._in_step)

    def _show_batches(self, session: Session, trainer: Trainer) -> None:
        """Lets whole mini-batches travel to the tiers where hooks read them."""
        if self._settings.keep_inputs_on_data_tier:
            return
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        is_at_rank_zero = self._tier_of_rank[0] == self._settings.data_tier
        read = [
            reading_batches(callbacks, hooks, but_rank_zero=is_at_rank_zero)
            for hooks in (TRAINING_HOOKS, EVALUATION_HOOKS)
        ]
        training, evaluation = zip(*session.collectives.all_gather(read), strict=True)
        showing = session.showing
        showing.to_all, showing.evaluation_to_all = any(training), any(evaluation)
        showing.to_owner = module_reads_batches(session.module)
        for name in dict.fromkeys(name for names in (*training, *evaluation) for name in names):
            rank_zero_warn(_BATCHES_TRAVEL.format(name))
