"""Small projects for the Trainer's arguments, callbacks and loaders."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    DeviceStatsMonitor,
    EMAWeightAveraging,
    LearningRateFinder,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    RichModelSummary,
    RichProgressBar,
    Timer,
)
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Sampler

from lightning_hiertrain import HierTrainStrategy, Schedule
from tests.distributed.feature_cases import BATCH, Net, Norms, fit_project, loader, samples


class Ahead(Net):
    """Logs, counts and keeps values ahead of the model, and asks to be stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("warmth", torch.tensor(0.5))
        self.counts = {"steps": 0}
        self.best = 0
        self.kept = torch.zeros(1000, dtype=torch.double)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("number", float(batch_idx), on_step=True, on_epoch=True)
        self.log_dict({"rate": self.trainer.optimizers[0].param_groups[0]["lr"]})
        self.log("warmth", self.warmth)
        self.counts["steps"] += 1
        self.best += 1
        loss: Tensor = super().training_step(batch, batch_idx)
        self.kept[self.best] = loss.detach()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 9:
            self.trainer.should_stop = True


class StopOnRankZero(Callback):
    """Stops by a clock that other tiers have not got."""

    def __init__(self, hook_step: int) -> None:
        self.hook_step = hook_step

    @rank_zero_only
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.hook_step and time.monotonic() > 0:
            trainer.should_stop = True


class SaveOnRankZero(Callback):
    """Saves a checkpoint on rank 0, in which all tiers must take part."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            trainer.save_checkpoint(Path(trainer.logger.log_dir, "of callback.ckpt"))


class CallOnRankZero(Callback):
    """Calls the module on rank 0 alone and writes what it gives."""

    @rank_zero_only
    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._call(trainer, pl_module, "validation")

    @rank_zero_only
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._call(trainer, pl_module, "training")

    def _call(self, trainer: Any, pl_module: Any, stage: str) -> None:
        with torch.no_grad():
            given = pl_module(samples(6).tensors[0].to(pl_module.dtype))
        path = Path(trainer.log_dir, f"{stage} {trainer.global_step}.ckpt")
        torch.save({"state_dict": {"given": given}}, path)


class Saving(Net):
    """Saves a checkpoint in a hook, which runs on the owner alone."""

    def on_train_epoch_end(self) -> None:
        self.trainer.save_checkpoint(Path(str(self.trainer.log_dir), "of hook.ckpt"))


class Compiled(Net):
    """Has a compiled submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.net.compile(backend="eager")
        self.head = torch.compile(nn.Linear(4, 4), backend="eager")

    def forward(self, x: Tensor) -> Any:
        return self.head(self.net(x))


class Single(Net):
    """Takes samples of whatever type it computes in, and a learning rate that can be found."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.01

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return x.to(self.net[0].weight.dtype), y

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Skipping(Net):
    """Skips some steps by their number, returns no loss in others, and has one that is not finite.

    It makes a table when it first needs it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if batch_idx == 1:
            return None
        x, y = batch
        if self.table is None:
            self.table = torch.arange(10, dtype=torch.double, device=x.device).div(100).sin()
        loss: Tensor = super().training_step((x + self.table, y), batch_idx)
        if self.current_epoch == 1:
            loss = loss * float("inf")
        return loss if torch.isfinite(loss) else None


class Overriding(Net):
    """Overrides what Lightning does around a step."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"zero_grad": 0, "configure": 0}

    def configure_model(self) -> None:
        self.counts["configure"] += 1
        if not hasattr(self, "head"):
            self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.net(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.toggle_optimizer(self.optimizers())
        return super().training_step(batch, batch_idx)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward(*args, **kwargs)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] *= 0.95

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.counts["zero_grad"] += 1
        optimizer.zero_grad(set_to_none=False)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(self.current_epoch + 0.5)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        cosine = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)
        return [optimizer], [cosine]


class WithoutOptimizer(Net):
    def configure_optimizers(self) -> None:
        return None


class Either(Net):
    """Trains on two loaders, of which one ends before the other."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = [part for part in batch.values() if part is not None]
        losses = [F.cross_entropy(self(x), y) for x, y in parts]
        loss = torch.stack(losses).sum()
        self.log("train_loss", loss, batch_size=BATCH)
        return loss


class InTurn(Net):
    """Validates on two loaders at once."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        for name, part in batch.items():
            if part is not None:
                self.log(f"val_{name}", F.cross_entropy(self(part[0]), part[1]))


class Sizes(Sampler[list[int]]):
    """Mini-batches of changing size, down to two samples."""

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        for size in (12, 7, 2, 9):
            yield list(range(start, start + size))
            start += size

    def __len__(self) -> int:
        return 4


def by_workers() -> list[Any]:
    batches: Any = DataLoader(
        samples(1), batch_sampler=Sizes(), num_workers=1, pin_memory=True, persistent_workers=True
    )
    return [batches, loader(2, 20, num_workers=1)]


class Hyper(LightningDataModule):
    """Has hyperparameters that the module reads."""

    def __init__(self, size: int = BATCH) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        self.num_samples = len(samples(1))

    def train_dataloader(self) -> Any:
        return loader()

    test_dataloader = train_dataloader


class Asking(Net):
    def on_train_epoch_end(self) -> None:
        self.log("size", float(self.trainer.datamodule.hparams.size))  # type: ignore[attr-defined]


def flags() -> dict[str, Any]:
    """Arguments that change nothing in the result, and callbacks that only look on."""
    return {
        "deterministic": "warn",
        "benchmark": True,
        "detect_anomaly": True,
        "profiler": "simple",
        "use_distributed_sampler": False,
        "inference_mode": False,
        "num_sanity_val_steps": -1,
        "reload_dataloaders_every_n_epochs": 1,
        "max_time": "00:01:00:00",
        "enable_progress_bar": True,
        "enable_model_summary": True,
        "callbacks": [
            DeviceStatsMonitor(cpu_stats=False),
            RichModelSummary(),
            RichProgressBar(),
            Timer("00:01:00:00", interval="step"),
        ],
    }


BAREBONES = dict.fromkeys(
    (
        *("logger", "enable_checkpointing", "enable_model_summary", "enable_progress_bar"),
        *("log_every_n_steps", "num_sanity_val_steps"),
    )
)

PROJECTS: dict[str, Any] = {
    "values kept ahead of the model": lambda: (Ahead(), {}, [loader(), loader(2, 20)]),
    "stopped on rank 0": lambda: (
        Net(),
        {"callbacks": [StopOnRankZero(6)]},
        [loader(), loader(2, 20)],
    ),
    "checkpoints saved by hand": lambda: (
        Saving(),
        {"max_epochs": 2, "callbacks": [SaveOnRankZero()]},
        [loader()],
    ),
    "compiled parts": lambda: (Compiled(), {}, [loader(), loader(2, 20)]),
    "steps skipped": lambda: (Skipping(), {}, [loader()]),
    "steps skipped, accumulating": lambda: (
        Skipping(),
        {"accumulate_grad_batches": 2},
        [loader()],
    ),
    "overrides": lambda: (Overriding(), {"max_epochs": 2}, [loader()]),
    "no optimizer": lambda: (WithoutOptimizer(), {"max_epochs": 1}, [loader()]),
    "loaders of other lengths": lambda: (
        Either(),
        {"max_epochs": 2},
        [CombinedLoader({"short": loader(1, 24), "long": loader(5)}, "max_size")],
    ),
    "shortest loader": lambda: (
        Either(),
        {"max_epochs": 2},
        [CombinedLoader({"short": loader(1, 24), "long": loader(5)}, "min_size")],
    ),
    "validation on loaders at once": lambda: (
        InTurn(),
        {"max_epochs": 1},
        [loader(), CombinedLoader({"short": loader(2, 20), "long": loader(3)}, "max_size")],
    ),
    "workers and sizes": lambda: (Net(), {"max_epochs": 2}, by_workers()),
    "hyperparameters of the data": lambda: (Asking(), {"max_epochs": 2}, [Hyper()]),
    "flags": lambda: (Net(), flags(), [loader(), loader(2, 20)]),
    "barebones": lambda: (Net(), {"barebones": True, **BAREBONES}, [loader()]),
    "learning rate finder": lambda: (
        Single(),
        {"max_epochs": 1, "callbacks": [LearningRateFinder(num_training_steps=6, max_lr=0.5)]},
        [loader(count=96)],
    ),
    "moving average of weights": lambda: (
        Net(),
        {"max_epochs": 2, "callbacks": [EMAWeightAveraging(decay=0.8)]},
        [loader(), loader(2, 20)],
    ),
    "loss scaled for 16 bits": lambda: (
        Single(),
        {"precision": None, "plugins": [scaling()], "max_epochs": 2, "callbacks": [Scales()]},
        [loader(), loader(2, 20)],
    ),
    "module called on rank 0": lambda: (
        Net(),
        {"callbacks": [CallOnRankZero()]},
        [loader(), loader(2, 20)],
    ),
    **{
        f"precision {precision}": lambda precision=precision: (
            Single(),
            {"precision": precision, "max_epochs": 1},
            [loader(), loader(2, 20)],
        )
        for precision in ("32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true")
    },
}


def scaling() -> MixedPrecision:
    """Scales the loss as it is scaled on a GPU, by a factor that soon changes."""
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    return MixedPrecision("16-mixed", "cpu", scaler=scaler)


class Scales(Norms):
    """Notes the factor that a checkpoint of rank 0 would hold."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        saved = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        self.norms.append(trainer.strategy.broadcast(saved["MixedPrecision"]["scale"]))


def run(
    project: str, *, folder: str, schedule: dict[str, Any] | None = None, plain: bool = False
) -> dict[str, Any]:
    """Fits a project and reports what came out."""
    return fit_project(PROJECTS[project], folder=folder, schedule=schedule, plain=plain)


class Counting(Net):
    """Keeps a number of its own in the checkpoint, and hyperparameters."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.example_input_array = torch.zeros(2, 10, dtype=torch.double)
        self.seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += 1
        return super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"]

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("epoch")
        self.predictions: Any = None

    def write_on_epoch_end(
        self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any
    ) -> None:
        self.predictions = list(predictions)


def go_on(
    *, folder: str, schedule: dict[str, Any] | None = None, plain: bool = False
) -> dict[str, Any]:
    """Ends in mid-training and goes on from the last checkpoint, in a folder of this tier's own."""
    rank = "0" if plain else os.environ["LOCAL_RANK"]
    own = Path(folder, rank)
    own.mkdir(parents=True)
    with chdir(own):
        return _go_on(schedule, plain=plain)


def _go_on(schedule: dict[str, Any] | None, *, plain: bool) -> dict[str, Any]:
    data = [loader(), loader(2, 20)]
    for max_steps in (6, 11):
        seed_everything(max_steps)
        strategy: Any = "auto"
        if not plain:
            assert schedule is not None
            strategy = HierTrainStrategy(schedule=Schedule.from_dict(schedule), timeout_seconds=60)
        checkpoint = ModelCheckpoint(
            "kept", monitor="val_loss", save_top_k=2, save_last=True, every_n_train_steps=2
        )
        module, writer = Counting(), Writer()
        trainer = Trainer(
            accelerator="cpu",
            devices=1 if plain else 3,
            strategy=strategy,
            precision="64-true",
            callbacks=[checkpoint, writer, OnExceptionCheckpoint("never")],
            logger=TensorBoardLogger(".", name="", version="", log_graph=True),
            enable_progress_bar=False,
            enable_model_summary=False,
            val_check_interval=2,
            max_steps=max_steps,
        )
        trainer.fit(module, *data, ckpt_path=None if max_steps == 6 else "last")
    seen = module.seen
    tested = trainer.test(module, loader(3, 16), ckpt_path="last", verbose=False)
    trainer.predict(module, loader(3, 16), ckpt_path="best")
    written = [path.relative_to(".").as_posix() for path in Path().rglob("*") if path.is_file()]
    return {
        "weights": dict(module.state_dict()),
        "steps": trainer.global_step,
        "seen": seen,
        "tested": tested,
        "predictions": writer.predictions,
        "best": float(checkpoint.best_model_score or 0),
        "best path": Path(checkpoint.best_model_path).name,
        "files": sorted("events" if "tfevents" in name else name for name in written),
    }


class Interrupt(Callback):
    """Ends one tier's run in a step."""

    def __init__(self, how: str, rank: int) -> None:
        self.how, self.rank = how, rank

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 5 and int(os.environ["LOCAL_RANK"]) == self.rank:
            if self.how == "KeyboardInterrupt":
                raise KeyboardInterrupt
            signal.raise_signal(signal.SIGTERM)


def interrupted(*, how: str, rank: int, schedule: dict[str, Any]) -> dict[str, Any]:
    """Interrupts one tier and tells how this one has ended."""
    started = time.perf_counter()
    strategy: Any = HierTrainStrategy(schedule=Schedule.from_dict(schedule), timeout_seconds=60)
    trainer = Trainer(
        accelerator="cpu",
        devices=3,
        strategy=strategy,
        precision="64-true",
        callbacks=[Interrupt(how, rank)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    ended = "not at all"
    try:
        trainer.fit(Net(), loader())
    except BaseException as error:
        ended = type(error).__name__
    return {"ended": ended, "seconds": time.perf_counter() - started}
