"""Several runs in one script: after one that ended well, after a failure, and runs of nothing."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from torch.utils.data import DataLoader

from lightning_hiertrain import HierTrainStrategy, Link, Tier, Topology
from tests.distributed.bad_input_cases import TIMEOUT_SECONDS, FailingStep, Small, rows, schedule


def make_trainer(
    *, plain: bool = False, topology: Topology | None = None, **options: Any
) -> Trainer:
    strategy = HierTrainStrategy(
        schedule=schedule(), topology=topology, timeout_seconds=TIMEOUT_SECONDS
    )
    return Trainer(
        **{  # type: ignore[arg-type]
            "accelerator": "cpu",
            "devices": 1 if plain else 3,
            "strategy": "auto" if plain else strategy,
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **options,
        }
    )


def weights(module: Small) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def fit_then_test_with_another_trainer(plain: bool = False) -> dict[str, Any]:
    seed_everything(5)
    module = Small()
    make_trainer(plain=plain).fit(module, rows())
    (metrics,) = make_trainer(plain=plain).test(module, rows(), verbose=False)
    return {**weights(module), "val_loss": metrics["val_loss"]}


def fit_twice(plain: bool = False) -> dict[str, Any]:
    """The second run goes on where the first ended."""
    seed_everything(5)
    module = Small()
    trainer = make_trainer(plain=plain, max_epochs=2)
    trainer.fit(module, rows())
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, rows())
    (metrics,) = trainer.validate(module, rows(), verbose=False)
    return {
        **weights(module),
        "val_loss": metrics["val_loss"],
        "epoch": trainer.current_epoch,
    }


def fit_and_test_without_keys(plain: bool = False) -> dict[str, Any]:
    """Each trainer has links of its own, with keys that were made for them."""
    seed_everything(5)
    module = Small()
    port = os.environ.get("MASTER_PORT")  # of this run alone; free on other addresses, too
    topology = (
        None
        if plain
        else Topology(
            tiers=(
                Tier(name="device"),
                Tier(name="edge", address=f"127.0.7.1:{port}"),
                Tier(name="cloud", address=f"127.0.7.2:{port}"),
            ),
            links=(Link(between=("device", "edge")), Link(between=("edge", "cloud"))),
        )
    )
    make_trainer(plain=plain, topology=topology).fit(module, rows())
    trainer = make_trainer(plain=plain, topology=topology)
    (metrics,) = trainer.test(module, rows(), verbose=False)
    return {**weights(module), "val_loss": metrics["val_loss"]}


def fit_again_with_new_parts(plain: bool = False) -> dict[str, Any]:
    """The module is the same object in both runs, its parameters are not."""
    seed_everything(5)
    module = Small()
    trainer = make_trainer(plain=plain)
    trainer.fit(module, rows())
    for name, part in module.named_children():
        setattr(module, name, copy.deepcopy(part))
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, rows())
    return {**weights(module), "epoch": trainer.current_epoch}


def fit_again_after_some_steps(plain: bool = False) -> dict[str, Any]:
    """The first run ends in the middle of an epoch, when the next samples may have left."""
    seed_everything(5)
    module = Small()
    loader: DataLoader[Any] = DataLoader(
        rows(count=60).dataset, batch_size=rows().batch_size, shuffle=True
    )
    trainer = make_trainer(plain=plain, max_epochs=-1, max_steps=2)
    trainer.fit(module, loader)
    trainer.fit_loop.epoch_loop.max_steps = 9
    trainer.fit(module, loader)
    return {**weights(module), "step": trainer.global_step}


def fit_another_model(plain: bool = False) -> dict[str, Any]:
    seed_everything(5)
    trainer = make_trainer(plain=plain)
    trainer.fit(Small(), rows())
    module = Small()
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, rows())
    return {**weights(module), "epoch": trainer.current_epoch}


def fail_to_fit(trainer: Trainer) -> None:
    try:
        trainer.fit(FailingStep("edge"), rows())
    except Exception as error:
        if "the step of edge went wrong" in str(error):
            return
        raise
    raise AssertionError("the failing step went through")


def fit_after_failure(plain: bool = False) -> dict[str, Any]:
    """First with a new trainer, then with the one that has failed."""
    weights_after = []
    trainer = make_trainer(plain=plain)
    if not plain:
        fail_to_fit(trainer)
    for each in (make_trainer(plain=plain), make_trainer(plain=plain) if plain else trainer):
        seed_everything(5)
        module = Small()
        if each is trainer:
            each.fit_loop.epoch_loop.reset()
        each.fit(module, rows())
        weights_after.append(weights(module))
    return {f"{name} {i}": x for i, after in enumerate(weights_after) for name, x in after.items()}


def train_nothing(plain: bool = False) -> dict[str, Any]:
    """No epochs, no batches, and a loader that is empty."""
    seed_everything(5)
    module = Small()
    empty: DataLoader[Any] = DataLoader([], batch_size=2)
    make_trainer(plain=plain, max_epochs=0).fit(module, rows())
    make_trainer(plain=plain, limit_train_batches=0).fit(module, rows())
    make_trainer(plain=plain).fit(module, empty)
    return weights(module)
