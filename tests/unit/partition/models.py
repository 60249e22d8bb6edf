"""Small models of many kinds, and steps on them."""

import torch
import torch.nn.functional as F
from torch import nn


def classify(module, batch):
    x, y = batch
    return {"loss": F.cross_entropy(module(x), y)}


def images(rows=6, size=32, channels=3, classes=10):
    return torch.randn(rows, channels, size, size), torch.arange(rows) % classes


def vectors(rows=6, features=8, classes=4):
    return torch.randn(rows, features), torch.arange(rows) % classes


def tokens(rows=6, length=7, vocabulary=11):
    x = torch.randint(0, vocabulary, (rows, length + 1))
    return x[:, :-1].clone(), x[:, 1:].clone()


def module_lenet():
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84),
        nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


class FunctionalLeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = torch.flatten(x, 1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 192))


def reconstruct(module, batch):
    x, _ = batch
    x = x.view(x.size(0), -1)
    return F.mse_loss(module.decoder(module.encoder(x)), x)


class Attention(nn.Module):
    """Self-attention with separate projections, whose key bias has no gradient but rounding."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x, mask=None):
        n, t, c = x.shape
        q, k, v = (
            part(x).view(n, t, self.heads, c // self.heads).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-2, -1) / (c // self.heads) ** 0.5
        if mask is not None:
            scores = scores.masked_fill(mask, float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(n, t, c))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x, mask=None):
        x = x + self.attention(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Tokens in, a causal mask, the embedding tied to the output."""

    def __init__(self, vocabulary=11, width=8, length=16, depth=2):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(length, width))
        self.blocks = nn.ModuleList(Block(width, 2) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        t = x.size(1)
        mask = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        h = self.embedding(x) + self.position[:t]
        for block in self.blocks:
            h = block(h, mask)
        return self.norm(h) @ self.embedding.weight.T


def next_token(module, batch):
    x, y = batch
    logits = module(x)
    return {"loss": F.cross_entropy(logits.view(-1, logits.size(-1)), y.reshape(-1))}


class Residual(nn.Module):
    def __init__(self, inplace=True):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm1, self.norm2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=inplace)

    def forward(self, x):
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        out += x
        return self.relu(out)


def residual_net():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True), Residual(), Residual(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10),
    )  # fmt: skip


class Dense(nn.Module):
    def __init__(self, channels=3, growth=4, layers=3):
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(channels + i * growth, growth, 3, padding=1) for i in range(layers)
        )

    def forward(self, x):
        features = [x]
        for conv in self.convs:
            features.append(F.relu(conv(torch.cat(features, 1))))
        return torch.cat(features, 1)


def dense_net():
    return nn.Sequential(
        nn.Conv2d(3, 3, 1), Dense(), nn.Conv2d(15, 3, 1), Dense(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(15, 10),
    )  # fmt: skip


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.down = nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, x):
        a = F.relu(self.stem(x))
        b = F.relu(self.middle(F.relu(self.down(a))))
        return self.head(torch.cat((a, self.up(b)), 1))


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 6), nn.Linear(3, 8)

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(z), mean, log_variance


def elbo(module, batch):
    x, _ = batch
    y, mean, log_variance = module(x)
    kl = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
    return {"loss": F.mse_loss(y, x) + kl, "kl": kl}


class Recurrent(nn.Module):
    def __init__(self, kind=nn.LSTM, batch_first=True, **kwargs):
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.rnn = kind(5, 6, batch_first=batch_first, **kwargs)
        self.batch_first = batch_first
        self.head = nn.Linear(6, 11)

    def forward(self, x):
        h = self.embedding(x if self.batch_first else x.T)
        h, _ = self.rnn(h)
        h = self.head(h)
        return h if self.batch_first else h.transpose(0, 1)


def next_token_reshaped(module, batch):
    x, y = batch
    return F.cross_entropy(module(x).reshape(-1, 11), y.reshape(-1))


class SequenceFirst(nn.Module):
    """MultiheadAttention with the sequence in the first dimension."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.head = nn.Linear(8, 11)

    def forward(self, x):
        h = self.embedding(x).transpose(0, 1)
        h = h + self.attention(h, h, h)[0]
        return self.head(h).transpose(0, 1)


class Wide(nn.Module):
    """Two inputs and a keyword argument."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(8, 6), nn.Linear(5, 6)
        self.body = nn.Sequential(nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 4))

    def forward(self, a, b, *, scale=1.0):
        return {"logits": self.body(self.left(a) + scale * self.right(b)), "scale": scale}


def two_inputs(module, batch):
    out = module(batch["a"], b=batch["b"], scale=0.5)
    return {"loss": F.cross_entropy(out["logits"], batch["y"])}


def wide_batch(rows=6):
    return {
        "a": torch.randn(rows, 8),
        "b": torch.randn(rows, 5),
        "y": torch.arange(rows) % 4,
        "id": [f"sample {i}" for i in range(rows)],
        "weights": torch.rand(3),
        "scale": torch.tensor(2.0),
    }


class Auxiliary(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.auxiliary, self.head = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x):
        h = F.relu(self.second(F.relu(self.first(x))))
        auxiliary = self.auxiliary(h)
        return self.head(F.relu(self.third(h))), auxiliary


def with_auxiliary(module, batch):
    x, y = batch
    main, auxiliary = module(x)
    return F.cross_entropy(main, y) + 0.3 * F.cross_entropy(auxiliary, y)
