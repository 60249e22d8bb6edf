"""The least strategy on three tiers: one has the data, one does the steps, all run the same loops.

It shows that `Mirror` and `RemoteData` are enough to keep Lightning alike on all tiers without a
process group. The real strategy adds the split of a batch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_hiertrain.mirror import Mirror
from lightning_hiertrain.remote_data import RemoteData
from lightning_hiertrain.transport import Collectives, Network

TIERS = ("device", "edge", "cloud")


class Symmetric(ParallelStrategy):
    def __init__(self, owner: str, data_tier: str) -> None:
        super().__init__()
        self.owner, self.data_tier = owner, data_tier
        self.network: Network | None = None
        self.num_nodes = 1

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def tier(self) -> str:
        return TIERS[self.global_rank]

    @property
    def is_owner(self) -> bool:
        return self.tier == self.owner

    def set_world_ranks(self) -> None:
        environment = self.cluster_environment
        environment.set_global_rank(self.local_rank)
        environment.set_world_size(len(TIERS))
        rank_zero_only.rank = environment.global_rank()

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.network is None:
            self.network = Network.local(
                self.tier, TIERS, run_id=os.environ["MASTER_PORT"], timeout_seconds=30
            )
            self.network.start()
            self.network.wait_for_peers()
            self.collectives = Collectives(self.network, TIERS)
        module = self.lightning_module
        self.data = RemoteData(
            module.trainer,
            module,
            is_data_tier=self.tier == self.data_tier,
            data_tier=self.data_tier,
            collectives=self.collectives,
        )
        self.data.install()

    def setup(self, trainer: Trainer) -> None:
        self.accelerator.setup(trainer)
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        self.mirror = Mirror(self.lightning_module)
        self.mirror.wrap_hooks(self.run_hook)

    def from_owner(self, value: Any = None) -> Any:
        return self.collectives.broadcast(value, self.owner)

    def run_hook(self, name: str, original: Any, args: Any, kwargs: Any) -> Any:
        if not self.is_owner:
            return self.mirror.replay(self.from_owner())
        with self.mirror.record() as recording:
            output = original(*args, **kwargs)
            self.from_owner(recording.payload(output))
        return output

    def step(self, name: str, batch: Any, *args: Any) -> Any:
        if not self.is_owner:
            return self.mirror.replay(self.from_owner())
        with self.mirror.record(batch_size=len(batch[0])) as recording:
            output = getattr(self.lightning_module, name)(batch, *args)
            self.from_owner(recording.payload(output))
        return output

    def training_step(self, *args: Any) -> Any:
        return self.step("training_step", *args)

    def validation_step(self, *args: Any) -> Any:
        return self.step("validation_step", *args)

    def test_step(self, *args: Any) -> Any:
        return self.step("test_step", *args)

    def predict_step(self, *args: Any) -> Any:
        return self.step("predict_step", *args)

    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> Any:
        return super().backward(loss, *args, **kwargs) if self.is_owner else loss

    def optimizer_step(self, optimizer: Any, closure: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.is_owner:
            result = closure()
            optimizer._opt_called = True
            self.mirror.replay(self.from_owner())
            return result
        with self.mirror.record(surrounding=True) as recording:
            result = super().optimizer_step(optimizer, closure, *args, **kwargs)
            self.from_owner(recording.payload())
        return result

    def process_dataloader(self, loader: Any) -> Any:
        return self.data.process_dataloader(loader)

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        if self.tier == self.data_tier:
            moved = super().batch_to_device(batch, device, dataloader_idx)
            self.collectives.broadcast(deepcopy(list(moved)), self.data_tier)
            return moved
        received = self.collectives.broadcast(None, self.data_tier)
        return received if self.is_owner else batch.sized(len(received[0]))

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return dict(self.from_owner(deepcopy(dict(super().lightning_module_state_dict()))))

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return dict(self.from_owner(deepcopy(super().optimizer_state(optimizer))))

    def on_train_end(self) -> None:
        self.lightning_module.load_state_dict(self.lightning_module_state_dict())

    def on_exception(self, exception: BaseException) -> None:
        if self.network is not None:
            self.network.abort(f"{type(exception).__name__}: {exception}")

    def model_to_device(self) -> None:
        self.model.to(self.root_device)

    def barrier(self, name: str | None = None) -> None:
        if self.network is not None:
            self.collectives.barrier(name)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if self.network is None else self.collectives.broadcast(obj, TIERS[src])

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        values = self.collectives.all_gather(tensor)
        total = sum(torch.as_tensor(value) for value in values)
        return total / len(TIERS) if str(reduce_op) in ("mean", "avg") else total

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        return torch.stack(self.collectives.all_gather(tensor))

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        gathered = self.collectives.all if all else self.collectives.any
        return gathered(bool(decision))

    def teardown(self) -> None:
        self.data.restore()
        if hasattr(self, "mirror"):
            self.mirror.close()
        super().teardown()


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.accuracy = MulticlassAccuracy(3)
        self.val_accuracy = nn.ModuleList([MulticlassAccuracy(3), MulticlassAccuracy(3)])
        self.outputs: list[torch.Tensor] = []
        self.average = 0.0

    def setup(self, stage: str) -> None:
        self.classes = self.trainer.datamodule.num_classes

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self.layer(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.accuracy(logits, y)
        self.log("train_acc", self.accuracy, on_step=True, on_epoch=True)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("grad", self.layer.weight.grad.norm())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.average = 0.5 * self.average + 0.5 * float(outputs["loss"]) * len(batch[0])

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        logits = self.layer(x)
        self.val_accuracy[dataloader_idx](logits, y)
        self.log("val_acc", self.val_accuracy[dataloader_idx])
        loss = nn.functional.cross_entropy(logits, y)
        self.log("val_loss", loss)
        self.outputs.append(loss)

    def on_validation_epoch_end(self) -> None:
        mean = torch.stack(self.outputs).mean()
        self.log("val_mean", mean)
        self.logger.log_metrics({"direct": float(mean)}, step=self.global_step)
        self.logger.experiment.log_metrics({"writer": mean.item()}, step=self.global_step)
        self.outputs.clear()

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("test_loss", nn.functional.cross_entropy(self.layer(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.layer(batch[0])

    def configure_optimizers(self) -> Any:
        steps = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3 + steps * 1e-4, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val_mean"},
        }


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter(samples(5, 4))


def samples(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (count,), generator=generator))


class Data(LightningDataModule):
    def __init__(self, has_data: bool, fails: bool = False) -> None:
        super().__init__()
        self.has_data, self.fails = has_data, fails

    def prepare_data(self) -> None:
        assert self.has_data

    def setup(self, stage: str) -> None:
        assert self.has_data
        self.num_classes = 3
        self.train = samples(10, 1)

    def train_dataloader(self) -> Any:
        assert self.has_data
        if self.fails:
            return Failing()
        return DataLoader(self.train, batch_size=4, shuffle=True)

    def val_dataloader(self) -> Any:
        assert self.has_data
        return [DataLoader(samples(5, 2), batch_size=2), DataLoader(Stream(), batch_size=2)]

    test_dataloader = predict_dataloader = val_dataloader

    def state_dict(self) -> dict[str, Any]:
        assert self.has_data
        return {"num_classes": self.num_classes}


class Failing:
    def __iter__(self) -> Iterator[Any]:
        yield [torch.ones(2, 4), torch.zeros(2, dtype=torch.long)]
        raise ValueError("the disk is gone")


class Rates(Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        self.seen.append((trainer.optimizers[0].param_groups[0]["lr"], metrics))


def train(
    folder: str,
    owner: str | None = None,
    data_tier: str = "device",
    fails: bool = False,
    resume: bool = False,
    max_epochs: int = 6,
) -> Any:
    """Fits, validates, tests and predicts; with `owner=None` plainly, in one process."""
    rank = int(os.environ.get("LOCAL_RANK", 0))
    plain = owner is None
    strategy = SingleDeviceStrategy("cpu") if plain else Symmetric(owner, data_tier)
    rates, stopping = Rates(), EarlyStopping("val_mean", patience=3, mode="min")
    saving = ModelCheckpoint(
        Path(folder, "checkpoints"),
        "{epoch}-{step}-{val_mean:.6f}",
        monitor="val_mean",
        save_top_k=2,
        save_last=True,
    )
    logger = CSVLogger(folder, version=0)
    trainer = Trainer(
        accelerator="cpu",
        devices=1 if plain else 3,
        strategy=strategy,
        max_epochs=max_epochs,
        callbacks=[rates, stopping, saving],
        logger=logger,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
    )
    torch.manual_seed(0)
    model, data = Model(), Data(plain or TIERS[rank] == data_tier, fails)
    trainer.fit(model, datamodule=data, ckpt_path="last" if resume else None)
    found = {
        "classes": model.classes,
        "average": model.average,
        "rates": rates.seen,
        "epochs": trainer.current_epoch,
        "steps": trainer.global_step,
        "best": Path(saving.best_model_path).name,
        "files": sorted(path.name for path in Path(folder, "checkpoints").iterdir()),
        "log": Path(logger.log_dir, "metrics.csv").read_text() if rank == 0 else None,
        "weights": {key: value.clone() for key, value in model.state_dict().items()},
        "validated": trainer.validate(model, datamodule=data, verbose=False),
        "tested": trainer.test(model, datamodule=data, verbose=False),
        "predicted": trainer.predict(model, datamodule=data),
    }
    if not plain:
        strategy.network.close()
    return found
