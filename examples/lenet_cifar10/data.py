"""CIFAR-10 as an ordinary LightningDataModule: the embedded subset, or the full set.

The subset is genuine CIFAR-10 (Krizhevsky, "Learning Multiple Layers of Features from Tiny Images",
2009), balanced over the ten classes: 2,400 images for training and 300 for validation from the
training batches, and 500 from the test batch.
"""

from __future__ import annotations

from pathlib import Path

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

SUBSET = Path(__file__).with_name("cifar10_subset.npz")
MEAN = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
STD = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)
NUM_VALIDATION = 5_000
"""Images that are held back from the 50,000 of the full training set."""


class CIFAR10DataModule(L.LightningDataModule):
    """CIFAR-10 for training, validation and test.

    Args:
        root: Folder of the full data set, downloaded there if it is missing; `None` takes the
            embedded subset.
        batch_size: Samples in a mini-batch.
        num_workers: Processes that load data, 0 for none.
    """

    def __init__(
        self, root: str | None = None, batch_size: int = 128, num_workers: int = 0
    ) -> None:
        super().__init__()
        self.root = root
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.splits: dict[str, Images] = {}

    def prepare_data(self) -> None:
        """Downloads the full set if it was asked for."""
        if self.root is not None:
            datasets = _torchvision_datasets()
            for train in (True, False):
                datasets.CIFAR10(self.root, train=train, download=True)

    def setup(self, stage: str) -> None:
        """Loads the images into memory, once."""
        if not self.splits:
            arrays = load_subset() if self.root is None else _load_full(self.root)
            self.splits = {
                name: Images(images, labels, flip=name == "train")
                for name, (images, labels) in arrays.items()
            }

    def train_dataloader(self) -> DataLoader:
        """Returns the training images, shuffled, half of them mirrored."""
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """Returns the validation images."""
        return self._loader("val")

    def test_dataloader(self) -> DataLoader:
        """Returns the test images."""
        return self._loader("test")

    def _loader(self, split: str, *, shuffle: bool = False) -> DataLoader:
        return DataLoader(
            self.splits[split],
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Normalised images `(3, 32, 32)` with their labels.

    Args:
        images: `(num_images, 32, 32, 3)`, uint8.
        labels: `(num_images,)`.
        flip: Whether to mirror images at random.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray, *, flip: bool) -> None:
        self.images = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
        self.labels = torch.from_numpy(labels.astype(np.int64))
        self.flip = flip

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = (self.images[index].float() / 255 - MEAN) / STD
        if self.flip and torch.rand(()) < 0.5:
            image = image.flip(2)
        return image, self.labels[index]


def load_subset(path: Path = SUBSET) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns images `(num_images, 32, 32, 3)` and labels of each embedded split."""
    with np.load(path) as file:
        return {
            split: (decode(file[f"{split}_planes"]), file[f"{split}_labels"])
            for split in ("train", "val", "test")
        }


def encode(images: np.ndarray) -> np.ndarray:
    """Prepares uint8 images for lossless compression: a third smaller than the pixels as they are.

    Pixels resemble their neighbours and colours one another, so differences (modulo 256) are mostly
    small.

    Args:
        images: `(num_images, 32, 32, 3)`, red, green, blue.

    Returns:
        `(num_images, 3, 32, 32)`: green, red - green, blue - green, as differences along both axes.
    """
    red, green, blue = np.moveaxis(images, -1, 0)
    planes = np.stack([green, red - green, blue - green], axis=1)
    for axis in (2, 3):
        planes = np.diff(planes, axis=axis, prepend=np.uint8(0))
    return planes


def decode(planes: np.ndarray) -> np.ndarray:
    """Undoes `encode`."""
    for axis in (2, 3):
        planes = np.cumsum(planes, axis=axis, dtype=np.uint8)
    green, red, blue = np.moveaxis(planes, 1, 0)
    return np.stack([red + green, green, blue + green], axis=-1)


def _load_full(root: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    datasets = _torchvision_datasets()
    train, test = (datasets.CIFAR10(root, train=train) for train in (True, False))
    images, labels = train.data, np.asarray(train.targets)
    return {
        "train": (images[:-NUM_VALIDATION], labels[:-NUM_VALIDATION]),
        "val": (images[-NUM_VALIDATION:], labels[-NUM_VALIDATION:]),
        "test": (test.data, np.asarray(test.targets)),
    }


def _torchvision_datasets():
    try:
        from torchvision import datasets
    except ImportError as error:
        raise ModuleNotFoundError(
            "the full CIFAR-10 set (`root`) is read through torchvision, which cannot be imported "
            f"({error}); run `pip install torchvision`, or leave `root` out to train on the images "
            "that come with the example"
        ) from error
    return datasets
