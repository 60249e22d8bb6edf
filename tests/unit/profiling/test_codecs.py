"""What measuring the codecs finds, on a small network whose chain is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_hiertrain.partition import LayerChain, trace_step
from lightning_hiertrain.profiling import codecs
from lightning_hiertrain.profiling.codecs import (
    accuracy_losses,
    codec_profiles,
    crossings,
    sampled_cuts,
    time_codecs,
)

NAMES = ("fp16", "int8", "int8+zstd", "minmax2", "minmax3", "minmax4", "minmax8")


class Project:
    """A network, its chain and its samples."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.1),
            nn.Linear(1176, 40), nn.ReLU(), nn.Linear(40, 10),
        )  # fmt: skip
        self.batch = (torch.randn(16, 3, 32, 32), torch.randint(10, (16,)))
        self.chain: LayerChain = trace_step(
            lambda batch: (self.step(batch),), self.model, self.batch
        )

    def step(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def losses(self, cuts: tuple[int, ...], seconds: float = 5.0) -> dict[str, float]:
        return accuracy_losses(
            self.chain, self.step, self.model, self.batch, cuts, NAMES, seconds=seconds
        )


@pytest.fixture
def project() -> Project:
    return Project()


def test_the_largest_cuts_are_sampled_once_for_each_size(project: Project) -> None:
    sizes = [project.chain[cut - 1].output_bytes_per_sample for cut in sampled_cuts(project.chain)]
    assert sizes == [4 * 6 * 28 * 28, 4 * 1176, 4 * 40, 4 * 10]
    assert project.chain[sampled_cuts(project.chain)[0] - 1].name.startswith("1")


def test_what_crosses_is_the_models_own_and_takes_no_chance(project: Project) -> None:
    state = torch.get_rng_state()
    (relu,) = crossings(project.chain, project.step, project.batch, (2,))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in project.model.parameters())
    expected = project.model[:2](project.batch[0]).detach().requires_grad_()
    torch.testing.assert_close(relu.activations, expected.detach())
    torch.set_rng_state(state)
    F.cross_entropy(project.model[2:](expected), project.batch[1]).backward()
    torch.testing.assert_close(relu.gradients, expected.grad)


def test_times_and_ratios_are_those_of_the_codec(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(10**6))
    monkeypatch.setattr(codecs, "perf_counter", lambda: float(next(clock)))
    crossing = crossings(project.chain, project.step, project.batch, (2,))
    times = time_codecs(crossing, NAMES, seconds=1e-3)
    assert times["fp16"].bytes_ratio == pytest.approx(0.5, rel=0.01)
    assert times["int8"].bytes_ratio == pytest.approx(0.25, rel=0.01)
    assert times["minmax2"].bytes_ratio < times["minmax8"].bytes_ratio < 0.25
    num_bytes = crossing[0].activations.nbytes
    for found in times.values():  # each reading of the clock is a second after the last
        assert found.encode_seconds_per_byte == pytest.approx(1 / num_bytes)
        assert found.decode_seconds_per_byte == pytest.approx(1 / num_bytes)


def test_fewer_bits_lose_more(project: Project) -> None:
    losses = project.losses((2,))
    assert losses["fp16"] < losses["int8"] < losses["minmax2"]
    assert losses["int8"] == losses["int8+zstd"]
    assert losses["fp16"] < 1e-3
    assert losses["minmax2"] > 1e-3
    assert losses["minmax8"] <= losses["minmax4"] <= losses["minmax3"] <= losses["minmax2"]


def test_the_worst_cut_counts_and_time_ends_the_others(project: Project) -> None:
    first = Project().losses((2,))
    both = Project().losses((2, 5))
    assert all(both[name] >= first[name] for name in NAMES)
    assert any(both[name] > first[name] for name in NAMES)
    hasty = project.losses((2, 5), seconds=1e-9)
    assert hasty.keys() == both.keys()


def test_a_loss_that_is_not_finite_counts_as_the_worst(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codecs, "decode", lambda packed: torch.full((16, 6, 28, 28), torch.nan))
    assert set(project.losses((2,)).values()) == {1e3}


def test_what_the_tiers_measured_is_put_together(project: Project) -> None:
    crossing = crossings(project.chain, project.step, project.batch, (2,))
    times = {tier: time_codecs(crossing, NAMES, seconds=1e-3) for tier in ("device", "cloud")}
    losses = dict.fromkeys(NAMES, 0.25)
    profiles = codec_profiles(times, losses, "cloud")
    found = profiles["int8"]
    assert found.bytes_ratio == times["cloud"]["int8"].bytes_ratio
    assert found.encode_seconds_per_byte["device"] == (
        times["device"]["int8"].encode_seconds_per_byte
    )
    assert found.decode_seconds_per_byte.keys() == {"device", "cloud"}
    assert found.accuracy_loss == 0.25
