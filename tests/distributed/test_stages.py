"""Validation, checkpoints, resuming and testing across tiers against plain Lightning."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from tests.distributed import stage_cases
from tests.distributed.launch import Case, run_cases
from tests.distributed.models import ModuleLeNet, loader
from tests.distributed.test_transparency import owned_by, schedule
from tests.distributed.training import largest_difference

OWNERS = ("device", "edge", "cloud")
MONITORED = {
    "ModuleLeNet by loss": {"model": "ModuleLeNet"},
    "Transformer by loss": {"model": "Transformer"},
    "MeasuredLeNet by accuracy": {"model": "MeasuredLeNet", "monitor": "train_accuracy_epoch"},
}


class Runs:
    """What was run across tiers and what plain Lightning makes of the same."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cases: dict[str, tuple[str, dict[str, Any]]] = {}
        self.tiers: dict[str, list[dict[str, Any]]] = {}
        self._plain: dict[str, dict[str, Any]] = {}

    def add(self, name: str, function: str, **kwargs: Any) -> None:
        kwargs["folder"] = str(self.folder / name / "tiers")
        self.cases[name] = (function, kwargs)

    def run(self, timeout_seconds: float) -> None:
        cases = [
            Case(target=f"{stage_cases.__name__}:{function}", kwargs=kwargs)
            for function, kwargs in self.cases.values()
        ]
        results = run_cases(cases, timeout_seconds=timeout_seconds)
        self.tiers = dict(zip(self.cases, results, strict=True))

    def plain(self, name: str) -> dict[str, Any]:
        if name not in self._plain:
            function, kwargs = self.cases[name]
            kwargs = {key: value for key, value in kwargs.items() if key != "schedule"}
            kwargs |= {"folder": str(self.folder / name / "plain"), "plain": True}
            if "resume" in kwargs:
                kwargs["resume"] = kwargs["resume"].replace("/tiers/", "/plain/")
            call: Callable[..., dict[str, Any]] = getattr(stage_cases, function)
            self._plain[name] = call(**kwargs)
        return self._plain[name]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    runs = Runs(folder)
    for index, (name, kwargs) in enumerate(MONITORED.items()):
        model = "ModuleLeNet" if "LeNet" in kwargs["model"] else kwargs["model"]
        runs.add(name, "monitored", schedule=owned_by(OWNERS[(index + 1) % 3], model), **kwargs)
    edge, cloud = owned_by("edge", "ModuleLeNet"), owned_by("cloud", "ModuleLeNet")
    device = owned_by("device", "ModuleLeNet")
    runs.add("first half", "fit", schedule=edge, max_epochs=2)
    runs.add("second half", "fit", schedule=cloud, resume=f"{folder}/first half/tiers/step=8.ckpt")
    runs.add("whole", "fit", schedule=device)
    runs.add(
        "first steps", "fit", schedule=device, max_epochs=2, every_n_train_steps=3, stateful=True
    )
    middle = f"{folder}/first steps/tiers/step=6.ckpt"
    runs.add("from the middle", "fit", schedule=cloud, resume=middle, stateful=True)
    runs.add("first, stateless", "fit", schedule=device, max_epochs=2, every_n_train_steps=3)
    stateless = f"{folder}/first, stateless/tiers/step=6.ckpt"
    runs.add("from the middle, stateless", "fit", schedule=edge, resume=stateless)
    runs.add("accumulated", "fit", schedule=edge, max_epochs=2, accumulate=2)
    accumulated = f"{folder}/accumulated/tiers/step=4.ckpt"
    runs.add(
        "accumulated, resumed",
        "fit",
        schedule=cloud,
        resume=accumulated,
        accumulate=2,
        max_epochs=4,
    )
    plain = stage_cases.fit(folder=str(folder / "of plain"), plain=True, max_epochs=2)
    assert plain["global_step"] == 8
    runs.add("of plain, resumed", "fit", schedule=cloud, resume=f"{folder}/of plain/step=8.ckpt")
    for owner in OWNERS:
        runs.add(f"stages on {owner}", "every_stage", schedule=owned_by(owner, "ModuleLeNet"))
    runs.add(
        "stages, owner without samples",
        "every_stage",
        schedule=schedule("cloud", device=(5, 6), edge=(5, 6), cloud=(12, 0)),
    )
    runs.run(timeout_seconds=200)
    return runs


def same(first: Any, second: Any, *, atol: float = 1e-6) -> bool:
    alike = functools.partial(same, atol=atol)
    if isinstance(first, torch.Tensor):
        return torch.allclose(first, second, atol=atol)
    if isinstance(first, float):
        return first == pytest.approx(second, abs=atol, nan_ok=True)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(alike(first[k], second[k]) for k in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(alike, first, second))
    return bool(first == second)


def assert_same(expected: dict[str, Any], ranks: list[dict[str, Any]], *, but: str = "") -> None:
    for rank, found in enumerate(ranks):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            if key != but:
                assert same(value, found[key]), (rank, key, value, found[key])


@pytest.mark.parametrize("name", MONITORED)
def test_validation_steers_training_as_on_one_process(runs: Runs, name: str) -> None:
    expected = runs.plain(name)
    assert len(expected["files"]) == 3
    assert len({values["lr"] for values in expected["history"]}) > 1, "the plateau was not met"
    assert expected["epoch"] < 12, "training did not stop early"
    assert_same(expected, runs.tiers[name])


@pytest.mark.parametrize(
    "name",
    [
        "whole",
        "second half",
        "first steps",
        "from the middle",
        "from the middle, stateless",
        "accumulated, resumed",
    ],
)
def test_resuming_goes_on_as_plain_lightning_does(runs: Runs, name: str) -> None:
    for earlier in ("first half", "first steps", "first, stateless", "accumulated"):
        runs.plain(earlier)
    assert_same(runs.plain(name), runs.tiers[name])


@pytest.mark.parametrize("name", ["second half", "from the middle", "of plain, resumed"])
def test_resuming_ends_where_an_undisturbed_run_ends(runs: Runs, name: str) -> None:
    expected = runs.plain("whole")
    assert expected["global_step"] == 20
    assert_same(expected, runs.tiers[name])


def test_checkpoint_files_hold_what_plain_lightning_would_save(runs: Runs) -> None:
    runs.plain("first steps")
    of_tiers = sorted((runs.folder / "first steps" / "tiers").glob("*.ckpt"))
    of_plain = sorted((runs.folder / "first steps" / "plain").glob("*.ckpt"))
    assert [path.name for path in of_tiers] == [path.name for path in of_plain]
    assert len(of_tiers) == 3
    for found, expected in zip(of_tiers, of_plain, strict=True):
        one, two = (torch.load(path, weights_only=False) for path in (expected, found))
        assert one.keys() == two.keys()
        assert one["optimizer_states"][0]["state"]
        for key in one.keys() - {"callbacks"}:
            assert same(one[key], two[key]), (found.name, key, one[key], two[key])


def test_plain_lightning_loads_a_checkpoint(runs: Runs) -> None:
    path = runs.folder / "first half" / "tiers" / "step=8.ckpt"
    module = ModuleLeNet.load_from_checkpoint(path).double()
    expected = runs.tiers["first half"][0]
    assert largest_difference({"weights": module.state_dict()}, expected) < 1e-7
    resumed = stage_cases.fit(folder=str(runs.folder / "resumed"), plain=True, resume=str(path))
    assert_same(runs.plain("whole"), [resumed])
    data = loader("ModuleLeNet", count=20, batch_size=8, seed=2, shuffle=False)
    trainer = Trainer(logger=False, enable_progress_bar=False, precision="64-true")
    trainer.validate(ModuleLeNet(), data, ckpt_path=path, verbose=False)
    assert trainer.callback_metrics["val_loss"] > 0


@pytest.mark.parametrize(
    "name", [*(f"stages on {owner}" for owner in OWNERS), "stages, owner without samples"]
)
def test_validate_test_and_predict_work_before_and_after_training(runs: Runs, name: str) -> None:
    expected = runs.plain(name)
    results = expected["results"]
    assert sum(len(part) for part in results["predict after"]) == 20
    assert not same(results["validate before"], results["validate after"])
    assert_same(expected, runs.tiers[name])
