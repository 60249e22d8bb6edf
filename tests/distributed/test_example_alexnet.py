"""The AlexNet example by its command line: across three tiers and by plain Lightning."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from lightning_hiertrain import Schedule, Share
from tests.distributed.launch import ROOT, Command, run_processes

alexnet = pytest.importorskip("torchvision.models").alexnet

EXAMPLE = ROOT / "examples" / "alexnet_imagenet"
SETTINGS = {
    "trainer.max_epochs": 1,
    "trainer.limit_train_batches": 3,
    "trainer.limit_val_batches": 1,
    "trainer.num_sanity_val_steps": 0,
    "trainer.logger": "false",
    "trainer.enable_progress_bar": "false",
    "trainer.enable_model_summary": "false",
    "data.image_size": 63,
    "data.batch_size": 8,
    "model.dropout": 0,
    "optimizer": "SGD",
    "optimizer.lr": 0.5,
}
"""Small images and few steps; without dropout, and with an optimizer that magnifies no rounding."""


def fit(folder: Path, **settings: object) -> dict[str, torch.Tensor]:
    """Trains by the example's command and returns the weights of the checkpoint it leaves."""
    argv = [sys.executable, str(EXAMPLE / "train.py"), "fit"]
    argv += ["--config", str(EXAMPLE / "config.yaml")]
    for name, value in {**SETTINGS, "trainer.default_root_dir": folder, **settings}.items():
        argv.append(f"--{name}={value}")
    (end,) = run_processes([Command(argv=argv, env={"OMP_NUM_THREADS": "1"})], timeout_seconds=140)
    assert end.returncode == 0, end.output
    (checkpoint,) = folder.rglob("*.ckpt")
    weights: dict[str, torch.Tensor] = torch.load(checkpoint, weights_only=False)["state_dict"]
    return weights


@pytest.mark.timeout(290)
def test_command_line_trains_to_the_weights_of_one_process(tmp_path: Path) -> None:
    """Every tier has samples; one cut lies among the convolutions, one in the classifier."""
    Schedule(
        owner="edge",
        shares={
            "device": Share(num_layers=17, num_samples=3),
            "edge": Share(num_layers=22, num_samples=3),
            "cloud": Share(num_layers=6, num_samples=2),
        },
    ).to_json(tmp_path / "schedule.json")
    across = fit(
        tmp_path / "across",
        **{"trainer.strategy.init_args.schedule": tmp_path / "schedule.json"},
    )
    plain = fit(tmp_path / "plain", **{"trainer.strategy": "auto", "trainer.devices": 1})
    torch.manual_seed(0)
    initial = alexnet(num_classes=10, dropout=0).state_dict()

    assert across.keys() == plain.keys() == {f"network.{name}" for name in initial}
    for name, weights in initial.items():
        one, three = plain[f"network.{name}"], across[f"network.{name}"]
        moved = (one - weights).abs().max()
        assert moved > 1e-4, name
        assert (one - three).abs().max() < 1e-3 * moved, name
