"""torchvision's AlexNet for 224x224 colour images in an ordinary LightningModule."""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


class AlexNet(L.LightningModule):
    """The network of Krizhevsky (2014), as torchvision has it, with random weights.

    Args:
        num_classes: 1000 for ImageNet, 10 for the embedded images.
        learning_rate: Of Adam.
        dropout: Probability with which the two hidden layers of the classifier lose an input; 0 for
            none.
    """

    def __init__(
        self, num_classes: int = 10, learning_rate: float = 1e-4, dropout: float = 0.5
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = _torchvision_alexnet(num_classes=num_classes, dropout=dropout)

    def forward(self, images: Tensor) -> Tensor:
        """Returns one logit a class for normalised images `(num_samples, 3, 224, 224)`."""
        return self.network(images)

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


def _torchvision_alexnet(**settings: float) -> nn.Module:
    try:
        from torchvision.models import alexnet
    except ImportError as error:
        raise ModuleNotFoundError(
            f"this example trains torchvision's AlexNet, which cannot be imported ({error}); run "
            "`pip install torchvision`, or `pip install -e '.[examples]'` in the root of the "
            "repository"
        ) from error
    return alexnet(weights=None, **settings)
