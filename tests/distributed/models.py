"""Projects of ordinary Lightning users, with which the strategy is held against plain Lightning."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Trained(LightningModule):
    """What the projects have in common: a choice of optimizer and a plateau schedule."""

    def __init__(self, optimizer: str = "sgd", plateau: bool = False) -> None:
        super().__init__()
        self.optimizer_name = optimizer
        self.plateau = plateau

    def configure_optimizers(self) -> Any:
        if self.optimizer_name == "sgd":
            optimizer: Any = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        else:
            optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        if not self.plateau:
            return optimizer
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"},
        }


class Classifier(Trained):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.log("val_loss", F.cross_entropy(logits, labels))
        self.log("val_acc", (logits.argmax(1) == labels).float().mean())

    test_step = validation_step

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(1)


class ModuleLeNet(Classifier):
    """LeNet-5 of modules."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.model = nn.Sequential(
            nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(400, 120), nn.ReLU(),
            nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)


class FunctionalLeNet(Classifier):
    """LeNet-5 of functional calls in the LightningModule's own forward."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(400, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(images)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = x.view(x.size(0), -1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


class AutoEncoder(Trained):
    """Its target is its input."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.encoder = nn.Sequential(nn.Linear(3072, 64), nn.ReLU(), nn.Linear(64, 16))
        self.decoder = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 3072))

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, _ = batch
        x = x.view(x.size(0), -1)
        return F.mse_loss(self.decoder(self.encoder(x)), x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch))


class Transformer(Trained):
    """A small language model whose output layer is its embedding."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.embedding = nn.Embedding(32, 16)
        self.position = nn.Parameter(torch.randn(12, 16) * 0.1)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.norm = nn.LayerNorm(16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1), device=tokens.device)
        for block in self.blocks:
            x = block(x, src_mask=mask)
        return F.linear(self.norm(x), self.embedding.weight)

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch["tokens"]).flatten(0, 1), batch["next"].flatten())

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        loss = self._loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch))


MODELS = {cls.__name__: cls for cls in (ModuleLeNet, FunctionalLeNet, AutoEncoder, Transformer)}


class Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Sentences in which a token depends on the one before."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        start = torch.randint(32, (count, 1), generator=generator)
        step = torch.randint(1, 4, (count, 1), generator=generator)
        self.sentences = (start + step * torch.arange(13)) % 32

    def __len__(self) -> int:
        return len(self.sentences)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"tokens": self.sentences[index, :-1], "next": self.sentences[index, 1:]}


def loader(model: str, *, count: int, batch_size: int, seed: int, shuffle: bool) -> DataLoader[Any]:
    """Returns a loader of made-up samples that fit a model."""
    if model == "Transformer":
        return DataLoader(Tokens(count, seed), batch_size=batch_size, shuffle=shuffle)
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (count,), generator=generator)
    return DataLoader(TensorDataset(images, labels), batch_size=batch_size, shuffle=shuffle)
