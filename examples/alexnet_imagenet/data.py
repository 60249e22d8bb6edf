"""ImageNet as an ordinary LightningDataModule, or a few genuine images that need no download.

The few are the CIFAR-10 subset that comes with the LeNet example, in ten classes, enlarged to
224x224 when they are read.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

SUBSET_MODULE = Path(__file__).parents[1] / "lenet_cifar10" / "data.py"
"""Reads the embedded images."""
MEAN = [0.485, 0.456, 0.406]
STD = [0.229, 0.224, 0.225]
ARCHIVES = ("meta.bin", "ILSVRC2012_devkit_t12.tar.gz")
"""One of these lies in a folder that torchvision's `ImageNet` can read."""


class ImageNetDataModule(L.LightningDataModule):
    """ImageNet, or the embedded images, for training, validation and test.

    Args:
        root: Folder with ImageNet's archives, or with `train` and `val` that hold a folder of
            images for each class; `None` takes the embedded images.
        batch_size: Samples in a mini-batch.
        image_size: Height and width to which images are brought.
        num_workers: Processes that load data, 0 for none.
    """

    def __init__(
        self,
        root: str | None = None,
        batch_size: int = 32,
        image_size: int = 224,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.root = root
        self.batch_size = batch_size
        self.image_size = image_size
        self.num_workers = num_workers
        self.splits: dict[str, Dataset[tuple[Tensor, Any]]] = {}

    def prepare_data(self) -> None:
        """Unpacks ImageNet's archives if that was not done before."""
        if self.root is not None and _has_archives(self.root):
            self._imagenet(self.root)

    def setup(self, stage: str) -> None:
        """Opens the data set, once."""
        if not self.splits:
            self.splits = self._embedded() if self.root is None else self._imagenet(self.root)

    def train_dataloader(self) -> DataLoader:
        """Returns the training images, shuffled and varied at random."""
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """Returns the validation images."""
        return self._loader("val")

    def test_dataloader(self) -> DataLoader:
        """Returns the test images; of ImageNet again those for validation."""
        return self._loader("test")

    def _loader(self, split: str, *, shuffle: bool = False) -> DataLoader:
        return DataLoader(
            self.splits[split],
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )

    def _embedded(self) -> dict[str, Dataset]:
        return {
            name: EnlargedImages(images, labels, size=self.image_size, flip=name == "train")
            for name, (images, labels) in load_subset().items()
        }

    def _imagenet(self, root: str) -> dict[str, Dataset]:
        training, evaluation = _transforms(self.image_size)
        train = _open_split(root, "train", training)
        val = _open_split(root, "val", evaluation)
        return {"train": train, "val": val, "test": val}


class EnlargedImages(Dataset[tuple[Tensor, Tensor]]):
    """Normalised images `(3, size, size)` with their labels.

    Args:
        images: `(num_images, height, width, 3)`, uint8.
        labels: `(num_images,)`.
        size: Height and width of what is returned.
        flip: Whether to mirror images at random.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray, *, size: int, flip: bool) -> None:
        self.images = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
        self.labels = torch.from_numpy(labels.astype(np.int64))
        self.size = size
        self.flip = flip
        self._mean, self._std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = (self.images[index].float() / 255 - self._mean) / self._std
        if self.flip and torch.rand(()) < 0.5:
            image = image.flip(2)
        shape = (self.size, self.size)
        image = F.interpolate(image[None], shape, mode="bilinear", align_corners=False)[0]
        return image, self.labels[index]


def load_subset() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns images `(num_images, 32, 32, 3)` and labels of each embedded split."""
    spec = importlib.util.spec_from_file_location("lenet_cifar10_data", SUBSET_MODULE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.load_subset()


def _open_split(root: str, split: str, transform: Callable[[Any], Tensor]) -> Dataset:
    folder = Path(root).expanduser()
    datasets = _torchvision("datasets")
    if _has_archives(root):
        return datasets.ImageNet(folder, split=split, transform=transform)
    if not (folder / split).is_dir():
        raise FileNotFoundError(
            f"`root={root!r}` holds neither ImageNet's archives ({' or '.join(ARCHIVES)}) nor a "
            f"folder {split!r} with a folder of images for each class; correct `root`, or leave it "
            "out to train on the images that come with the example"
        )
    return datasets.ImageFolder(folder / split, transform=transform)


def _has_archives(root: str) -> bool:
    return any((Path(root).expanduser() / name).exists() for name in ARCHIVES)


def _transforms(size: int) -> tuple[Callable[[Any], Tensor], Callable[[Any], Tensor]]:
    """Returns torchvision's usual preparation for training and for evaluation."""
    t = _torchvision("transforms")
    to_tensor = [t.ToTensor(), t.Normalize(MEAN, STD)]
    training = [t.RandomResizedCrop(size), t.RandomHorizontalFlip(), *to_tensor]
    evaluation = [t.Resize(size * 256 // 224), t.CenterCrop(size), *to_tensor]
    return t.Compose(training), t.Compose(evaluation)


def _torchvision(module: str) -> Any:
    try:
        return importlib.import_module(f"torchvision.{module}")
    except ImportError as error:
        raise ModuleNotFoundError(
            f"ImageNet (`root`) is read through torchvision, which cannot be imported ({error}); "
            "run `pip install torchvision`"
        ) from error
