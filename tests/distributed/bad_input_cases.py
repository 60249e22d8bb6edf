"""Runs that must fail at once and everywhere; each rank reports how it failed."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import BatchSizeFinder, ModelPruning, OnExceptionCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_hiertrain import HierTrainStrategy, Profile, Schedule, Share
from lightning_hiertrain.profiles import AffineTime, LayerProfile, LinkProfile, TierProfile

TIERS = ("device", "edge", "cloud")
BATCH = 6
LAYERS = 5
TIMEOUT_SECONDS = 45.0


class Small(LightningModule):
    """Five layers on rows of four numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.mse_loss(self.net(x), y))

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Manual(Small):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class SeveralOptimizers(Small):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net[0], self.net[2])]


class WithLBFGS(Small):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Twice(torch.optim.SGD):
    """Evaluates the step twice, as sharpness-aware minimisation does."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


class WithTwice(Small):
    def configure_optimizers(self) -> Any:
        return Twice(self.parameters(), lr=0.1)


class HoldsItself(Small):
    """Keeps a function that has the module in it, as a compiled method has."""

    def __init__(self) -> None:
        super().__init__()
        self.run = lambda x: self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self.run(x), y)


class SkipsBySamples(Small):
    """Skips the step on one tier alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2 and rank() == 2:
            return None
        return super().training_step(batch, batch_idx)


class Misspelt(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, _ = batch
        return F.mse_loss(self.net(x), y)


class WholeBatch(Small):
    """Counts on the size of its mini-batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.mse_loss(self.net(x), y + torch.zeros(BATCH, 2))


class Uncuttable(Small):
    """Each row meets all others before any layer."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self.net(x - x.mean(0)), y)


class FailingStep(Small):
    """Fails in the third step, on one tier."""

    def __init__(self, tier: str) -> None:
        super().__init__()
        self.failing_tier = tier

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2 and self.trainer.strategy.tier == self.failing_tier:  # type: ignore[attr-defined]
            raise ArithmeticError(f"the step of {self.failing_tier} went wrong")
        return super().training_step(batch, batch_idx)


class FailingBackward(FailingStep):
    """Fails in the backward pass of the third step, on one tier."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        fails = batch_idx == 2 and self.trainer.strategy.tier == self.failing_tier  # type: ignore[attr-defined]
        hidden = Refused.apply(self.net[0](x), fails)
        return F.mse_loss(self.net[1:](hidden), y)


class Refused(torch.autograd.Function):
    """Lets values pass, and fails in the backward pass if it is told to."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.fails:
            raise ArithmeticError("the backward pass went wrong")
        return gradient, None


class FailingCallback(Callback):
    def __init__(self, tier: str, hook: str) -> None:
        self.tier = tier
        setattr(self, hook, self._fail)

    def _fail(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        if trainer.strategy.tier == self.tier:  # type: ignore[attr-defined]
            raise ArithmeticError(f"the callback of {self.tier} went wrong")


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Rows of numbers; one of them may be broken."""

    def __init__(self, count: int = 30, broken: int | None = None) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, 4, generator=generator)
        self.broken = broken

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == self.broken:
            raise OSError(f"row {index} cannot be read")
        return self.x[index], self.x[index, :2]


class Scalars(Rows):
    def __getitem__(self, index: int) -> Any:
        return index


def rows(**kwargs: Any) -> DataLoader[Any]:
    return DataLoader(Rows(**kwargs), batch_size=BATCH)


def words(indices: list[int]) -> list[str]:
    return [f"word {index}" for index in indices]


def schedule(owner: str = "edge", *, layers: int = LAYERS, samples: int = BATCH) -> Schedule:
    """Each tier takes a third; the prefix workers run two and three layers."""
    depths = iter((2, 3))
    return Schedule(
        owner=owner,
        shares={
            tier: Share(
                num_layers=layers if tier == owner else next(depths), num_samples=samples // 3
            )
            for tier in TIERS
        },
    )


def profile(*, layers: int = LAYERS, output_bytes: int = 32, data_tier: str = "device") -> Profile:
    """A profile of another model than `Small`."""
    times = dict.fromkeys(TIERS, AffineTime(fixed=1e-4, per_sample=1e-5))
    return Profile(
        model="Other",
        input_bytes_per_sample=16,
        target_bytes_per_sample=8,
        data_tier=data_tier,
        tiers=dict.fromkeys(TIERS, TierProfile()),
        layers=tuple(
            LayerProfile(
                name=f"layer{index}",
                output_bytes_per_sample=output_bytes,
                parameter_bytes=160,
                forward_seconds=times,
                backward_seconds=times,
            )
            for index in range(layers)
        ),
        links=tuple(
            LinkProfile(between=pair, bandwidth_bytes_per_second=1e6, latency_seconds=1e-3)
            for pair in (("device", "edge"), ("edge", "cloud"))
        ),
    )


def fit(
    module: LightningModule | None = None,
    loader: DataLoader[Any] | None = None,
    *,
    strategy: dict[str, Any] | None = None,
    **trainer: Any,
) -> Trainer:
    """Trains across the three tiers."""
    strategy = {"schedule": schedule(), **(strategy or {})}
    made = Trainer(
        **{  # type: ignore[arg-type]
            "accelerator": "cpu",
            "devices": 3,
            "strategy": HierTrainStrategy(**{"timeout_seconds": TIMEOUT_SECONDS, **strategy}),
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **trainer,
        }
    )
    made.fit(module or Small(), loader or rows())
    return made


def rank() -> int:
    return int(os.environ["LOCAL_RANK"])


def fit_with_own_settings(**settings: Any) -> None:
    """Each rank has other settings: `name=(of rank 0, of rank 1, of rank 2)`."""
    fit(strategy={name: values[rank()] for name, values in settings.items()})


def fit_with_checkpoint_on_failure(owner: str, folder: Path) -> None:
    fit(
        strategy={"schedule": schedule(owner)},
        max_epochs=2,
        enable_checkpointing=True,
        callbacks=[
            FailingCallback("device", "on_train_epoch_end"),
            OnExceptionCheckpoint(str(folder), filename=f"owner-{owner}"),
        ],
    )


def fit_without_cloud(topology: Path | None = None) -> None:
    if rank() == 2:
        raise LookupError("the cloud was not started")
    fit(strategy={"topology": topology, "timeout_seconds": 2.0})


def fit_with_two_edges() -> None:
    if rank() == 2:
        os.environ["HIERTRAIN_TIER"] = "edge"
    try:
        fit()
    finally:
        os.environ.pop("HIERTRAIN_TIER", None)


def _mini_batch_of(loader: DataLoader[Any]) -> Callable[[Path], Any]:
    return lambda _: fit(loader=loader)


CASES: dict[str, Callable[[Path], Any]] = {
    "manual optimization": lambda _: fit(Manual()),
    "several optimizers": lambda _: fit(SeveralOptimizers()),
    "LBFGS": lambda _: fit(WithLBFGS()),
    "optimizer that steps twice": lambda _: fit(WithTwice()),
    "ModelPruning": lambda _: fit(callbacks=[ModelPruning("l1_unstructured")]),
    "module in a function": lambda _: fit(HoldsItself()),
    "skipped on one tier": lambda _: fit(SkipsBySamples()),
    "error of the step": lambda _: fit(Misspelt()),
    "size of the mini-batch": lambda _: fit(WholeBatch()),
    "no cut point": lambda _: fit(Uncuttable()),
    "BatchSizeFinder": lambda _: fit(callbacks=[BatchSizeFinder()]),
    "schedule of another model": lambda _: fit(strategy={"schedule": schedule(layers=LAYERS + 1)}),
    "schedule of another batch": lambda _: fit(strategy={"schedule": schedule(samples=9)}),
    "batch of words": _mini_batch_of(DataLoader(Scalars(), batch_size=BATCH, collate_fn=words)),
    "batch of a scalar": _mini_batch_of(
        DataLoader(Scalars(), collate_fn=lambda _: torch.tensor(1.0))
    ),
    "profile of another model": lambda _: fit(strategy={"schedule": None, "profile": profile()}),
    "profile of fewer layers": lambda _: fit(
        strategy={"schedule": None, "profile": profile(layers=LAYERS - 1)}
    ),
    "step of the owner": lambda _: fit(FailingStep("edge")),
    "step of a prefix worker": lambda _: fit(FailingStep("cloud")),
    "step of the data tier": lambda _: fit(FailingStep("device")),
    "backward of the owner": lambda _: fit(FailingBackward("edge")),
    "backward of a prefix worker": lambda _: fit(FailingBackward("cloud")),
    "dataset": lambda _: fit(loader=rows(broken=20)),
    "callback on one tier": lambda _: fit(
        callbacks=[FailingCallback("cloud", "on_train_batch_end")]
    ),
    "callback on rank 0": lambda _: fit(callbacks=[FailingCallback("device", "on_train_start")]),
    "setup on one tier": lambda _: fit(callbacks=[FailingCallback("edge", "setup")]),
    "end of training on one tier": lambda _: fit(
        callbacks=[FailingCallback("cloud", "on_train_end")]
    ),
    "checkpoint of the owner": lambda folder: fit_with_checkpoint_on_failure("device", folder),
    "checkpoint of another tier": lambda folder: fit_with_checkpoint_on_failure("edge", folder),
    "other policies": lambda _: fit_with_own_settings(
        policy=("hiertrain", "hiertrain", "all-edge")
    ),
    "other schedules": lambda _: fit_with_own_settings(
        schedule=(schedule(), schedule("cloud"), schedule())
    ),
    "other topologies": lambda folder: fit_with_own_settings(
        topology=[folder / name for name in ("chain.json", "chain.json", "triangle.json")]
    ),
    "two edges": lambda _: fit_with_two_edges(),
    "cloud missing at its address": lambda folder: fit_without_cloud(folder / "chain.json"),
    # The last one: a tier that stayed away cannot know how often the others have met.
    "cloud missing": lambda _: fit_without_cloud(),
}


def fail(name: str, folder: str) -> dict[str, Any]:
    """Runs a case and tells how it failed; there must be an error."""
    seed_everything(3)
    started = time.perf_counter()
    try:
        CASES[name](Path(folder))
    except Exception as error:
        return {
            "type": type(error).__name__,
            "message": str(error),
            "traceback": traceback.format_exc(),
            "seconds": time.perf_counter() - started,
        }
    raise AssertionError(f"{name!r} went through")
