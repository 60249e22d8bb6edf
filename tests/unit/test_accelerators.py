"""What tiers with different accelerators rest on, checked where there is none.

The device `meta` stands for an accelerator: it is not the CPU, and torch has it everywhere.
"""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn

from lightning_hiertrain import accelerators
from lightning_hiertrain.execution.chance import own_chance
from lightning_hiertrain.execution.optimizers import with_own_kernels
from lightning_hiertrain.execution.settings import TrainedSettings
from lightning_hiertrain.meeting import _agreed
from lightning_hiertrain.mirror.attributes import Attributes
from lightning_hiertrain.partition import trace_layers
from lightning_hiertrain.partition.isolation import same_chance
from lightning_hiertrain.partition.views import filled
from lightning_hiertrain.placing import placed


class Generators:
    """Stands in for torch's module of a kind of accelerator."""

    def __init__(self) -> None:
        self.state = 1

    def manual_seed(self, number: int) -> None:
        self.state = number

    def get_rng_state(self) -> int:
        return self.state

    def set_rng_state(self, state: int) -> None:
        self.state = state

    def is_initialized(self) -> bool:
        return True


@pytest.fixture
def generators(monkeypatch: pytest.MonkeyPatch) -> Generators:
    module = Generators()
    device = torch.device("meta")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: device)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    return module


def test_random_numbers_of_any_accelerator_are_given_back(generators: Generators) -> None:
    """They were those of CUDA alone."""
    with same_chance():
        generators.state = 7
    assert generators.state == 1
    with own_chance("a tier's own"):
        first = generators.state
    with own_chance("another's"):
        assert len({first, generators.state, 1}) == 3
    assert generators.state == 1


def test_an_accelerator_is_waited_for_and_a_cpu_is_not(
    generators: Generators, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    accelerators.synchronise(torch.device("cpu"))
    assert waited == []
    accelerators.synchronise(torch.device("meta"))
    assert waited == [torch.device("meta")]


def test_an_optimizer_keeps_the_kernels_of_its_own_tier() -> None:
    """With `fused=True` from a GPU's tier a CPU's update ended in an error, or the other way."""
    parameter = nn.Parameter(torch.ones(3))
    there = torch.optim.Adam([parameter], lr=0.1, fused=True)
    parameter.grad = torch.ones(3)
    there.step()
    here = torch.optim.Adam([parameter], lr=0.2, foreach=True)
    here.load_state_dict(with_own_kernels(here, there.state_dict()))
    (group,) = here.param_groups
    assert (group["lr"], group["foreach"], group["fused"]) == (0.1, True, None)
    assert torch.equal(here.state[parameter]["exp_avg"], there.state[parameter]["exp_avg"])


def test_groups_that_do_not_fit_are_the_optimizers_own_error() -> None:
    one, other = (nn.Parameter(torch.ones(3)) for _ in range(2))
    here = torch.optim.SGD([{"params": [one]}, {"params": [other]}], lr=0.1)
    state = with_own_kernels(here, torch.optim.SGD([one], lr=0.1).state_dict())
    with pytest.raises(ValueError, match="different number of parameter groups"):
        here.load_state_dict(state)


def test_settings_that_a_hook_changes_do_not_bring_the_other_tiers_kernels() -> None:
    module = nn.Linear(2, 2)
    owner = torch.optim.Adam(module.parameters(), lr=0.1, fused=True)
    worker = torch.optim.Adam(module.parameters(), lr=0.1, fused=False)
    parameters = dict(module.named_parameters())
    settings = TrainedSettings(parameters, [owner])
    before = settings.now()
    assert settings.changed_since(before) is None
    owner.param_groups[0]["lr"] = 0.3
    TrainedSettings(parameters, [worker]).adopt(settings.changed_since(before))
    assert worker.param_groups[0]["lr"] == 0.3
    assert worker.param_groups[0]["fused"] is False


class Lengths:
    """A hook that leaves lengths on the CPU, where packed sequences need them."""

    def transfer_batch_to_device(self, batch: Any, device: torch.device, idx: int) -> Any:
        words, lengths = batch
        return words.to(device), lengths, idx


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


class ModelWithHook(Lengths, Model):
    pass


class DataWithHook(Lengths, LightningDataModule):
    pass


@pytest.mark.parametrize("where", ["module", "datamodule"])
def test_what_arrives_is_placed_by_the_users_hook(where: str) -> None:
    """The hook was called on the data tier alone: on the others lengths went to the accelerator."""
    module = ModelWithHook() if where == "module" else Model()
    datamodule = DataWithHook() if where == "datamodule" else None
    module._trainer = types.SimpleNamespace(datamodule=datamodule)  # type: ignore[assignment]
    batch = torch.ones(3, 2), torch.ones(3)
    assert placed(batch, module) is batch, "on the CPU there is nothing to move"
    module.to("meta")
    words, lengths, loader = placed(batch, module, 2)
    assert (words.device.type, lengths.device.type, loader) == ("meta", "cpu", 2)


def test_without_a_hook_all_that_arrives_moves() -> None:
    module = Model().to("meta")
    assert {x.device.type for x in placed((torch.ones(3), torch.ones(3)), module)} == {"meta"}


def test_placeholders_lie_where_the_batchs_tensors_do() -> None:
    inputs = torch.ones(8, 4)
    chain = trace_layers(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), inputs)
    (leaf,) = filled(chain, [None], 3, [inputs.to("meta")])
    assert (leaf.device.type, tuple(leaf.shape)) == ("meta", (3, 4))


def test_attributes_that_arrive_lie_where_those_they_replace_did() -> None:
    """A table that a module keeps on the CPU on purpose must stay there."""
    module = Model()
    module.table = torch.zeros(2)
    module.kept = [torch.zeros(1)]
    attributes = Attributes()
    attributes.watch({"": module})
    entry = {"path": "", "attribute": None, "deleted": [], "grown": {"kept": (1, [torch.ones(1)])}}
    values = {"table": torch.ones(2), "new": torch.ones(1)}
    attributes.apply([{**entry, "values": values}], torch.device("meta"))
    assert module.table.tolist() == [1, 1]
    assert [x.device.type for x in module.kept] == ["cpu", "cpu"]
    assert module.new.device.type == "meta"


def test_tiers_of_different_precision_are_refused() -> None:
    """Lightning takes bfloat16 for `16-mixed` on a CPU, and scales the loss on a GPU."""
    told = [{"rank": 0, "precision": "bf16-mixed"}, {"rank": 1, "precision": "16-mixed"}]
    with pytest.raises(MisconfigurationException, match=r"'bf16-mixed', 'cloud': '16-mixed'"):
        _agreed(("device", "cloud"), told)
