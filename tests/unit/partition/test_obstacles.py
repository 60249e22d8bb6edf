"""A step that cannot be divided is refused with the line that stands in the way."""

import inspect
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_hiertrain.errors import TraceError
from lightning_hiertrain.partition import trace_step
from tests.unit.partition import models


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x):
        return self.third(self.second(self.first(x)).relu())


def takes_length(module, batch):
    x, y = batch
    n = len(x)  # here
    return F.cross_entropy(module(x), y, reduction="sum") / n


def standardises(module, batch):
    x, y = batch
    mean = x.mean()  # here
    return F.cross_entropy(module(x - mean), y)


def keeps_noise(module, batch):
    x, y = batch
    noise = torch.rand(1)  # here
    logits = module(x * noise)
    return F.cross_entropy(logits, y) * noise.sum()


def turns_samples(module, batch):
    x, y = batch
    return F.cross_entropy(module.third(x.T @ x @ module.first.weight.T), y[:1].expand(8))  # here


def has_no_parameters(module, batch):
    return batch[0].square().sum()


def message_of(step):
    module = Body()
    with pytest.raises(TraceError, match="no cut point was found in `Body`") as caught:
        trace_step(lambda batch: step(module, batch), module, models.vectors())
    return str(caught.value)


def marked_line(step):
    lines, start = inspect.getsourcelines(step)
    (offset,) = (i for i, line in enumerate(lines) if line.rstrip().endswith("# here"))
    return f"{Path(__file__).name}:{start + offset}"


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (takes_length, r"counts samples too early.*look at `len` \({line}\)"),
        (standardises, r"`mean` \({line}\) makes a value of several samples"),
        (keeps_noise, r"the result of `rand` \({line}\) waits to be used by `sum` \("),
        (turns_samples, r"`matmul` \({line}\) makes a value of several samples"),
    ],
)
def test_the_line_in_the_way_is_named(step, reason):
    line = rf"\S*{re.escape(marked_line(step))}"
    assert re.search(reason.replace("{line}", line), message_of(step)), message_of(step)


def test_a_step_without_parameters_is_told_so():
    assert "passes the batch through no parameter" in message_of(has_no_parameters)
