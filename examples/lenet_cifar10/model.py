"""LeNet-5 for 32x32 colour images, an ordinary LightningModule."""

from __future__ import annotations

from collections import OrderedDict

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


class LeNet5(L.LightningModule):
    """The network of LeCun et al. (1998) with ReLU and max pooling.

    Args:
        learning_rate: Of Adam.
    """

    def __init__(self, learning_rate: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(3, 6, kernel_size=5),  # (num_samples, 6, 28, 28)
                relu1=nn.ReLU(),
                pool1=nn.MaxPool2d(2),  # (num_samples, 6, 14, 14)
                conv2=nn.Conv2d(6, 16, kernel_size=5),  # (num_samples, 16, 10, 10)
                relu2=nn.ReLU(),
                pool2=nn.MaxPool2d(2),  # (num_samples, 16, 5, 5)
                flatten=nn.Flatten(),
                fc1=nn.Linear(400, 120),
                relu3=nn.ReLU(),
                fc2=nn.Linear(120, 84),
                relu4=nn.ReLU(),
                fc3=nn.Linear(84, 10),
            )
        )

    def forward(self, images: Tensor) -> Tensor:
        """Returns one logit a class for normalised images `(num_samples, 3, 32, 32)`."""
        return self.layers(images)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Returns the cross entropy of a mini-batch."""
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Logs `val_loss` and `val_acc`."""
        images, labels = batch
        logits = self(images)
        self.log("val_loss", F.cross_entropy(logits, labels), prog_bar=True)
        self.log("val_acc", _accuracy(logits, labels), prog_bar=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Logs `test_acc`."""
        images, labels = batch
        self.log("test_acc", _accuracy(self(images), labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns Adam over all parameters."""
        return torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)


def _accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.argmax(dim=1) == labels).float().mean()
