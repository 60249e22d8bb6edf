"""The hook for Lightning: `--trainer.callbacks+=benchmarks.testbed.callback.JoinQuota`."""

from __future__ import annotations

import lightning as L

from benchmarks.testbed import join_quota


class JoinQuota(L.Callback):
    """Puts the process under its tier's CPU quota when it begins to train."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Joins; by now everything is imported and the tiers have met."""
        join_quota()
