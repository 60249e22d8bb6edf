"""LeNet-5 and AlexNet as chains of layers, and genuine images for them, alike for every system."""

from __future__ import annotations

import importlib.util
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

MODELS = ("lenet5", "alexnet")
PIXELS = ("uint8", "float32")
BATCH_SIZES = {"lenet5": 128, "alexnet": 32}
IMAGE_SIZES = {"lenet5": 32, "alexnet": 224}
NUM_CLASSES = {"lenet5": 10, "alexnet": 1000}
"""AlexNet keeps the size that ImageNet asks for, though its images here are of ten classes."""
NUM_BATCHES = {"lenet5": 16, "alexnet": 4}
"""Mini-batches that are kept ready and taken in turn, so that loading costs no system anything."""
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
LEARNING_RATE = 0.01
MOMENTUM = 0.9
ENDLESS = 10**9
IMAGES = Path(__file__).parents[2] / "examples" / "lenet_cifar10" / "data.py"

Batch = tuple[Tensor, Tensor]


class Normalise(nn.Module):
    """The first layer of a model whose images arrive as 8-bit pixels."""

    def __init__(self) -> None:
        super().__init__()
        # No buffers: they never change, and DDP would send them with every step.
        self.mean, self.std = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))

    def forward(self, images: Tensor) -> Tensor:
        """Returns floating-point images for `(num_samples, 3, height, width)` of any type."""
        return (images.float() / 255 - self.mean) / self.std


def make_chain(model: str, pixels: str) -> nn.Sequential:
    """Returns a model as one module a layer, with the same weights on every call.

    Args:
        model: One of `MODELS`.
        pixels: How its images arrive, one of `PIXELS`.
    """
    torch.manual_seed(0)
    layers = _lenet5() if model == "lenet5" else _alexnet()
    first = OrderedDict(normalise=Normalise()) if pixels == "uint8" else OrderedDict()
    return nn.Sequential(OrderedDict([*first.items(), *layers.items()]))


def make_batches(model: str, pixels: str, batch_size: int) -> list[Batch]:
    """Returns genuine CIFAR-10 images, enlarged for AlexNet and still of 8 bits, with labels."""
    spec = importlib.util.spec_from_file_location("cifar10_images", IMAGES)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    arrays, labels = module.load_subset()["train"]
    batches = []
    for number in range(NUM_BATCHES[model]):
        first = number * batch_size
        rows = [row % len(labels) for row in range(first, first + batch_size)]
        images = torch.from_numpy(arrays[rows]).permute(0, 3, 1, 2)
        size = (IMAGE_SIZES[model],) * 2
        if images.shape[2:] != size:
            images = F.interpolate(images.float(), size, mode="bilinear", align_corners=False)
            images = images.round().to(torch.uint8)
        images = images.contiguous()
        if pixels == "float32":
            images = Normalise()(images)
        batches.append((images, torch.from_numpy(labels[rows]).long()))
    return batches


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Returns the papers' optimizer, stochastic gradient descent."""
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM)


class Turns(Dataset[Batch]):
    """A few mini-batches, taken in turn without end."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Batch:
        return self.batches[index % len(self.batches)]

    def loader(self) -> DataLoader[Batch]:
        """Returns a dataloader that hands out each mini-batch as it is."""
        return DataLoader(self, batch_size=None, shuffle=False)


def _lenet5() -> OrderedDict[str, nn.Module]:
    return OrderedDict(
        conv1=nn.Conv2d(3, 6, kernel_size=5),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(6, 16, kernel_size=5),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        fc1=nn.Linear(400, 120),
        relu3=nn.ReLU(),
        fc2=nn.Linear(120, 84),
        relu4=nn.ReLU(),
        fc3=nn.Linear(84, NUM_CLASSES["lenet5"]),
    )


def _alexnet() -> OrderedDict[str, nn.Module]:
    from torchvision.models import alexnet

    network = alexnet(weights=None, num_classes=NUM_CLASSES["alexnet"])
    layers = [*network.features, network.avgpool, nn.Flatten(), *network.classifier]
    for layer in layers:
        if isinstance(layer, nn.ReLU):
            layer.inplace = False  # a stage of a pipeline may begin with it
    counts: dict[str, int] = {}
    named = OrderedDict()
    for layer in layers:
        kind = type(layer).__name__.lower()
        counts[kind] = counts.get(kind, 0) + 1
        named[f"{kind}{counts[kind]}"] = layer
    return named
