"""The example's data and model, with plain Lightning."""

import hashlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "lenet_cifar10"
SHA256 = {
    "train": "96c296042bcd08e1e3955b8d1c2e4f6915a1099c3dc38bfc29954bebfa1b94d3",
    "val": "b0971f493afe0f043a8f22f92499ec3a7b90b1eeb3e5b5c66c7fbdb50b584f7f",
    "test": "b130bd64837d7ea45dc3fbd2d32f1f70eda695648ee6ceacee1ee0a41dc4202a",
}


@pytest.fixture
def example(monkeypatch):
    """Imports the example's modules as its scripts do and forgets them afterwards."""
    monkeypatch.syspath_prepend(EXAMPLE)
    import data
    import model

    yield data, model
    for name in ("data", "model"):
        sys.modules.pop(name, None)


def test_embedded_images_are_those_of_cifar10_bit_by_bit(example):
    data, _ = example

    subset = data.load_subset()

    assert {
        split: hashlib.sha256(images.tobytes()).hexdigest() for split, (images, _) in subset.items()
    } == SHA256


def test_embedded_images_are_balanced_over_the_classes(example):
    data, _ = example

    counts = {
        split: np.bincount(labels).tolist() for split, (_, labels) in data.load_subset().items()
    }

    assert counts == {"train": [240] * 10, "val": [30] * 10, "test": [50] * 10}


def test_decode_restores_any_image(example):
    data, _ = example
    images = np.random.default_rng(0).integers(0, 256, size=(3, 32, 32, 3), dtype=np.uint8)

    assert np.array_equal(data.decode(data.encode(images)), images)


def test_full_set_without_torchvision_names_the_remedy(example, monkeypatch, tmp_path):
    data, _ = example
    monkeypatch.setitem(sys.modules, "torchvision", None)

    with pytest.raises(ModuleNotFoundError, match=r"pip install torchvision.*leave `root` out"):
        data.CIFAR10DataModule(root=str(tmp_path)).prepare_data()


def test_full_set_is_split_into_training_validation_and_test(example, monkeypatch, tmp_path):
    data, _ = example
    datasets = pytest.importorskip("torchvision").datasets

    class FakeCIFAR10:
        def __init__(self, root, train, download=False):
            num_images = 5_100 if train else 20
            self.data = np.zeros((num_images, 32, 32, 3), dtype=np.uint8)
            self.targets = [0] * num_images

    monkeypatch.setattr(datasets, "CIFAR10", FakeCIFAR10)
    module = data.CIFAR10DataModule(root=str(tmp_path), batch_size=50)
    module.prepare_data()
    module.setup("fit")

    assert {split: len(images) for split, images in module.splits.items()} == {
        "train": 100,
        "val": 5_000,
        "test": 20,
    }
    assert len(module.train_dataloader()) == 2


def test_a_few_steps_lower_the_loss(example):
    data, model = example
    torch.manual_seed(0)
    module = data.CIFAR10DataModule(batch_size=128)
    module.setup("fit")
    images, labels = next(iter(module.train_dataloader()))
    lenet = model.LeNet5()
    lenet.log = lambda *args, **kwargs: None
    optimizer = lenet.configure_optimizers()

    losses = []
    for step in range(30):
        loss = lenet.training_step((images, labels), step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    assert lenet(images).shape == (128, 10)
    assert losses[-1] < 0.8 * losses[0]
