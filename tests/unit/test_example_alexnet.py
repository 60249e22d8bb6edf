"""The AlexNet example's data and model, with plain Lightning."""

import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[2] / "examples" / "alexnet_imagenet"


@pytest.fixture
def example(monkeypatch):
    """Imports the example's modules as its scripts do and forgets them afterwards."""
    monkeypatch.syspath_prepend(EXAMPLE)
    import data
    import model

    yield data, model
    for name in ("data", "model"):
        sys.modules.pop(name, None)


def write_images(folder, classes, per_class=2):
    from torchvision.utils import save_image

    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for index in range(per_class):
            image = torch.full((3, 40, 50), (number + 1) / 4)
            save_image(image, folder / name / f"{index}.png")


def test_embedded_images_are_those_of_the_lenet_example_enlarged(example):
    data, _ = example
    module = data.ImageNetDataModule()
    module.setup("fit")
    split = module.splits["val"]

    image, label = split[7]
    pixels, labels = data.load_subset()["val"]
    restored = image * torch.tensor(data.STD).view(3, 1, 1) + torch.tensor(data.MEAN).view(3, 1, 1)
    small = torch.nn.functional.avg_pool2d(restored, 7).permute(1, 2, 0)

    assert {name: len(split) for name, split in module.splits.items()} == {
        "train": 2_400,
        "val": 300,
        "test": 500,
    }
    assert image.shape == (3, 224, 224)
    assert label == labels[7]
    # Interpolation blurs a little; another picture is far away.
    assert (small - torch.from_numpy(pixels[7]) / 255).abs().mean() < 0.02
    assert (small - torch.from_numpy(pixels[8]) / 255).abs().mean() > 0.1


def test_training_images_are_mirrored_at_random_and_the_others_never(example):
    data, _ = example
    module = data.ImageNetDataModule(image_size=32)
    module.setup("fit")
    torch.manual_seed(0)
    first = module.splits["train"][0][0]
    seen = [module.splits["train"][0][0] for _ in range(20)]

    assert all(torch.equal(x, first) or torch.equal(x, first.flip(2)) for x in seen)
    assert any(not torch.equal(x, first) for x in seen)
    assert torch.equal(module.splits["val"][0][0], module.splits["val"][0][0])


def test_folders_of_images_are_read_through_torchvision(example, tmp_path):
    pytest.importorskip("torchvision")
    data, _ = example
    for split in ("train", "val"):
        write_images(tmp_path / split, ["cat", "dog", "owl"])
    module = data.ImageNetDataModule(root=str(tmp_path), batch_size=6)
    module.prepare_data()
    module.setup("fit")

    images, labels = next(iter(module.train_dataloader()))
    evaluated, _ = next(iter(module.val_dataloader()))

    assert images.shape == evaluated.shape == (6, 3, 224, 224)
    assert sorted(labels.tolist()) == [0, 0, 1, 1, 2, 2]
    grey = (torch.tensor(0.25) - data.MEAN[0]) / data.STD[0]
    assert evaluated[0, 0].mean() == pytest.approx(grey.item(), abs=0.02)


def test_archives_are_read_through_torchvisions_imagenet(example, monkeypatch, tmp_path):
    data, _ = example
    datasets = pytest.importorskip("torchvision").datasets
    opened = []

    class FakeImageNet(torch.utils.data.Dataset):
        def __init__(self, root, split, transform):
            opened.append((root, split))

        def __len__(self):
            return 3

    monkeypatch.setattr(datasets, "ImageNet", FakeImageNet)
    (tmp_path / "meta.bin").touch()
    module = data.ImageNetDataModule(root=str(tmp_path))
    module.setup("fit")

    assert sorted(opened) == [(tmp_path, "train"), (tmp_path, "val")]
    assert {name: len(split) for name, split in module.splits.items()} == {
        "train": 3,
        "val": 3,
        "test": 3,
    }


def test_folder_without_images_names_what_is_missing(example, tmp_path):
    data, _ = example

    with pytest.raises(FileNotFoundError, match=r"neither ImageNet's archives.*'train'.*correct"):
        data.ImageNetDataModule(root=str(tmp_path)).setup("fit")


def test_without_torchvision_the_remedy_is_named(example, monkeypatch, tmp_path):
    data, model = example
    for name in ("torchvision", "torchvision.datasets", "torchvision.models"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "torchvision.transforms", None)
    (tmp_path / "train").mkdir()

    with pytest.raises(ModuleNotFoundError, match=r"torchvision's AlexNet.*pip install torchvis"):
        model.AlexNet()
    with pytest.raises(ModuleNotFoundError, match=r"ImageNet.*pip install torchvision"):
        data.ImageNetDataModule(root=str(tmp_path)).setup("fit")


def test_network_gives_one_logit_a_class_and_has_no_dropout_where_it_is_off(example):
    pytest.importorskip("torchvision")
    _, model = example
    network = model.AlexNet(num_classes=3, dropout=0)
    images = torch.randn(2, 3, 64, 64)

    assert network.training
    assert network(images).shape == (2, 3)
    assert torch.equal(network(images), network(images))
