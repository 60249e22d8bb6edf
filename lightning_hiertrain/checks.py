"""What is refused before any training step, with the reason and what to do instead."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, ModelPruning
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_hiertrain.partition import LayerChain
from lightning_hiertrain.profiles import Profile
from lightning_hiertrain.schedule import Schedule


def check_trainer(trainer: Trainer) -> None:
    """Refuses callbacks that cannot work across tiers.

    Raises:
        MisconfigurationException: If there is one.
    """
    if trainer._accelerator_connector._layer_sync is not None:
        rank_zero_warn(
            "`sync_batchnorm=True` is ignored: each tier normalises its share by the share's own "
            "statistics"
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, BatchSizeFinder):
            raise MisconfigurationException(
                "`BatchSizeFinder` cannot work with `HierTrainStrategy`: it would try every size "
                "on three machines at once; "
                "find the batch size on one machine with `strategy='auto'` and pass it to the "
                "dataloader"
            )
        if isinstance(callback, ModelPruning):
            raise MisconfigurationException(
                "`ModelPruning` cannot work with `HierTrainStrategy`: it changes the layers in mid-"
                "training, and the tiers have been dealt out those that were there at the start; "
                "prune after training, on one machine"
            )


def check_module(module: LightningModule, optimizers: Sequence[Optimizer]) -> None:
    """Refuses modules whose step is not one forward, one backward and one update.

    Raises:
        MisconfigurationException: If the module optimizes manually, has another number of
            optimizers than one, or one that evaluates the step several times.
    """
    name = type(module).__name__
    if not module.automatic_optimization:
        raise MisconfigurationException(
            f"`{name}` sets `automatic_optimization = False`: manual optimization cannot work with "
            "`HierTrainStrategy`, "
            "which divides forward, backward and update between machines; use automatic "
            "optimization"
        )
    if len(optimizers) != 1:
        raise MisconfigurationException(
            f"`{name}.configure_optimizers` returns {len(optimizers)} optimizers; "
            "`HierTrainStrategy` needs exactly one "
            "(with as many parameter groups as you like)"
        )
    if isinstance(optimizers[0], torch.optim.LBFGS):
        raise MisconfigurationException(
            "`LBFGS` evaluates the training step several times in one update, which "
            "`HierTrainStrategy` cannot divide; "
            "use an optimizer that evaluates it once, such as SGD or Adam"
        )


def check_schedule(schedule: Schedule, chain: LayerChain, samples: int) -> None:
    """Refuses a schedule that was made for another model or mini-batch.

    Raises:
        ValueError: If it was.
    """
    if schedule.num_layers != len(chain):
        raise ValueError(
            f"the schedule is for a model of {schedule.num_layers} layers, this one has "
            f"{len(chain)}; "
            "plan again from a profile of this model, or leave out `schedule`"
        )
    if schedule.batch_size != samples:
        raise ValueError(
            f"the schedule is for mini-batches of {schedule.batch_size} samples, the first one "
            f"holds {samples}; "
            f"plan again with `batch_size={samples}`, or let the dataloader yield "
            f"{schedule.batch_size} samples"
        )
    depth = max((schedule.shares[x].num_layers for x in schedule.prefix_workers), default=0)
    least = chain.least_samples(depth)
    for tier, share in schedule.shares.items():
        if 0 < share.num_samples < least:
            raise ValueError(
                f"the schedule gives tier {tier!r} {share.num_samples} sample, and layers that it "
                f"runs normalise over the batch, which needs {least} (each has one value of a "
                f"channel); give it {least} or none"
            )


def check_privacy(schedule: Schedule, data_tier: str, least_depth: int) -> None:
    """Refuses a schedule by which raw samples leave the data tier.

    Raises:
        ValueError: If they do.
    """
    for tier, share in schedule.shares.items():
        if tier != data_tier and share.num_samples:
            raise ValueError(
                f"the schedule gives tier {tier!r} {share.num_samples} raw samples, which "
                f"`keep_inputs_on_data_tier=True` forbids; give them all to {data_tier!r}, or "
                "leave out `schedule` to have one planned"
            )
    depth = schedule.shares[data_tier].num_layers if data_tier in schedule.shares else 0
    if depth < least_depth:
        raise ValueError(
            f"by the schedule samples pass {depth} layers on {data_tier!r}, `least_depth` is "
            f"{least_depth}; cut it deeper"
        )


def check_targets(chain: LayerChain) -> None:
    """Refuses a model that needs its inputs behind the cuts, where inputs must stay at home.

    Raises:
        ValueError: If it does.
    """
    end = len(chain.calls)
    for first, last in zip(chain.first_leaf_use, chain.last_leaf_use, strict=True):
        if first < end <= last:
            raise ValueError(
                "the step uses its input again after the model (as its target, say), so that it "
                "would travel to the owner; `keep_inputs_on_data_tier=True` forbids this"
            )


def check_profile(profile: Profile, chain: LayerChain, model: str) -> None:
    """Refuses a profile of another model.

    Raises:
        ValueError: If its layers are not those of the chain.
    """
    measured = [
        (layer.name, layer.output_bytes_per_sample, layer.parameter_bytes)
        for layer in profile.layers
    ]
    found = [(layer.name, layer.output_bytes_per_sample, layer.parameter_bytes) for layer in chain]
    if len(measured) != len(found):
        raise ValueError(
            f"the profile of {profile.model!r} has {len(measured)} layers, this model ({model!r}) "
            f"has {len(found)}; "
            "profile the model again: leave out `profile`"
        )
    for index, (old, new) in enumerate(zip(measured, found, strict=True)):
        if old[1:] != new[1:]:
            raise ValueError(
                f"layer {index + 1} of the profile of {profile.model!r} is {old[0]!r} with "
                f"{old[1]} output bytes a sample "
                f"and {old[2]} parameter bytes; in this model ({model!r}) it is {new[0]!r} with "
                f"{new[1]} and {new[2]}; "
                "profile the model again: leave out `profile`"
            )
