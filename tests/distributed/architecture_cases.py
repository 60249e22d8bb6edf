"""Models of many architectures as users train them, so small that a step takes no time.

All are deterministic, so that tiers and one process can be held against each other: dropout passes
everything, batch normalisation uses its running statistics, unless a case asks for live ones. The
widest are narrowed: as many layers and the same calls, but fewer channels.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_hiertrain import HierTrainStrategy, Schedule
from tests.distributed.training import Switch
from tests.unit.partition import models

FULL_WIDTH = "HIERTRAIN_FULL_WIDTH"
"""Set in the environment, nothing is narrowed; it then takes minutes and many GB of memory."""
CLASSES = 4


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model and how it is trained."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    """Makes a mini-batch of so many samples."""
    loss: Callable[[nn.Module, Any], Any]


def torchvision_model(name: str, **arguments: Any) -> nn.Module:
    from torchvision import models as zoo  # when it is needed: it takes seconds, and is an extra

    return getattr(zoo, name)(weights=None, num_classes=CLASSES, **arguments)


def with_narrow_head(name: str) -> nn.Module:
    """Returns a model with 32 in place of 4,096 neurons in its classifier."""
    model = torchvision_model(name)
    linear = [i for i, layer in enumerate(model.classifier) if isinstance(layer, nn.Linear)]
    widths = [model.classifier[linear[0]].in_features, 32, 32, CLASSES]
    for position, index in enumerate(linear):
        model.classifier[index] = nn.Linear(widths[position], widths[position + 1])
    return model


def narrow_vgg() -> nn.Module:
    model = with_narrow_head("vgg11")
    channels = 3
    for index, layer in enumerate(model.features):
        if isinstance(layer, nn.Conv2d):
            narrow = layer.out_channels // 8
            model.features[index] = nn.Conv2d(channels, narrow, 3, padding=1)
            channels = narrow
    model.classifier[0] = nn.Linear(49 * channels, 32)
    return model


def narrow_densenet() -> nn.Module:
    from torchvision.models import DenseNet

    return DenseNet(8, (6, 12, 24, 16), 16, num_classes=CLASSES)


def narrow_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 16, 12, 12, 48, 96, num_classes=CLASSES)


def narrow_swin() -> nn.Module:
    from torchvision.models import SwinTransformer

    return SwinTransformer(
        [4, 4], 12, [2, 2, 6, 2], [3, 3, 6, 6], [7, 7],
        stochastic_depth_prob=0.2, num_classes=CLASSES,
    )  # fmt: skip


class ResidualUNet(nn.Module):
    """Two levels with a skip connection, residual blocks with batch normalisation in each."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.encoder, self.middle, self.decoder = (models.Residual() for _ in range(3))
        self.pool, self.up = nn.MaxPool2d(2), nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.join, self.head = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skipped = self.encoder(self.stem(x))
        deep = self.up(self.middle(self.pool(skipped)))
        return self.head(self.decoder(self.join(torch.cat((skipped, deep), 1))))


def images(size: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    def batch(rows: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(CLASSES, (rows,))
        return torch.randn(rows, 3, size, size) + labels[:, None, None, None], labels

    return batch


def pairs(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(rows, 8), torch.randn(rows, 8), torch.randint(2, (rows,)) * 1.0


def classified(module: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(module(batch[0]), batch[1])


def classified_by_all_heads(module: nn.Module, batch: Any) -> Tensor:
    main, *others = module(batch[0])
    auxiliary = sum(F.cross_entropy(other, batch[1]) for other in others)
    return F.cross_entropy(main, batch[1]) + 0.3 * auxiliary


def apart(module: nn.Module, batch: Any) -> Tensor:
    distances = (module(batch[0]) - module(batch[1])).pow(2).sum(1)
    return F.binary_cross_entropy_with_logits(1 - distances, batch[2])


def restored(module: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(module(batch[0]), batch[0])


def of_images(
    name: str, *, size: int = 32, narrow: Callable[[], nn.Module] | None = None, **arguments: Any
) -> Architecture:
    """A classifier of torchvision's, under its name there."""
    if narrow is None or FULL_WIDTH in os.environ:

        def narrow() -> nn.Module:
            return torchvision_model(name, **arguments)

    return Architecture(build=narrow, batch=images(size), loss=classified)


WELL_KNOWN: dict[str, Architecture] = {
    "alexnet": of_images("alexnet", size=64, narrow=lambda: with_narrow_head("alexnet")),
    "vgg11": of_images("vgg11", narrow=narrow_vgg),
    "squeezenet1_1": of_images("squeezenet1_1", size=64),
    "mobilenet_v3_small": of_images("mobilenet_v3_small"),
    "resnet18": of_images("resnet18"),
    "densenet121": of_images("densenet121", narrow=narrow_densenet),
    "googlenet": Architecture(
        build=lambda: torchvision_model("googlenet", init_weights=False),
        batch=images(32),
        loss=classified_by_all_heads,
    ),
    "googlenet, no auxiliary heads": of_images("googlenet", init_weights=False, aux_logits=False),
    "efficientnet_b0": of_images("efficientnet_b0"),
    "vit_b_16": of_images("vit_b_16", image_size=32, narrow=narrow_vit),
    "swin_t": of_images("swin_t", size=28, narrow=narrow_swin),
    "GPT-style decoder, 12 blocks": Architecture(
        build=lambda: models.Transformer(depth=12), batch=models.tokens, loss=models.next_token
    ),
}
OTHERS: dict[str, Architecture] = {
    "residual U-Net": Architecture(build=ResidualUNet, batch=images(8), loss=restored),
    "LSTM of two layers": Architecture(
        build=lambda: models.Recurrent(num_layers=2),
        batch=models.tokens,
        loss=models.next_token_reshaped,
    ),
    "two inputs, a number and strings": Architecture(
        build=models.Wide, batch=models.wide_batch, loss=models.two_inputs
    ),
    "siamese: one network called twice": Architecture(
        build=lambda: nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 6), nn.Tanh()),
        batch=pairs,
        loss=apart,
    ),
}
ARCHITECTURES = {**WELL_KNOWN, **OTHERS}


class Project(LightningModule):
    def __init__(self, architecture: Architecture, *, live: bool) -> None:
        super().__init__()
        self.model, self.loss = architecture.build(), architecture.loss
        for child in self.model.modules():
            if isinstance(child, nn.modules.batchnorm._BatchNorm) and not live:
                child.eval()
            elif isinstance(child, nn.Dropout):
                child.p = 0.0
            elif type(child).__name__ == "StochasticDepth":
                child.p = 1e-12  # with 0 it would make other calls

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = self.loss(self.model, batch)
        loss = output["loss"] if isinstance(output, dict) else output
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return output

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def train(
    name: str,
    *,
    schedule: dict[str, Any] | None = None,
    then: dict[str, Any] | None = None,
    live: bool = False,
    plain: bool = False,
) -> dict[str, Any]:
    """Trains an architecture for three steps of 6, 6 and 4 samples.

    Args:
        name: Of the architecture.
        schedule: The schedule of the first two steps.
        then: That of the third; announced in the second.
        live: Whether batch normalisation uses the statistics of the batch.
        plain: Whether plain Lightning trains it in this process.
    """
    seed_everything(7, verbose=False)
    architecture = ARCHITECTURES[name]
    module = Project(architecture, live=live)
    strategy: Any = "auto"
    if not plain:
        assert schedule is not None
        given = Schedule.from_dict(schedule)
        strategy = HierTrainStrategy(schedule=given, timeout_seconds=100)
    made = Trainer(
        accelerator="cpu",
        devices=1 if plain else 3,
        strategy=strategy,
        precision="64-true",
        max_epochs=1,
        callbacks=[] if plain or then is None else [Switch({1: Schedule.from_dict(then)})],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    initial = {key: value.clone() for key, value in module.state_dict().items()}
    batches: Any = [architecture.batch(rows) for rows in (6, 6, 4)]
    made.fit(module, DataLoader(batches, batch_size=None))
    layers = None if plain else len(made.strategy.session.chain)  # type: ignore[attr-defined]
    weights = {key: value.clone() for key, value in module.state_dict().items()}
    return {
        "layers": layers,
        "weights": weights,
        "change": max(float((weights[k] - initial[k]).abs().max()) for k in weights),
        "steps": made.global_step,
        "optimizer_states": len(made.optimizers[0].state),
        "gradients": sum(p.grad is not None for p in module.parameters()),
        "metrics": {key: float(value) for key, value in made.callback_metrics.items()},
    }
