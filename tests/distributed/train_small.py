"""An ordinary script, `python train_small.py FOLDER [FAILING_RANK | continue]`: trains on and on.

Each tier writes its process id into the folder once training is under way, and the error at last.
With `continue` training goes on without a tier that dies, for five steps.
"""

import os
import sys
from pathlib import Path
from typing import Any

if sys.argv[2:] == [os.environ.get("LOCAL_RANK", "0")]:
    raise SystemExit("this tier's machine is not set up")

from lightning.pytorch import Callback, Trainer

from lightning_hiertrain import HierTrainStrategy
from tests.distributed.bad_input_cases import Small, rows, schedule
from tests.distributed.killed_cases import GoOn


class Present(Callback):
    """Writes the process id, and the error."""

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if args[-1] == 4:
            self._write(trainer, "pid", str(os.getpid()))

    def on_exception(self, trainer: Trainer, *args: Any) -> None:
        self._write(trainer, "error", repr(args[-1]))

    def _write(self, trainer: Trainer, what: str, text: str) -> None:
        path = Path(sys.argv[1], f"{trainer.strategy.tier}.{what}")  # type: ignore[attr-defined]
        path.with_suffix(".part").write_text(text)
        path.with_suffix(".part").rename(path)


if __name__ == "__main__":
    trainer = Trainer(
        accelerator="cpu",
        devices=3,
        strategy=HierTrainStrategy(
            schedule=schedule(),
            silence_seconds=3,
            on_tier_lost="continue" if sys.argv[2:] == ["continue"] else "stop",
        ),
        max_epochs=-1,
        callbacks=[Present(), GoOn()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Small(), rows(count=60_000))
