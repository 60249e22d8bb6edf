"""The table in the docs: how many cut points well-known models have."""

import re
from pathlib import Path

import pytest
import torch

from lightning_hiertrain import trace_layers
from tests.unit.partition.models import Transformer

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
ROW = re.compile(r"^\| (?P<model>[^|]+?) \| (?P<count>\d+) \|", re.MULTILINE)
TABLE = {row["model"]: int(row["count"]) for row in ROW.finditer(PAGE.read_text())}

# Small images: the number of cuts does not depend on their size.
SIZES = {"alexnet": 64, "squeezenet1_1": 64, "swin_t": 28}
ARGUMENTS = {
    "googlenet": {"init_weights": False},
    "googlenet, no auxiliary heads": {"init_weights": False, "aux_logits": False},
    "vit_b_16": {"image_size": 32},
}
NAMES = [name.replace("`", "") for name in TABLE]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def expected(name):
    return next(count for row, count in TABLE.items() if row.replace("`", "") == name)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("GPT")])
def test_the_number_of_cut_points_is_the_documented_one(name):
    models = pytest.importorskip("torchvision.models", reason="torchvision is not installed")
    torch.manual_seed(0)
    build = getattr(models, name.split(",")[0])
    model = build(weights=None, num_classes=10, **ARGUMENTS.get(name, {}))
    size = SIZES.get(name, 32)
    chain = trace_layers(model, torch.randn(2, 3, size, size))
    assert len(chain) == expected(name), [layer.name for layer in chain]
    used = sum(layer.parameter_bytes for layer in chain)
    everything = sum(p.numel() * p.element_size() for p in model.parameters())
    assert used == everything or name == "googlenet"


def test_a_decoder_has_two_cut_points_in_each_block():
    torch.manual_seed(0)
    chain = trace_layers(Transformer(depth=12), torch.randint(0, 11, (2, 6)))
    name = next(name for name in NAMES if name.startswith("GPT"))
    assert len(chain) == expected(name), [layer.name for layer in chain]
    blocks = [layer.name for layer in chain if layer.name.startswith("blocks.")]
    assert len(blocks) == 24
