"""Models through which a wrong cut could slip: it would train to something else without a word.

Each test names the value that a share would get wrong, and asserts that no cut is left behind it;
cuts in front of it are checked by hand where the model is deterministic.
"""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_hiertrain.errors import TraceError
from lightning_hiertrain.partition import trace_layers, trace_step
from tests.unit.partition import models
from tests.unit.partition.division import Steps


@pytest.fixture(autouse=True)
def deterministic():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(11)
    random.seed(11)
    yield
    torch.set_num_threads(threads)


class Body(nn.Module):
    """Three layers; `between` runs after the first with `(self, x, h)`."""

    def __init__(self, between=None, ahead=None):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.register_buffer("running", torch.zeros(6))
        self.between, self.ahead = between, ahead

    def forward(self, x):
        if self.ahead is not None:
            x = self.ahead(self, x)
        h = self.first(x)
        if self.between is not None:
            h = self.between(self, x, h)
        return self.third(self.second(h).relu())


def cuts(module, step=models.classify, batch=None):
    """Returns the names of the layers, having checked every cut by hand."""
    steps = Steps(module, step, models.vectors() if batch is None else batch)
    steps.check_every_cut()
    return steps.names


def cuts_of(module, step=models.classify, batch=None):
    """The same without the check, for models with chance or state."""
    batch = models.vectors() if batch is None else batch
    return [layer.name for layer in trace_step(lambda b: step(module, b), module, batch)]


def refused(module, step=models.classify, batch=None, match="no cut point was found"):
    with pytest.raises(TraceError, match=match):
        cuts_of(module, step, batch)


PLAIN = ["first", "second", "relu", "third"]


def test_without_a_trap_every_layer_is_cut():
    assert cuts(Body()) == PLAIN


# Samples that meet.


@pytest.mark.parametrize(
    "mix",
    [
        lambda m, x, h: h - h.mean(0),
        lambda m, x, h: h + 0.1 * h.flip(0),
        lambda m, x, h: h + 0.1 * h[torch.randperm(len(h))],
        lambda m, x, h: h + 0.1 * h[0],
        lambda m, x, h: (h @ h.T).softmax(1) @ h,
        lambda m, x, h: h * (2.0 if h.mean() > 0 else 3.0),
        lambda m, x, h: h * float(h.detach().abs().max()),
        lambda m, x, h: F.batch_norm(h, None, None, training=True),
        lambda m, x, h: h.cumsum(0),
        lambda m, x, h: h * h.size(0),
    ],
    ids=["mean", "flip", "permutation", "first row", "attention over the batch", "branch", "item",
         "batch statistics", "cumulative sum", "number of rows"],
)  # fmt: skip
def test_no_cut_lies_behind_samples_that_meet(mix):
    assert cuts_of(Body(mix)) == ["first"]


@pytest.mark.parametrize("rows", [torch.zeros(4, 8), torch.ones(1, 8), torch.ones(4, 8)])
def test_samples_that_meet_are_noticed_in_examples_that_are_alike(rows):
    assert [layer.name for layer in trace_layers(Body(lambda m, x, h: h - h.mean(0)), rows)] == [
        "first"
    ]


@pytest.mark.parametrize(
    "ahead",
    [
        lambda m, x: (x - x.mean()) / x.std(),
        lambda m, x: x / x.abs().max(),
        lambda m, x: x - x[0],
        lambda m, x: x * float(x.max()),
        lambda m, x: x if (x > 10).any() else x * 2,
    ],
    ids=["standardised", "maximum", "first row", "item", "branch"],
)
def test_values_of_several_samples_ahead_of_the_model_are_refused(ahead):
    refused(Body(ahead=ahead), match="makes a value of several samples of the batch")


def test_a_length_of_the_batch_is_refused_where_all_lengths_are_alike():
    """The example's samples are all of full length: numbers alone would not tell."""

    def step(module, batch):
        x, y, lengths = batch
        x = x[:, : int(lengths.max())]
        return F.cross_entropy(module(x.sum(-1, keepdim=True).expand(-1, 8)), y)

    x, y = models.vectors()
    refused(Body(), step, (x, y, torch.full((6,), 8)), match="`max` .* makes a value of several")


# Captured sizes.


@pytest.mark.parametrize(
    "note",
    [
        lambda x: x.shape[0],
        lambda x: x.size(0),
        lambda x: x.size(dim=0),
        lambda x: x.size()[0],
        lambda x: x.shape[:1][0],
        lambda x: x.numel() // 8,
        lambda x: 2 * x.view(-1, 2, 4).shape[0] // 2,
    ],
)
def test_a_batch_size_noted_early_is_right_where_it_is_used(note):
    """The owner sees its own rows of `x` when it notes the size, and none of the others'."""

    def step(module, batch):
        x, y = batch
        n = note(x)
        h = module.first(x).view(n, 6) + torch.zeros(n, 6) + torch.zeros((n, 1)).expand(n, 6)
        loss = F.cross_entropy(module.third(h), y, reduction="sum") / n
        return loss, n, n * 1.0, torch.tensor([n * 1.0])

    names = cuts(Body(), step)
    assert names[0] == "first"
    assert names[-1] == "third"


def test_a_batch_size_asked_for_at_the_end_is_that_of_the_mini_batch():
    def step(module, batch):
        x, y = batch
        loss = F.cross_entropy(module(x), y)
        return loss, torch.tensor([float(len(x)), x.shape[0], x.size(0), len(y)])

    assert cuts(Body(), step) == PLAIN


def test_a_length_noted_early_drops_the_cuts_before_its_use():
    def step(module, batch):
        x, y = batch
        n = len(x)
        return F.cross_entropy(module(x), y, reduction="sum") / n

    refused(Body(), step)


def test_a_length_noted_early_and_logged_drops_the_cuts():
    """As in `self.log(..., batch_size=n)`: the number weighs the means over an epoch."""

    def step(module, batch):
        x, y = batch
        n = len(x)
        return {"loss": F.cross_entropy(module(x), y), "batch_size": n}

    refused(Body(), step)


def test_the_first_cut_decides_what_the_owner_sees_of_the_batch():
    """With all cuts together the owner saw all rows of `x`, which is read again behind the first;
    with a later cut alone it sees its own, and the size noted of them is wrong."""

    class Injected(Body):
        def forward(self, x):
            self.n = len(x)
            h = self.second(self.first(x).relu() + x[:, :6]).relu()
            return self.third(h)

    def step(module, batch):
        x, y = batch
        return F.cross_entropy(module(x), y, reduction="sum") / module.n

    names = cuts(Injected(), step)
    assert "third" not in names
    assert "second" not in names
    assert names == ["first", "relu"]


# Chance that tiers would draw apart.


def test_mixup_is_refused():
    def step(module, batch):
        x, y = batch
        mix, order = torch.rand(1), torch.randperm(len(x))
        logits = module(mix * x + (1 - mix) * x[order])
        other = F.cross_entropy(logits, y[order])
        return (mix * F.cross_entropy(logits, y) + (1 - mix) * other).sum()

    refused(Body(), step)


@pytest.mark.parametrize("draw", [random.random, lambda: np.random.beta(0.4, 0.4)])
def test_a_number_that_python_draws_is_refused(draw):
    def step(module, batch):
        x, y = batch
        weight = draw()
        return F.cross_entropy(module(x), y) * weight

    refused(Body(), step, match="Python's or NumPy's random numbers are drawn in the step")


def test_cuts_in_front_of_a_number_that_python_draws_stay():
    rare = cuts_of(Body(lambda m, x, h: h * 2 if random.random() < 1e-9 else h * 3))
    assert rare == ["first"]


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.randn(x.shape),
        lambda x: torch.rand(1),
        lambda x: torch.randint(0, 5, (1,)) * 1.0,
        lambda x: torch.distributions.Beta(0.4, 0.4).sample(),
        lambda x: torch.empty(1).uniform_(),
    ],
)
def test_noise_that_is_also_the_target_is_refused(draw):
    def step(module, batch):
        x, y = batch
        noise = draw(x)
        return F.cross_entropy(module(x + noise), y) * noise.mean()

    refused(Body(), step)


def test_noise_drawn_for_each_sample_is_itself_what_crosses():
    def step(module, batch):
        x, _ = batch
        noise = torch.randn_like(x)  # a worker sends it: the owner adds it to the rows it has
        return F.mse_loss(module(x + noise)[:, :1], noise[:, :1])

    assert cuts_of(Body(), step) == ["randn_like"]


def test_a_coin_that_decides_the_path_is_refused():
    refused(Body(ahead=lambda m, x: x.flip(1) if torch.rand(1) < 0.5 else x))
    refused(Body(ahead=lambda m, x: x * (2.0 if torch.rand(()).item() < 0.5 else 3.0)))


def test_noise_that_ends_in_one_layer_is_cut_around():
    noisy = Body(lambda m, x, h: h + 0.1 * torch.randn(h.shape))
    assert cuts_of(noisy) == ["first", "add", "second", "relu", "third"]


# Values that are used where the tracer does not look.


def test_an_inner_value_that_is_logged_carries_to_the_end():
    def step(module, batch):
        x, y = batch
        h = module.first(x)
        loss = F.cross_entropy(module.third(module.second(h).relu()), y)
        return {"loss": loss, "norm": h.norm()}

    assert cuts(Body(), step) == ["first"]


def test_a_sum_of_an_inner_value_that_is_logged_carries_to_the_end():
    def step(module, batch):
        x, y = batch
        h = module.second(module.first(x)).relu()
        size = h.abs().mean()
        return {"loss": F.cross_entropy(module.third(h), y), "size": size}

    assert cuts(Body(), step) == ["first", "second", "relu"]


def test_an_inner_value_kept_as_an_attribute_carries_to_the_end():
    def keep(module, x, h):
        module.hidden = h
        return h * 2

    assert cuts_of(Body(keep)) == ["first"]


def test_inner_values_kept_in_a_list_carry_to_the_end():
    def keep(module, x, h):
        module.kept = [*getattr(module, "kept", [])[-1:], {"h": h.mean()}]
        return h * 2

    assert cuts_of(Body(keep)) == ["first"]


def test_running_statistics_in_a_buffer_carry_to_the_end():
    def update(module, x, h):
        with torch.no_grad():
            module.running.mul_(0.9).add_(0.1 * h.mean(0))
        return h * 2

    assert cuts_of(Body(update)) == ["first"]


def test_a_statistic_read_back_from_a_buffer_carries():
    def update(module, x, h):
        with torch.no_grad():
            module.running.copy_(h.mean(0))
        return h - module.running

    assert cuts_of(Body(update)) == ["first"]


def test_a_hidden_state_kept_for_the_next_step_carries():
    def recur(module, x, h):
        if getattr(module, "state", None) is not None and len(module.state) == len(h):
            h = h + 0.1 * module.state
        module.state = h.detach()
        return h * 2

    refused(Body(recur))


def test_an_item_of_an_inner_value_carries_to_the_end():
    def step(module, batch):
        x, y = batch
        h = module.first(x)
        scale = h.abs().max().item()
        return F.cross_entropy(module.third(module.second(h).relu()), y) * scale

    assert cuts(Body(), step) == ["first"]


def test_numpy_of_an_inner_value_carries_to_the_end():
    def step(module, batch):
        x, y = batch
        h = module.second(module.first(x))
        weights = torch.from_numpy(1 + np.abs(h.detach().numpy()).sum(1))
        logits = module.third(h.relu())
        return (F.cross_entropy(logits, y, reduction="none") * weights).mean()

    assert cuts(Body(), step) == ["first", "second"]


# Views and in-place work.


def test_a_write_through_a_view_is_seen_in_its_base():
    def write(module, x, h):
        kept = h.view(-1)
        h = h * 1.0
        view = h[:, 0]
        view.mul_(2.0)
        return h + 0.1 * kept.view(-1, 6)

    assert cuts(Body(write)) == ["first", "add", "second", "relu", "third"]


def test_an_in_place_call_whose_result_is_not_taken_is_seen():
    def write(module, x, h):
        h = h * 1.0
        h.add_(module.running + 1.0)
        return h

    names = cuts(Body(write))
    assert "add_" not in names
    assert {"first", "second", "third"} <= set(names)


def test_an_alias_changed_in_place_is_seen():
    def write(module, x, h):
        h = h * 1.0
        other = h.view(-1, 6)
        other.add_(1.0)
        return h * other

    names = cuts(Body(write))
    assert names[0] == "first"
    assert "add_" not in names
    assert "view" not in names


def test_an_input_changed_by_a_layer_is_no_longer_the_batch():
    """A parameter is added to the batch in place; the target is read from it at the end."""

    def step(module, batch):
        x, y = batch
        x[:, 0] += module.first.bias[0]
        logits = module(x)
        return F.cross_entropy(logits, y) + 0.1 * (x[:, 0] ** 2).mean()

    refused(Body(), step)


def test_in_place_work_on_a_view_of_the_batch_reaches_the_target():
    def step(module, batch):
        x, y = batch
        x[:, :4].mul_(0.5)
        return F.cross_entropy(module(x), y) + 0.1 * x.sum() * module.third.bias.sum()

    assert cuts(Body(), step) == PLAIN


# Rows in another order.


def test_a_fold_with_the_batch_outside_is_divided():
    class Folded(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.head = nn.Linear(2, 6), nn.Linear(6, 6), nn.Linear(24, 4)

        def forward(self, x):
            n = len(x)
            h = self.second(self.first(x.view(n * 4, 2)).tanh())
            return self.head(h.reshape(-1, 24))

    assert cuts(Folded()) == ["first", "tanh", "second", "reshape", "head"]


def test_a_fold_with_the_batch_inside_is_not_cut():
    class Folded(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Linear(8, 8)
            self.first, self.second, self.head = nn.Linear(2, 6), nn.Linear(6, 6), nn.Linear(24, 4)

        def forward(self, x):
            h = self.stem(x).view(-1, 4, 2).transpose(0, 1).reshape(-1, 2)
            h = self.second(self.first(h).tanh())
            return self.head(h.view(4, -1, 6).transpose(0, 1).reshape(-1, 24))

    names = cuts(Folded())
    assert names[0] == "stem"
    assert not {"first", "tanh", "second"} & set(names)
    assert names[-1] == "head"


def test_complex_numbers_are_not_cut_but_cut_around():
    class Spectral(Body):
        def forward(self, x):
            h = torch.fft.rfft(self.first(x))
            h = torch.fft.irfft(h * (1 + 0.5j), n=6)
            return self.third(self.second(h).relu())

    names = cuts(Spectral())
    assert names == ["first", "fft_irfft", "second", "relu", "third"]


# Several calls of the model.


def test_a_siamese_pair_is_exact_or_refused():
    def step(module, batch):
        a, b, y = batch
        distance = (module(a) - module(b)).pow(2).sum(1)
        return F.binary_cross_entropy_with_logits(1 - distance, y)

    a, _ = models.vectors()
    b, _ = models.vectors()
    steps = Steps(Body(), step, (a, b, torch.arange(6) % 2 * 1.0))
    steps.check_every_cut()
    # The first branch may be cut; from the second on both branches carry samples.
    assert steps.names[:4] == PLAIN


def test_branches_that_interleave_are_refused():
    class Pair(Body):
        def forward(self, a, b):
            h, g = self.first(a), self.first(b)
            h, g = self.second(h), self.second(g)
            return (self.third(h) - self.third(g)).pow(2).sum(1)

    def step(module, batch):
        a, b, y = batch
        return F.binary_cross_entropy_with_logits(1 - module(a, b), y)

    a, _ = models.vectors()
    b, _ = models.vectors()
    assert cuts(Pair(), step, (a, b, torch.arange(6) % 2 * 1.0))[0] == "first"


def test_two_views_in_one_call_are_refused():
    def step(module, batch):
        x, _ = batch
        z = F.normalize(module(torch.cat((x, 0.9 * x))), dim=1)
        similarity = z @ z.T - 10 * torch.eye(len(z))
        n = len(x)
        return F.cross_entropy(similarity, torch.arange(2 * n).roll(n))

    refused(Body(), step)


# Vacuous numbers.


def test_a_branch_that_starts_at_zero_is_still_proven():
    """The mixing branch adds nothing yet; only the gradient of its scale tells."""

    class ReZero(Body):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(()))

        def forward(self, x):
            h = self.first(x)
            h = h + self.scale * self.second(h - h.mean(0)).relu()
            return self.third(h)

    assert cuts_of(ReZero()) == ["first"]


def test_a_softmax_at_the_end_is_still_proven():
    """The plain sum of a softmax is constant: its gradient would prove nothing."""

    class Soft(Body):
        def forward(self, x):
            h = self.first(x)
            h = h + torch.zeros_like(h).copy_(h.detach().mean(0)) * 0.1
            return self.third(h).softmax(1)

    assert [layer.name for layer in trace_layers(Soft(), torch.randn(4, 8))] == ["first"]


def test_stochastic_depth_made_of_uniform_numbers_is_not_blanked():
    """With noise of 0 the branch in which samples meet vanished from the proof."""

    class Drop(Body):
        def forward(self, x):
            h = self.first(x)
            keep = (0.8 + torch.rand(len(h), 1)).floor()
            h = h + keep * (h - h.mean(0))
            return self.third(h)

    assert cuts_of(Drop()) == ["first"]
