"""Models that are divided: the cuts that are found, and every one of them checked by hand."""

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_hiertrain.errors import TraceError
from lightning_hiertrain.partition import trace_layers, trace_step
from tests.unit.partition import models
from tests.unit.partition.division import Steps


@pytest.fixture(autouse=True)
def deterministic():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(7)
    yield
    torch.set_num_threads(threads)


def eval_norms(module):
    for child in module.modules():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            child.eval()
    return module


CASES = {
    "LeNet of modules": (models.module_lenet, models.classify, models.images, 12),
    "functional LeNet": (models.FunctionalLeNet, models.classify, models.images, 12),
    "autoencoder": (models.Autoencoder, models.reconstruct, lambda: models.images(size=8), 6),
    "transformer": (models.Transformer, models.next_token, models.tokens, 9),
    "residual blocks": (
        lambda: eval_norms(models.residual_net()),
        models.classify,
        lambda: models.images(size=8),
        9,
    ),
    "dense blocks": (models.dense_net, models.classify, lambda: models.images(size=8), 7),
    "U-Net": (
        models.UNet,
        lambda m, b: F.mse_loss(m(b[0]), b[0]),
        lambda: models.images(size=8),
        4,
    ),
    "LSTM": (models.Recurrent, models.next_token_reshaped, models.tokens, 3),
    "LSTM, sequence first": (
        lambda: models.Recurrent(batch_first=False, num_layers=2),
        models.next_token_reshaped,
        models.tokens,
        4,
    ),
    "GRU": (lambda: models.Recurrent(nn.GRU), models.next_token_reshaped, models.tokens, 3),
    "attention, sequence first": (
        models.SequenceFirst,
        models.next_token_reshaped,
        models.tokens,
        6,
    ),
    "two inputs": (models.Wide, models.two_inputs, models.wide_batch, 6),
    "auxiliary head": (models.Auxiliary, models.with_auxiliary, models.vectors, 4),
}


@pytest.mark.parametrize("case", CASES)
def test_every_cut_gives_loss_and_gradients_of_the_whole(case):
    build, step, batch, expected = CASES[case]
    steps = Steps(build(), step, batch())
    assert len(steps.chain) == expected, steps.names
    steps.check_every_cut()
    if len(steps.chain) > 2:
        deepest = len(steps.chain)
        steps.check({1: 1, deepest // 2 + 1: 2, deepest: 1}, own=1)
        steps.check({2: 1, deepest: 2}, own=0)


def test_residuals_are_cut_only_where_one_tensor_crosses():
    steps = Steps(eval_norms(models.residual_net()), models.classify, models.images(size=8))
    assert steps.names == ["0", "1", "2.add_", "2.relu", "3.add_", "3.relu", "4", "5", "6"]


def test_any_module_can_be_traced_by_itself():
    chain = trace_layers(models.module_lenet(), torch.zeros(2, 3, 32, 32))
    assert [layer.name for layer in chain] == [str(i) for i in range(12)]
    assert chain[0].output.of(5) == (5, 6, 28, 28)
    assert chain[0].output_bytes_per_sample == 6 * 28 * 28 * 4
    assert chain[0].parameters == ("0.weight", "0.bias")
    assert chain[0].parameter_bytes == (6 * 3 * 25 + 6) * 4
    assert chain.parameters_through(4) == ("0.weight", "0.bias", "3.weight", "3.bias")


def test_a_tied_embedding_belongs_to_the_layer_that_uses_it_first():
    chain = Steps(models.Transformer(), models.next_token, models.tokens()).chain
    holders = [layer.name for layer in chain if "embedding.weight" in layer.parameters]
    assert holders == ["embedding"]
    assert sorted(name for layer in chain for name in layer.parameters) == sorted(
        name for name, _ in models.Transformer().named_parameters()
    )


def test_parts_of_the_batch_go_only_where_they_are_read():
    chain = Steps(models.Wide(), models.two_inputs, models.wide_batch()).chain
    a, b, y, weights, scale = range(5)
    assert chain.leaf_shapes[weights] is chain.leaf_shapes[scale] is None
    assert chain.is_read_before(a, 1)
    assert not chain.is_read_behind(a, 1)
    assert not chain.is_read_before(b, 1)  # cut "left": the other input is read behind it
    assert chain.is_read_behind(b, 1)
    assert not chain.is_read_behind(b, 2)
    assert not chain.is_read_before(y, len(chain))
    assert chain.is_read_behind(y, len(chain))


def test_an_input_that_is_the_target_is_read_on_both_sides():
    chain = Steps(models.Autoencoder(), models.reconstruct, models.images(size=8)).chain
    assert chain.is_read_before(0, 1)
    assert chain.is_read_behind(0, len(chain))


def test_other_lengths_than_the_traced_one_are_divided():
    """Token counts differ from batch to batch; the trace's shape holds for its own batch alone."""

    def step(module, batch):
        x, y = batch
        mask = (y != 0).view(-1)  # raw, with a sample's tokens folded into its rows
        logits = module(x).reshape(-1, 11)
        return (F.cross_entropy(logits, y.reshape(-1), reduction="none") * mask).sum()

    steps = Steps(models.Transformer(), step, models.tokens(length=7))
    for length in (3, 12):
        steps.batch = models.tokens(length=length)
        steps.check_every_cut()


def test_frozen_layers_are_divided():
    module = models.module_lenet()
    for parameter in module[:6].parameters():
        parameter.requires_grad = False
    steps = Steps(module, models.classify, models.images())
    assert len(steps.chain) == 12
    steps.check_every_cut()


def test_a_backbone_without_gradient_is_divided():
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 6))
            self.head = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 4))

        def forward(self, x):
            with torch.no_grad():
                x = self.backbone(x)
            return self.head(x.detach())

    steps = Steps(Frozen(), models.classify, models.vectors())
    assert steps.names[:3] == ["backbone.0", "backbone.1", "backbone.2"]
    steps.check_every_cut()


@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm"])
def test_parametrized_weights_are_divided(norm):
    wrap = getattr(nn.utils.parametrizations, norm)
    module = nn.Sequential(
        wrap(nn.Linear(8, 6)), nn.ReLU(), wrap(nn.Linear(6, 6)), nn.ReLU(), nn.Linear(6, 4)
    )
    before = copy.deepcopy(module.state_dict())
    chain = trace_step(lambda b: models.classify(module, b), module, models.vectors())
    assert len(chain) == 5
    assert [n for n in chain.parameters_through(1) if "weight" in n]
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name  # spectral norm iterates in its buffers
    if norm == "weight_norm":
        Steps(module, models.classify, models.vectors()).check_every_cut()


def test_random_models_are_cut_and_their_chance_is_given_back():
    class StochasticDepth(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.body, self.head = nn.Linear(8, 6), nn.Linear(6, 6), nn.Linear(6, 4)

        def forward(self, x):
            h = self.stem(x)
            keep = torch.empty(x.size(0), 1).bernoulli_(0.8).div_(0.8)
            h = h + keep * self.body(F.dropout(h, 0.3, self.training))
            floor = (0.8 + torch.rand(h.size(0), 1)).floor()
            return self.head(h * floor)

    for module, step, batch, names in (
        (models.VAE(), models.elbo, models.vectors(), ["encoder"]),
        (StochasticDepth(), models.classify, models.vectors(), ["stem", "add", "mul", "head"]),
        (
            nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.5), nn.BatchNorm1d(6), nn.Linear(6, 4)),
            models.classify,
            models.vectors(),
            ["0", "1", "2", "3"],
        ),
        (
            models.Recurrent(num_layers=2, dropout=0.4),
            models.next_token_reshaped,
            models.tokens(),
            ["embedding", "head", "reshape"],
        ),
    ):
        state = torch.get_rng_state()
        chain = trace_step(lambda b, s=step, m=module: s(m, b), module, batch)
        assert torch.equal(torch.get_rng_state(), state)
        found = [layer.name for layer in chain]
        assert set(names) <= set(found), found


class Counting(nn.Module):
    """Writes into a buffer through a view, which no call shows."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))
        self.view = self.seen[:1]

    def forward(self, x):
        self.view.add_(1)
        return x.tanh()


@pytest.mark.parametrize(
    ("layer", "first"),
    [
        (nn.Tanh(), None),
        (nn.BatchNorm1d(6), 2),
        (nn.Sequential(nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2), nn.Flatten()), None),
        (
            nn.Sequential(
                nn.Unflatten(1, (2, 3)),
                nn.InstanceNorm1d(2, track_running_stats=True),
                nn.Flatten(),
            ),
            3,
        ),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), 2),
        (Counting(), 1),
    ],
    ids=["none", "batch", "instance", "tracked instance", "spectral", "view"],
)
def test_layers_that_change_buffers_need_whole_shares(layer, first):
    """In chunks they would change them once for each."""
    module = nn.Sequential(nn.Linear(8, 6), layer, nn.Linear(6, 4))
    chain = trace_step(lambda b: models.classify(module, b), module, models.vectors())
    least = [chain.least_samples(depth) for depth in range(1, len(chain) + 1)]
    assert set(least) == ({1, 2} if isinstance(layer, nn.BatchNorm1d) else {1})
    needing = [depth for depth in range(1, len(chain) + 1) if chain.needs_whole_shares(depth)]
    assert needing == list(range(first or len(chain) + 1, len(chain) + 1))


def test_layers_that_are_made_at_the_first_call_are_traced():
    """Lazy parameters and position tables would otherwise be made in the first recording alone."""

    class Lazy(nn.Module):
        table = None

        def __init__(self):
            super().__init__()
            self.first, self.second = nn.LazyLinear(6), nn.Linear(6, 4)

        def forward(self, x):
            if self.table is None:
                self.table = torch.arange(6).float().mul(0.1).cos()
            return self.second(self.first(x) * self.table)

    module = Lazy()
    chain = trace_step(lambda b: models.classify(module, b), module, models.vectors())
    assert [layer.name for layer in chain] == ["first", "mul", "second"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_segments_are_cut_around(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.head = nn.Linear(8, 6), nn.Linear(6, 4)
            self.body = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))

        def forward(self, x):
            return self.head(checkpoint(self.body, self.stem(x), use_reentrant=reentrant))

    steps = Steps(Checkpointed(), models.classify, models.vectors())
    assert {"stem", "head"} <= set(steps.names)
    assert not {"body.0", "body.1"} & set(steps.names)
    steps.check_every_cut()


def test_a_custom_function_is_cut_around():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.add(torch.mul(x, 1.5), x, alpha=0.5)

        @staticmethod
        def backward(ctx, gradient):
            return 2 * gradient

    class Custom(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 6), nn.Linear(6, 4)

        def forward(self, x):
            return self.second(F.relu(Double.apply(self.first(x))))

    steps = Steps(Custom(), models.classify, models.vectors())
    assert {"first", "relu", "second"} <= set(steps.names)
    steps.check_every_cut()


def test_channels_last_is_divided():
    module = models.module_lenet().to(memory_format=torch.channels_last)

    def step(module, batch):
        x, y = batch
        return F.cross_entropy(module(x.contiguous(memory_format=torch.channels_last)), y)

    steps = Steps(module, step, models.images())
    assert len(steps.chain) >= 12
    steps.check_every_cut()


def test_iterating_over_a_tensor_is_followed():
    class Unpacked(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.qkv, self.head = nn.Linear(8, 6), nn.Linear(6, 18), nn.Linear(6, 4)

        def forward(self, x):
            q, k, v = self.qkv(self.stem(x)).view(-1, 3, 6).transpose(0, 1)
            return self.head(q * k + v)

    steps = Steps(Unpacked(), models.classify, models.vectors())
    assert steps.names == ["stem", "qkv", "view", "transpose", "add", "head"]
    steps.check_every_cut()


def test_work_on_the_batch_ahead_of_the_model_is_divided():
    def step(module, batch):
        x, y = batch
        x.sub_(0.1).div_(0.9)  # in place, on the batch itself
        left, right = x.chunk(2, dim=1)  # raw values that come in a tuple
        x = torch.cat((right, left), 1)
        x[:, 0] = 0.0
        return F.cross_entropy(module(x) + left.sum(1, keepdim=True), y)

    module = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
    steps = Steps(module, step, models.vectors())
    assert steps.names[:3] == ["0", "1", "2"]
    steps.check_every_cut()
    steps.check({1: 2, 2: 1, 3: 1}, own=2)


def test_writing_into_a_tensor_is_divided():
    class Writer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 6), nn.Linear(6, 4)

        def forward(self, x):
            h = self.first(x)
            out = torch.zeros(h.size(0), 6)
            out[:, :3] = h[:, 3:]
            out[:, 3:] = h[:, :3]
            return self.second(out)

    steps = Steps(Writer(), models.classify, models.vectors())
    assert {"first", "second"} <= set(steps.names)
    steps.check_every_cut()


@dataclass
class Sample:
    x: torch.Tensor
    y: torch.Tensor
    note: str = "none"


def test_a_dataclass_with_other_leaves_is_divided():
    x, y = models.vectors()
    module = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
    steps = Steps(module, lambda m, b: F.cross_entropy(m(b.x), b.y), Sample(x, y))
    assert steps.names == ["0", "1", "2"]
    steps.check_every_cut()


def test_tracing_leaves_gradients_buffers_and_batch_as_they_were():
    module = models.residual_net()
    x, y = models.images(size=8)
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    state, rows = copy.deepcopy(module.state_dict()), x.clone()

    def step(batch):
        return F.cross_entropy(module(batch[0].mul_(2.0)), batch[1])

    trace_step(step, module, (x, y))
    assert torch.equal(x, rows)
    for name, value in module.state_dict().items():
        assert torch.equal(value, state[name]), name
    for parameter in module.parameters():
        assert torch.equal(parameter.grad, torch.full_like(parameter, 3.0))


def test_a_batch_that_cannot_be_split_is_refused():
    module = nn.Linear(3, 2)
    with pytest.raises(TraceError, match=r"`dict` cannot be split .*: no tensor .* was found"):
        trace_step(lambda b: module(torch.ones(3)), module, {"text": "abc", "n": torch.tensor(3)})


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 5), nn.Linear(6, 4)
        self.rnn = nn.LSTM(5, 6, batch_first=True)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embedding(x), lengths, batch_first=True, enforce_sorted=False
        )
        h, _ = nn.utils.rnn.pad_packed_sequence(
            self.rnn(packed)[0], batch_first=True, total_length=x.size(1)
        )
        return self.head(h.mean(1))


@pytest.mark.parametrize("lengths", [[7, 5, 3, 2, 1, 1], [2, 7, 1, 5, 5, 3]])
def test_packed_sequences_are_cut_around(lengths):
    """Sorted lengths hid that a permutation of all rows is not one of the first rows."""
    x, y = models.tokens()
    batch = (x, torch.tensor(lengths), y[:, 0] % 4)
    steps = Steps(Packed(), lambda m, b: F.cross_entropy(m(b[0], b[1]), b[2]), batch)
    assert steps.names[0] == "embedding"
    steps.batch = (x, torch.tensor([3, 1, 7, 2, 7, 4]), y[:, 0] % 4)
    steps.check_every_cut()


def test_a_first_state_made_for_the_samples_at_hand_fits():
    """torch compared its size, that of a tier's rows, with the whole mini-batch's."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.GRU(5, 6, 2, batch_first=True), nn.Linear(6, 4)

        def forward(self, x):
            first = torch.zeros(2, x.size(0), 6).to(x.device)
            out, _ = self.rnn(x, first)
            return self.head(out[:, -1, :])

    x, y = torch.randn(6, 7, 5), torch.arange(6) % 4
    steps = Steps(Recurrent(), lambda m, b: F.cross_entropy(m(b[0]), b[1]), (x, y))
    assert len(steps.names) == 2
    steps.check_every_cut()


def test_experts_that_choose_their_samples_are_divided_without_own_rows():
    """The rows of an expert depend on the data, so that there is no placeholder for them."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.gate, self.head = nn.Linear(8, 6), nn.Linear(6, 2), nn.Linear(6, 4)
            self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

        def forward(self, x):
            h = self.stem(x)
            chosen, out = self.gate(h).argmax(1), torch.zeros_like(h)
            for i, expert in enumerate(self.experts):
                out[chosen == i] = expert(h[chosen == i])
            return self.head(out)

    steps = Steps(Experts(), models.classify, models.vectors())
    assert steps.names == ["stem", "head"]
    steps.check_every_cut()
