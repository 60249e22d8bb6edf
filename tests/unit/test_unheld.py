"""Weights without memory: what is freed, what is not, and how it comes back."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from lightning_hiertrain.execution.unheld import Unheld


def bytes_of(parameter):
    return parameter.untyped_storage().nbytes()


def test_a_released_parameter_stays_the_same_object_and_reads_as_no_number():
    module = nn.Linear(64, 64)
    weight, optimizer = module.weight, torch.optim.SGD(module.parameters(), lr=0.1)
    Unheld(module).release(["weight"])
    assert module.weight is weight is optimizer.param_groups[0]["params"][0]
    assert weight.shape == (64, 64)
    assert bytes_of(weight) == weight.element_size()
    assert module(torch.ones(1, 64)).isnan().all()
    assert bytes_of(module.bias) == 64 * 4


def test_memory_comes_back_in_the_layout_that_it_had():
    module = nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last)
    stride, unheld = module.weight.stride(), Unheld(module)
    unheld.release(["weight", "bias"])
    unheld.hold(["weight", "other"])
    with torch.no_grad():
        module.weight.fill_(2)
    assert module.weight.stride() == stride
    assert module.weight.sum() == 2 * module.weight.numel()
    assert module.bias.stride() == (0,)


@pytest.mark.parametrize("how", ["view", "flat"])
def test_memory_that_others_look_into_is_kept(how):
    flat = torch.randn(2, 64)
    module = nn.Module()
    module.weight = nn.Parameter(flat[0] if how == "flat" else torch.randn(64))
    module.looks = module.weight.data[:8]
    before = module.weight.detach().clone()
    Unheld(module).release(["weight"])
    assert torch.equal(module.weight, before)
    assert module.looks.data_ptr() == module.weight.data_ptr()


def test_tied_weights_are_released_and_held_together():
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    module[1].weight = module[0].weight
    unheld = Unheld(module)
    unheld.release(["0.weight"])
    assert module[1].weight.stride() == (0, 0)
    unheld.hold(["0.weight"])
    assert module[1].weight.is_contiguous()


def test_what_was_never_brought_is_said_at_the_end(caplog):
    module, whole = nn.Linear(64, 64), nn.Linear(64, 64)
    unheld = Unheld(module)
    unheld.release(["weight"])
    with caplog.at_level(logging.WARNING):
        unheld.close()
        Unheld(whole).close()
    assert module.weight.is_contiguous()
    assert module.weight.isnan().all()
    (record,) = caplog.records
    assert "no newest weights of 1 parameters (weight, ...)" in record.getMessage()
