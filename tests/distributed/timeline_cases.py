"""Runs with a `TimelineCallback`; each function is called by every tier."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, Trainer

from lightning_hiertrain import TimelineCallback
from tests.distributed.models import loader
from tests.distributed.stage_cases import make


def train(
    *,
    path: str | None = None,
    steps: list[int] | None = None,
    schedule: dict[str, Any] | None = None,
    measures: bool = False,
    overlap: bool = True,
    plain: bool = False,
    max_steps: int = 14,
    batch_size: int = 64,
) -> dict[str, Any]:
    """Trains LeNet and returns its weights and whether somebody still looks on."""
    module, arguments = make("FunctionalLeNet", plain=plain, schedule=schedule, optimizer="adam")
    callbacks: list[Callback] = []
    if not plain:
        strategy = arguments["strategy"]
        if not overlap:
            arguments["strategy"] = type(strategy)(
                schedule=strategy.schedule, overlap=False, timeout_seconds=60
            )
        if measures:
            arguments["strategy"] = type(strategy)(
                profile_steps=6, profile_seconds=2.0, timeout_seconds=60
            )
        if path is not None:
            callbacks.append(TimelineCallback(steps=steps, path=path))
    trainer = Trainer(
        **arguments,
        max_steps=max_steps,
        max_epochs=-1,
        callbacks=callbacks,
        limit_val_batches=0,
        enable_checkpointing=False,
    )
    trainer.fit(
        module,
        loader(
            "FunctionalLeNet", count=4 * batch_size, batch_size=batch_size, seed=1, shuffle=True
        ),
    )
    looks_on = False if plain else trainer.strategy.session.network.observer is not None
    return {
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "looks_on": looks_on,
    }
