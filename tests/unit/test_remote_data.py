"""Data on one tier: a run that builds datasets leaves a tape, and a run without data follows it.

Both are ordinary Trainers in this process. What the data tier broadcasts goes on the tape; the
other tier reads it in order. If loops were not alike, the hooks' trace would differ or the tape
would not fit.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_hiertrain.remote_data import BatchToken, RemoteData, sized_token
from lightning_hiertrain.transport.packing import pack, unpack


class Tape:
    """Broadcasts of the data tier, in order."""

    def __init__(self, *, is_data_tier: bool, entries: deque[Any]) -> None:
        self.is_data_tier = is_data_tier
        self.entries = entries

    def broadcast(self, value: Any, source: str, *, timeout_seconds: float | None = None) -> Any:
        assert source == "device"
        if self.is_data_tier:
            self.entries.append(pack(value))
            return value
        assert self.entries, "the tier without data asked more often than the data tier answered"
        return unpack(*self.entries.popleft())


class DataTier(SingleDeviceStrategy):
    is_data_tier = True

    def __init__(self, entries: deque[Any]) -> None:
        super().__init__("cpu")
        self.tape = Tape(is_data_tier=self.is_data_tier, entries=entries)

    def setup_environment(self) -> None:
        super().setup_environment()
        module = self.lightning_module
        self.data = RemoteData(
            module.trainer,
            module,
            is_data_tier=self.is_data_tier,
            data_tier="device",
            collectives=self.tape,
        )
        self.data.install()

    def process_dataloader(self, loader: Any) -> Any:
        return self.data.process_dataloader(loader)

    def teardown(self) -> None:
        self.data.restore()
        super().teardown()


class OtherTier(DataTier):
    is_data_tier = False

    @property
    def is_global_zero(self) -> bool:
        return False

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        assert all(isinstance(leaf, BatchToken) or leaf is None for leaf in leaves(batch))
        return sized_token(batch, 2)

    def training_step(self, *args: Any) -> Any:
        return self.lightning_module.layer.weight.sum()

    def validation_step(self, *args: Any) -> Any:
        return torch.zeros(())

    test_step = predict_step = validation_step


def leaves(batch: Any) -> list[Any]:
    if isinstance(batch, dict):
        return [leaf for item in batch.values() for leaf in leaves(item)]
    if isinstance(batch, list | tuple):
        return [leaf for item in batch for leaf in leaves(item)]
    return [batch]


class Trace(Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.startswith("on_") or "checkpoint" in name or name == "on_exception":
            return found

        def hook(trainer: Trainer, module: Any, *args: Any) -> None:
            numbers = [item for item in args if isinstance(item, int)]
            counts = (trainer.num_training_batches, trainer.num_val_batches, trainer.global_step)
            self.seen.append((name, numbers, *counts))

        return hook


class Model(LightningModule):
    def __init__(self, steps: list[Any] | None = None, loaders: Any = None) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.steps = steps
        self.loaders = loaders

    def step(self, batch: Any) -> torch.Tensor:
        first = next(leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor))
        return self.layer(first.float().reshape(-1, 1)).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(batch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.step(batch)

    test_step = predict_step = validation_step

    def configure_optimizers(self) -> Any:
        if self.steps is not None:
            self.steps.append(self.trainer.estimated_stepping_batches)
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OwnLoaders(Model):
    """Builds its loaders itself, where there is data."""

    prepared = 0

    def prepare_data(self) -> None:
        assert self.loaders is not None
        self.prepared += 1

    def train_dataloader(self) -> Any:
        return self.loaders()[0]

    def val_dataloader(self) -> Any:
        return self.loaders()[1]

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert isinstance(batch[0], torch.Tensor)
        return batch


def dataset(samples: int) -> TensorDataset:
    return TensorDataset(torch.arange(float(samples)).reshape(-1, 1))


def loader(samples: int, batch_size: int = 2, **options: Any) -> DataLoader:
    return DataLoader(dataset(samples), batch_size=batch_size, **options)


class Stream(IterableDataset):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(float(self.samples)).reshape(-1, 1))


class LyingStream(Stream):
    def __len__(self) -> int:
        return self.samples + 6


class Batches:
    """The least that Lightning takes for a loader."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.ones(2, 1)] * self.batches)


def stream(samples: int, kind: type[Stream] = Stream) -> DataLoader:
    return DataLoader(kind(samples), batch_size=2)


class NoData:
    """Loaders of a script on a tier where they must not be used."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("a loader was iterated on a tier without data")

    def __len__(self) -> int:
        raise AssertionError("a loader's length was asked for on a tier without data")


def run(
    strategy: type[DataTier],
    tape: deque[Any],
    function: str,
    data: Any,
    model: Model | None = None,
    callbacks: Any = (),
    **options: Any,
) -> tuple[list[Any], Trainer]:
    trace = Trace()
    options = {"max_epochs": 3, "limit_predict_batches": None, **options}
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy(tape),
        callbacks=[trace, *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        getattr(trainer, function)(model or Model(), **data)
    return trace.seen, trainer


def follow(function: str, data: Any, no_data: Any = None, **options: Any) -> list[Any]:
    """Runs the data tier, then another tier on its tape, and compares their traces."""
    tape: deque[Any] = deque()
    models = options.pop("models", (None, None))
    if no_data is None:
        no_data = dict.fromkeys(data, NoData())
    seen, _ = run(DataTier, tape, function, data, models[0], **options)
    other, _ = run(OtherTier, tape, function, no_data, models[1], **options)
    assert other == seen
    assert not tape, "the data tier said more than the other tier asked for"
    return seen


def count(seen: list[Any], hook: str) -> int:
    return sum(entry[0] == hook for entry in seen)


OPTIONS = {
    "plain": {},
    "limits as counts": {"limit_train_batches": 2, "limit_val_batches": 1},
    "limits as fractions": {"limit_train_batches": 0.5, "limit_val_batches": 0.5},
    "no validation": {"limit_val_batches": 0},
    "validation in mid-epoch": {"val_check_interval": 2},
    "validation at half epochs": {"val_check_interval": 0.5},
    "validation every second epoch": {"check_val_every_n_epoch": 2},
    "validation across epochs": {"val_check_interval": 3, "check_val_every_n_epoch": None},
    "timed validation": {"val_check_interval": timedelta(seconds=0.001)},
    "whole sanity check": {"num_sanity_val_steps": -1},
    "no sanity check": {"num_sanity_val_steps": 0},
    "reloaded": {"reload_dataloaders_every_n_epochs": 1},
    "overfit": {"overfit_batches": 2},
    "overfit a part": {"overfit_batches": 0.5},
    "accumulated": {"accumulate_grad_batches": 3},
    "a number of steps": {"max_steps": 7},
    "development run": {"fast_dev_run": True},
    "development run of two": {"fast_dev_run": 2},
    "no training": {"limit_train_batches": 0},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_loops_are_alike_under_the_trainer_s_options(name: str) -> None:
    data = {"train_dataloaders": loader(9, shuffle=True), "val_dataloaders": loader(5)}
    seen = follow("fit", data, **OPTIONS[name])
    assert count(seen, "on_fit_start") == 1
    if name == "plain":
        assert count(seen, "on_train_batch_end") == 15
        assert count(seen, "on_validation_batch_end") == 2 + 9


LOADERS = {
    "a list": ([loader(4), loader(9)], 5),
    "a dictionary": ({"a": loader(4), "b": loader(9)}, 5),
    "nested": ({"a": [loader(4), loader(3)], "b": loader(9)}, 5),
    "the shortest": (CombinedLoader({"a": loader(4), "b": loader(9)}, "min_size"), 2),
    "the longest": (CombinedLoader([loader(4), loader(9)], "max_size"), 5),
    "a stream": (stream(9), 5),
    "a stream whose length is wrong": (stream(9, LyingStream), 5),
    "a stream and a loader": ({"a": stream(4), "b": loader(9)}, 5),
    "an iterable": (Batches(3), 3),
    "a batch sampler": (DataLoader(dataset(4), batch_sampler=[[0], [1, 2], [3]]), 3),
    "single samples": (DataLoader(dataset(3), batch_size=None), 3),
    "nothing": (loader(0), 0),
}


@pytest.mark.parametrize("name", LOADERS)
def test_every_kind_of_loader_gives_as_many_tokens_as_batches(name: str) -> None:
    loaders, batches = LOADERS[name]
    seen = follow("fit", {"train_dataloaders": loaders}, max_epochs=2)
    assert count(seen, "on_train_batch_end") == 2 * batches


def test_a_stream_can_be_limited() -> None:
    seen = follow(
        "fit",
        {"train_dataloaders": stream(100), "val_dataloaders": stream(100)},
        limit_train_batches=3,
        limit_val_batches=2,
        val_check_interval=2,
    )
    assert count(seen, "on_train_batch_end") == 9


@pytest.mark.parametrize("function", ["validate", "test", "predict"])
def test_several_loaders_keep_their_indices(function: str) -> None:
    seen = follow(function, {"dataloaders": [loader(4), stream(3), loader(9)]})
    name = {"validate": "validation"}.get(function, function)
    indices = [entry[1][-1] for entry in seen if entry[0] == f"on_{name}_batch_end"]
    assert indices == [0, 0, 1, 1, 2, 2, 2, 2, 2]


def test_the_number_of_steps_is_known_without_data() -> None:
    steps: list[Any] = []
    follow(
        "fit",
        {"train_dataloaders": loader(9)},
        models=(Model(steps), Model(steps)),
        accumulate_grad_batches=2,
    )
    assert steps == [9, 9]


def test_a_module_s_own_loaders_are_built_on_the_data_tier() -> None:
    models = OwnLoaders(loaders=lambda: (loader(9), [loader(4), loader(2)])), OwnLoaders()
    seen = follow("fit", {}, models=models)
    assert count(seen, "on_train_batch_end") == 15
    assert models[0].prepared == 1
    assert models[1].prepared == 0
    for model in models:
        assert not {"train_dataloader", "_on_before_batch_transfer"} & set(vars(model))


class Data(LightningDataModule):
    """A datamodule that may be used on the data tier alone."""

    def __init__(self, has_data: bool) -> None:
        super().__init__()
        self.has_data = has_data
        self.calls: list[str] = []
        self.root = "here"

    def called(self, name: str) -> None:
        if not self.has_data:
            raise AssertionError(f"{name} was called on a tier without data")

    def prepare_data(self) -> None:
        self.called("prepare_data")

    def setup(self, stage: str) -> None:
        self.called("setup")
        self.num_classes = 7
        self.set: Dataset[Any] = dataset(9)

    def teardown(self, stage: str) -> None:
        self.called("teardown")

    def train_dataloader(self) -> Any:
        self.called("train_dataloader")
        return DataLoader(self.set, batch_size=2)

    def val_dataloader(self) -> Any:
        self.called("val_dataloader")
        return DataLoader(self.set, batch_size=3)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.called("on_after_batch_transfer")
        return batch

    def state_dict(self) -> dict[str, Any]:
        self.called("state_dict")
        return {"classes": self.num_classes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.called("load_state_dict")

    def twice(self) -> int:
        return 2 * self.num_classes


class Reader(Callback):
    def __init__(self) -> None:
        self.read: list[Any] = []

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        found = trainer.datamodule
        self.read.append((isinstance(found, Data), found.num_classes, found.twice(), found.root))


def test_a_datamodule_works_on_the_data_tier_and_is_read_on_all() -> None:
    reader = Reader()
    data = Data(True), Data(False)
    seen = follow(
        "fit", {"datamodule": data[0]}, {"datamodule": data[1]}, callbacks=[reader], max_epochs=2
    )
    assert count(seen, "on_train_batch_end") == 10
    assert reader.read == [(True, 7, 14, "here")] * 2
    assert not hasattr(data[1], "set")
    assert "setup" not in vars(data[0])


def test_a_second_run_finds_the_user_s_datamodule_again() -> None:
    tape: deque[Any] = deque()
    data = Data(True), Data(False)
    trainers = [
        run(strategy, tape, "fit", {"datamodule": item}, max_epochs=1)[1]
        for strategy, item in zip((DataTier, OtherTier), data, strict=True)
    ]
    for trainer, item in zip(trainers, data, strict=True):
        trainer.validate(Model(), datamodule=item, verbose=False)
    assert not tape
    assert isinstance(trainers[1].datamodule, Data)
    assert vars(trainers[1].datamodule) is vars(data[1])


def test_a_loader_asked_for_without_data_is_an_error() -> None:
    class Asks(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            with pytest.raises(RuntimeError, match="exists on tier 'device' alone"):
                trainer.datamodule.train_dataloader()
            with pytest.raises(AttributeError, match="exist on tier 'device' alone"):
                _ = trainer.train_dataloader.dataset
            assert len(trainer.train_dataloader) == 5

    tape: deque[Any] = deque()
    run(DataTier, tape, "fit", {"datamodule": Data(True)}, max_epochs=1)
    run(OtherTier, tape, "fit", {"datamodule": Data(False)}, max_epochs=1, callbacks=[Asks()])
    assert not tape


def test_prediction_writers_learn_the_indices_of_samples() -> None:
    class Writer(BasePredictionWriter):
        def __init__(self) -> None:
            super().__init__("batch_and_epoch")
            self.batches: list[Any] = []

        def write_on_batch_end(
            self, trainer: Any, module: Any, out: Any, indices: Any, *_: Any
        ) -> None:
            self.batches.append(list(indices))

        def write_on_epoch_end(self, trainer: Any, module: Any, out: Any, indices: Any) -> None:
            self.batches.append(indices)

    tape: deque[Any] = deque()
    writers = Writer(), Writer()
    run(DataTier, tape, "predict", {"dataloaders": loader(5)}, callbacks=[writers[0]])
    run(OtherTier, tape, "predict", {"dataloaders": NoData()}, callbacks=[writers[1]])
    assert writers[0].batches == [[0, 1], [2, 3], [4], [[[0, 1], [2, 3], [4]]]]
    assert writers[1].batches == writers[0].batches
    assert not tape


class StatefulLoader:
    """Goes on from where its state says."""

    def __init__(self) -> None:
        self.position = 0

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.position %= 4
        while self.position < 4:
            self.position += 1
            yield torch.full((2, 1), float(self.position))

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class NotZero(DataTier):
    @property
    def is_global_zero(self) -> bool:
        return False


class Zero(OtherTier):
    @property
    def is_global_zero(self) -> bool:
        return True


class Saves(Callback):
    def __init__(self) -> None:
        self.saved: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step == 2:
            self.saved = trainer._checkpoint_connector.dump_checkpoint()


def test_the_tier_that_writes_the_checkpoint_has_the_data_tier_s_states() -> None:
    tape: deque[Any] = deque()
    savers = Saves(), Saves()

    class StatefulData(Data):
        def train_dataloader(self) -> Any:
            self.called("train_dataloader")
            return StatefulLoader()

    for strategy, has_data, saver in zip((NotZero, Zero), (True, False), savers, strict=True):
        data = {"datamodule": StatefulData(has_data)}
        run(strategy, tape, "fit", data, max_epochs=1, callbacks=[saver])
    assert not tape
    name = StatefulData.__qualname__
    for saver in savers:
        assert saver.saved["loops"]["fit_loop"]["state_dict"]["combined_loader"] == [
            {"position": 2}
        ]
        assert saver.saved[name] == {"classes": 7}


def test_resuming_in_mid_epoch_is_alike(tmp_path: Any) -> None:
    class SavesFile(Callback):
        def __init__(self, path: Any) -> None:
            self.path = path

        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            if trainer.global_step == 2 and not self.path.exists():
                trainer.save_checkpoint(self.path)

    path = tmp_path / "mid.ckpt"
    tape: deque[Any] = deque()
    for strategy, item in zip((DataTier, OtherTier), (StatefulLoader(), NoData()), strict=True):
        run(strategy, tape, "fit", {"train_dataloaders": item}, callbacks=[SavesFile(path)])
    loaders = StatefulLoader()
    traces = [
        run(strategy, tape, "fit", {"train_dataloaders": item, "ckpt_path": path})[0]
        for strategy, item in zip((DataTier, OtherTier), (loaders, NoData()), strict=True)
    ]
    assert traces[0] == traces[1]
    assert not tape
    assert count(traces[0], "on_train_batch_end") == 2 + 4 + 4


def test_a_step_that_takes_the_iterator_is_refused() -> None:
    class Iterates(Model):
        def training_step(self, dataloader_iter: Any) -> Any:
            return None

    with pytest.raises(MisconfigurationException, match="training_step takes `dataloader_iter`"):
        run(DataTier, deque(), "fit", {"train_dataloaders": loader(4)}, Iterates())


def test_another_script_on_another_tier_is_refused() -> None:
    tape: deque[Any] = deque()
    run(DataTier, tape, "fit", {"datamodule": Data(True)}, max_epochs=1)
    with pytest.raises(MisconfigurationException, match="datamodule Data, this tier with None"):
        run(OtherTier, tape, "fit", {"train_dataloaders": NoData()})


def test_a_token_tells_lightning_the_batch_s_size() -> None:
    from lightning.pytorch.utilities.data import extract_batch_size

    assert extract_batch_size({"a": BatchToken(0).sized(5)}) == 5
    with pytest.raises(MisconfigurationException, match="could not infer the batch_size"):
        extract_batch_size(BatchToken(0))


def test_a_token_that_is_unpacked_says_what_it_is() -> None:
    with pytest.raises(TypeError, match="a callback reads `batch` on a tier that has none of its"):
        _, _ = BatchToken(3, 12)


def test_one_token_stands_for_a_combined_batch() -> None:
    token = sized_token({"a": [BatchToken(1), None], "b": BatchToken(4)}, 8)
    assert (token.index, token.num_samples) == (4, 8)
    assert sized_token([None], 8).num_samples == 8


def test_shuffling_is_what_it_would_be_in_one_process() -> None:
    class Order(Callback):
        def __init__(self) -> None:
            self.seen: list[float] = []

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, *_: Any) -> None:
            self.seen.extend(leaves(batch)[0].flatten().tolist())

    orders = Order(), Order()
    data = {"train_dataloaders": DataLoader(dataset(9), 2, shuffle=True, sampler=None)}
    run(DataTier, deque(), "fit", data, callbacks=[orders[0]])
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=3,
        callbacks=[orders[1]],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(0)
    trainer.fit(Model(), **data)
    assert orders[0].seen == orders[1].seen
