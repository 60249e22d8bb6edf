"""The mirror, with real Trainers in one process: one plain, one that records, one that replays."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any, NamedTuple

import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_hiertrain.mirror import Mirror
from lightning_hiertrain.transport.packing import pack, unpack

CLASSES = 3


class Meter:
    """A user's own object with state."""

    def __init__(self) -> None:
        self.total = 0.0
        self.count = 0


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, CLASSES)
        self.accuracy = MulticlassAccuracy(CLASSES)
        self.val = nn.ModuleDict({"acc": MulticlassAccuracy(CLASSES)})
        self.collection = torchmetrics.MetricCollection(
            {"mean": torchmetrics.MeanMetric(), "cat": torchmetrics.CatMetric()}
        )
        self.manual = torchmetrics.MeanMetric()
        self.outputs: list[torch.Tensor] = []
        self.meter = Meter()
        self.counts: defaultdict[str, list[int]] = defaultdict(list)
        self.best = float("inf")
        self.running = torch.zeros(1)
        self.temperature = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        x, y = batch
        logits = self.layer(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("top", logits.max(), on_step=False, on_epoch=True, reduce_fx="max")
        self.log("number", 1.5 * batch_idx, on_epoch=True, reduce_fx=torch.sum)
        self.accuracy(logits, y)
        self.log("train_acc", self.accuracy, on_step=True, on_epoch=True)
        self.meter.total += float(loss)
        self.meter.count += 1
        self.running += loss.detach()
        self.counts["train"].append(batch_idx)
        return {"loss": loss, "logits": logits.detach()}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = sum(float(p.grad.norm()) for p in self.parameters())
        self.log_dict({"grad_norm": norm})

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.temperature *= 0.9

    def on_train_epoch_start(self) -> None:
        self.log("epoch_start", float(self.current_epoch))

    def on_train_epoch_end(self) -> None:
        self.log("meter", self.meter.total / self.meter.count)
        self.meter.total, self.meter.count = 0.0, 0

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        logits = self.layer(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.log("val_loss", loss, prog_bar=True)
        self.val["acc"](logits, y)
        self.log("val_acc", self.val["acc"])
        self.collection.update(loss)
        self.log_dict({"collected": self.collection["mean"]})
        self.manual.update(loss)
        self.outputs.append(loss)
        return loss

    def on_validation_epoch_end(self) -> None:
        mean = torch.stack(self.outputs).mean()
        self.best = min(self.best, float(mean))
        self.log("val_mean", mean)
        self.log("manual", self.manual.compute())
        self.manual.reset()
        self.outputs.clear()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val_mean"},
        }


class Owner(SingleDeviceStrategy):
    def __init__(self, tape: deque[Any]) -> None:
        super().__init__(device="cpu")
        self.tape = tape

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        self.mirror = Mirror(self.lightning_module)
        self.mirror.wrap_hooks(self.run_hook)

    def send(self, payload: Any) -> None:
        skeleton, tensors = pack(payload)
        self.tape.append((skeleton, [tensor.clone() for tensor in tensors]))

    def run_hook(self, name: str, original: Any, args: Any, kwargs: Any) -> Any:
        with self.mirror.record() as recording:
            output = original(*args, **kwargs)
            self.send(recording.payload(output))
        return output

    def step(self, name: str, batch: Any, args: Any) -> Any:
        with self.mirror.record(batch_size=len(batch[0])) as recording:
            output = getattr(self.lightning_module, name)(batch, *args)
            self.send(recording.payload(output))
        return output

    def training_step(self, batch: Any, *args: Any) -> Any:
        return self.step("training_step", batch, args)

    def validation_step(self, batch: Any, *args: Any) -> Any:
        return self.step("validation_step", batch, args)

    def optimizer_step(self, optimizer: Any, closure: Any, *args: Any, **kwargs: Any) -> Any:
        with self.mirror.record(surrounding=True) as recording:
            result = super().optimizer_step(optimizer, closure, *args, **kwargs)
            self.send(recording.payload())
        return result

    def teardown(self) -> None:
        self.mirror.close()
        super().teardown()


class Replica(Owner):
    def receive(self) -> Any:
        return self.mirror.replay(unpack(*self.tape.popleft()))

    def run_hook(self, name: str, original: Any, args: Any, kwargs: Any) -> Any:
        return self.receive()

    def step(self, name: str, batch: Any, args: Any) -> Any:
        return self.receive()

    def backward(self, closure_loss: Any, *args: Any, **kwargs: Any) -> Any:
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Any, *args: Any, **kwargs: Any) -> Any:
        result = closure()
        optimizer._opt_called = True
        self.receive()
        return result


class Spy(Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def look(self, where: str, trainer: Trainer) -> None:
        self.seen.append(
            (
                where,
                *(
                    {key: float(value) for key, value in metrics.items()}
                    for metrics in (
                        trainer.callback_metrics,
                        trainer.logged_metrics,
                        trainer.progress_bar_metrics,
                    )
                ),
            )
        )

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self.look(f"batch {float(outputs['loss']):.6f} {tuple(outputs['logits'].shape)}", trainer)

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        self.look("validation", trainer)

    def on_train_epoch_end(self, trainer: Trainer, module: Any) -> None:
        self.look("epoch", trainer)

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        self.look(f"end {trainer.current_epoch} {trainer.global_step} {rates}", trainer)


def loader(samples: int, batch_size: int, seed: int) -> DataLoader:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 4, generator=generator)
    y = torch.randint(0, CLASSES, (samples,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def fit(model: LightningModule, strategy: Any, path: Any, *, real: bool, **options: Any) -> Spy:
    spy = Spy()
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_epochs=4,
        callbacks=[spy, EarlyStopping("val_mean", patience=2)],
        logger=CSVLogger(path),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **options,
    )
    if real:
        trainer.fit(model, loader(10, 4, 1), loader(5, 2, 2))
    else:
        trainer.fit(model, loader(3, 1, 3), loader(3, 1, 4))
    return spy


def trio(make: Any) -> list[Any]:
    models = []
    for _ in range(3):
        torch.manual_seed(0)
        models.append(make())
    return models


@pytest.fixture
def fitted(tmp_path: Any) -> Any:
    plain, owner, replica = trio(Model)
    tape: deque[Any] = deque()
    seen = [
        fit(plain, SingleDeviceStrategy("cpu"), tmp_path / "plain", real=True),
        fit(owner, Owner(tape), tmp_path / "owner", real=True),
        fit(replica, Replica(tape), tmp_path / "replica", real=False),
    ]
    return (plain, owner, replica), seen, tape, tmp_path


def test_every_logged_value_equals_one_process(fitted: Any) -> None:
    _, (plain, owner, replica), tape, _ = fitted
    assert len(plain.seen) > 10
    assert owner.seen == plain.seen
    assert replica.seen == plain.seen
    assert not tape


def test_logger_files_equal_one_process(fitted: Any) -> None:
    *_, path = fitted
    files = [
        next((path / name).rglob("metrics.csv")).read_text()
        for name in ("plain", "owner", "replica")
    ]
    assert "grad_norm" in files[0]
    assert files[1] == files[0]
    assert files[2] == files[0]


def test_attributes_set_on_the_owner_are_set_on_the_replica(fitted: Any) -> None:
    (plain, _, replica), *_ = fitted
    assert replica.best == plain.best < float("inf")
    assert replica.outputs == []
    assert replica.temperature == pytest.approx(plain.temperature)
    assert replica.temperature < 1
    assert torch.equal(replica.running, plain.running)
    assert isinstance(replica.counts, defaultdict)
    assert replica.counts == plain.counts
    assert vars(replica.meter) == vars(plain.meter)


def test_close_leaves_the_module_as_it_was() -> None:
    model = Model()
    before = dict(vars(model))
    functions = [
        m.distributed_available_fn for m in model.modules() if isinstance(m, torchmetrics.Metric)
    ]
    mirror = Mirror(model)
    wrapped = mirror.wrap_hooks(lambda *_: None)
    assert set(wrapped) == {"on_before_zero_grad", "on_train_epoch_end", "on_validation_epoch_end"}
    with mirror.record():
        pass
    mirror.close()
    assert vars(model).keys() == before.keys()
    metrics = [m for m in model.modules() if isinstance(m, torchmetrics.Metric)]
    assert [m.distributed_available_fn for m in metrics] == functions


def test_a_closed_mirror_can_be_used_again() -> None:
    model, other = Model(), Model()
    mirror, replica = Mirror(model), Mirror(other)
    mirror.close()
    replica.close()
    assert "on_train_epoch_end" in mirror.wrap_hooks(lambda *_: None)
    with mirror.record() as recording:
        model.accuracy.update(torch.eye(3), torch.arange(3))
        replica.replay(recording.payload())
    assert not model.accuracy.distributed_available_fn()
    assert other.accuracy.compute() == 1
    mirror.close()
    replica.close()


def test_hooks_that_are_not_overridden_stay_untouched() -> None:
    class Bare(LightningModule):
        pass

    model = Bare()
    mirror = Mirror(model)
    assert mirror.wrap_hooks(lambda *_: None) == ()
    assert "on_train_epoch_end" not in vars(model)
    mirror.close()


def test_a_hook_called_by_another_hook_runs_where_that_one_runs() -> None:
    class Chained(LightningModule):
        def on_test_epoch_end(self) -> str:
            return self.on_validation_epoch_end()

        def on_validation_epoch_end(self) -> str:
            return "shared"

    model = Chained()
    mirror = Mirror(model)
    ran = []

    def run(name: str, original: Any, args: Any, kwargs: Any) -> Any:
        ran.append(name)
        with mirror.record():
            return original(*args, **kwargs)

    mirror.wrap_hooks(run)
    assert model.on_test_epoch_end() == "shared"
    assert ran == ["on_test_epoch_end"]
    mirror.close()


class Pair(NamedTuple):
    first: torch.Tensor
    second: int


def carry(before: Any, change: Any, start: Any = None) -> tuple[Any, Any, Any, Mirror]:
    """Runs `change(owner)` on one copy and replays it on another."""
    owner, replica = Model(), Model()
    for model in (owner, replica):
        if start is not None:
            start(model)
    mirrors = Mirror(owner), Mirror(replica)
    with mirrors[0].record() as recording:
        output = change(owner)
        payload = recording.payload(output)
    result = mirrors[1].replay(unpack(*pack(payload)))
    for mirror in mirrors:
        mirror.close()
    return owner, replica, result, mirrors[0]


def test_outputs_keep_their_structure() -> None:
    loss = torch.ones(1, requires_grad=True) * 2
    output = {
        "loss": loss,
        "pair": Pair(torch.ones(2), 3),
        "names": ["a", None],
        "deep": ({1: 2.5},),
    }
    *_, result, _ = carry(None, lambda model: output)
    assert not result["loss"].requires_grad
    assert torch.equal(result["loss"], loss.detach())
    assert isinstance(result["pair"], Pair)
    assert torch.equal(result["pair"].first, torch.ones(2))
    assert result["names"] == ["a", None]
    assert result["deep"] == ({1: 2.5},)


def test_a_leaf_that_cannot_travel_becomes_none_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Model()
    mirror = Mirror(model)
    for _ in range(2):
        with mirror.record() as recording:
            payload = recording.payload({"loss": torch.ones(1), "object": Meter()})
    mirror.close()
    assert payload["output"]["object"] is None
    assert payload["output"]["loss"] == 1
    assert len([r for r in caplog.records if "Meter" in r.getMessage()]) == 1


def test_a_payload_is_not_changed_by_what_comes_later() -> None:
    model = Model()
    mirror = Mirror(model)
    with mirror.record() as recording:
        model.running += 1
        payload = recording.payload(model.running)
    model.running += 1
    mirror.close()
    assert payload["output"] == 1
    assert payload["attributes"][0]["values"]["running"] == 1
    with pytest.raises(RuntimeError, match="begin another one"):
        recording.payload()


def test_a_tensor_changed_in_place_is_seen() -> None:
    def start(model: Any) -> None:
        model.table = {"a": torch.zeros(2)}

    def change(model: Any) -> None:
        model.table["a"] += 1

    _, replica, *_ = carry(None, change, start)
    assert torch.equal(replica.table["a"], torch.ones(2))


def test_in_inference_mode_states_and_tensors_are_seen() -> None:
    def change(model: Any) -> None:
        with torch.inference_mode():
            model.running += 1
            model.accuracy.update(torch.eye(3), torch.arange(3))

    def start(model: Any) -> None:
        with torch.inference_mode():
            model.running = torch.zeros(1)

    owner, replica, *_ = carry(None, change, start)
    assert torch.equal(replica.running, torch.ones(1))
    assert replica.accuracy.compute() == owner.accuracy.compute() == 1


def test_a_growing_list_sends_only_what_is_new() -> None:
    model = Model()
    mirror = Mirror(model)
    model.outputs.extend(torch.arange(1000.0))
    with mirror.record() as recording:
        model.outputs.append(torch.ones(()))
        entry = recording.payload()["attributes"][0]
    mirror.close()
    assert entry["grown"]["outputs"] == (1000, [torch.ones(())])
    assert not entry["values"]


def test_a_metric_with_a_list_state_sends_only_what_is_new() -> None:
    model = Model()
    mirror = Mirror(model)
    metric = model.collection["cat"]
    metric(torch.arange(5.0))
    with mirror.record() as recording:
        metric(torch.arange(3.0))
        state = recording.payload()["metrics"]["collection.cat"]
    mirror.close()
    length, items = state["grown"]["value"]
    assert length == 1
    assert torch.equal(items[0], torch.arange(3.0))


def test_large_or_foreign_values_stay_on_the_owner_and_are_named() -> None:
    def change(model: Any) -> None:
        model.big = torch.zeros(10_000)
        model.lock = pytest
        model.small = torch.ones(3)

    _, replica, _, mirror = carry(None, change)
    assert not hasattr(replica, "big")
    assert torch.equal(replica.small, torch.ones(3))
    assert mirror.unmirrored == {"big", "lock"}


def test_a_batch_size_of_the_owners_own_rows_means_the_mini_batch(tmp_path: Any) -> None:
    class Weighted(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)
            self.sizes = iter((3, 1))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.log("value", float(batch_idx), on_epoch=True, batch_size=2)
            return self.layer(batch[0]).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Strategy(SingleDeviceStrategy):
        def training_step(self, *args: Any) -> Any:
            model = self.lightning_module
            mirror = Mirror(model)
            with mirror.record(batch_size=next(model.sizes), own_samples=2):
                output = model.training_step(*args)
            mirror.close()
            return output

    trainer = Trainer(
        accelerator="cpu",
        strategy=Strategy("cpu"),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Weighted(), DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=2))
    assert float(trainer.callback_metrics["value_epoch"]) == pytest.approx(0.25)


def test_an_unknown_reduction_is_refused() -> None:
    model = Model()
    mirror = Mirror(model)
    with (
        mirror.record() as recording,
        pytest.raises(ValueError, match="only mean, sum, max and min"),
    ):
        recording.add_log("training_step", "x", 1.0, {"reduce_fx": torch.median})
    mirror.close()


def test_a_metric_that_another_tier_lacks_is_an_error() -> None:
    model, other = Model(), Model()
    model.extra = torchmetrics.MeanMetric()
    mirrors = Mirror(model), Mirror(other)
    with mirrors[0].record() as recording:
        model.extra.update(1.0)
        payload = recording.payload()
    with pytest.raises(ValueError, match="there is no metric 'extra' in Model on this tier"):
        mirrors[1].replay(payload)
    for mirror in mirrors:
        mirror.close()
