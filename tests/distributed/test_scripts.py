"""Scripts as users write them, started once: Lightning itself starts the other tiers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.launch import Command, Exit, run_processes

MODEL = """
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(LightningModule):
    def __init__(self, rate: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.net(x), y))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.hparams.rate)


class Data(LightningDataModule):
    def __init__(self, batch_size: int = 16) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
        self.data = TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long())

    def train_dataloader(self):
        return DataLoader(self.data, self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.data, self.batch_size)
"""
BY_NAME = f"""
import sys
import lightning_hiertrain
{MODEL}

if __name__ == "__main__":
    seed_everything(1)
    arguments = {{"devices": 3, "strategy": "hiertrain"}} if sys.argv[1] == "tiers" else {{}}
    trainer = Trainer(
        accelerator="cpu", max_epochs=3, default_root_dir=sys.argv[2],
        enable_progress_bar=False, enable_model_summary=False, logger=False,
        enable_checkpointing=False, **arguments
    )
    model = Model()
    trainer.fit(model, datamodule=Data())
    torch.save(model.state_dict(), f"{{sys.argv[2]}}/{{sys.argv[1]}}-{{trainer.global_rank}}.pt")
    (loss,) = trainer.validate(model, datamodule=Data(), verbose=False)
    print("validated", trainer.global_rank, loss["val_loss"])
"""
BY_CONFIG = f"""
from lightning.pytorch.cli import LightningCLI
{MODEL}

if __name__ == "__main__":
    LightningCLI(Model, Data)
"""
CONFIG = """
seed_everything: 1
trainer:
  accelerator: cpu
  devices: 3
  max_epochs: 3
  enable_progress_bar: false
  default_root_dir: {folder}
  logger:
    class_path: lightning.pytorch.loggers.CSVLogger
    init_args: {{save_dir: {folder}, name: logs}}
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {{dirpath: {folder}/checkpoints, monitor: val_loss, save_last: true}}
  strategy:
    class_path: lightning_hiertrain.HierTrainStrategy
    init_args:
      schedule: {folder}/schedule.json
      timeout_seconds: 60
model:
  rate: 0.2
data:
  batch_size: 16
"""
SCHEDULE = """
{"format": 1, "owner": "edge", "shares": {
  "device": {"num_layers": 1, "num_samples": 6}, "edge": {"num_layers": 3, "num_samples": 5},
  "cloud": {"num_layers": 2, "num_samples": 5}}}
"""


def run(folder: Path, script: str, *arguments: str) -> Exit:
    path = folder / "train.py"
    path.write_text(script)
    argv = [sys.executable, str(path), *arguments]
    (end,) = run_processes([Command(argv=argv, env={"OMP_NUM_THREADS": "1"})], timeout_seconds=180)
    assert end.returncode == 0, end.output[-3000:]
    return end


def close(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first.keys() == second.keys() and all(
        torch.allclose(first[name], second[name], atol=1e-6) for name in first
    )


def test_a_script_that_names_the_strategy_trains_on_three_tiers(tmp_path: Path) -> None:
    output = run(tmp_path, BY_NAME, "tiers", str(tmp_path)).output
    plain = run(tmp_path, BY_NAME, "plain", str(tmp_path)).output
    expected = torch.load(tmp_path / "plain-0.pt")
    for rank in range(3):
        assert close(torch.load(tmp_path / f"tiers-{rank}.pt"), expected), rank
    losses = {
        line.split()[2][:7] for line in f"{output}\n{plain}".splitlines() if "validated" in line
    }
    assert output.count("validated") == 3
    assert len(losses) == 1
    assert "owner" in output, "the chosen schedule was not shown"


@pytest.mark.timeout(500)
def test_a_configuration_file_names_the_strategy(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG.format(folder=tmp_path))
    (tmp_path / "schedule.json").write_text(SCHEDULE)
    config = ("--config", str(tmp_path / "config.yaml"))
    run(tmp_path, BY_CONFIG, "fit", *config)
    checkpoint = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=False)
    assert checkpoint["hyper_parameters"]["rate"] == 0.2
    assert (tmp_path / "logs" / "version_0" / "config.yaml").exists()
    log = (tmp_path / "logs" / "version_0" / "metrics.csv").read_text()
    assert log.count("val_loss") == 1
    assert not (tmp_path / "logs" / "version_1").exists()

    resumed = ("--trainer.max_epochs=5", "--ckpt_path", str(tmp_path / "checkpoints" / "last.ckpt"))
    run(tmp_path, BY_CONFIG, "fit", *config, *resumed)
    plain = ("--trainer.strategy=auto", "--trainer.devices=1", "--trainer.callbacks=[]")
    run(
        tmp_path, BY_CONFIG, "fit", *config, *plain,
        "--trainer.callbacks+=lightning.pytorch.callbacks.ModelCheckpoint",
        f"--trainer.callbacks.dirpath={tmp_path}/plain", "--trainer.callbacks.save_last=true",
    )  # fmt: skip
    expected = torch.load(tmp_path / "plain" / "last.ckpt", weights_only=False)
    assert close(checkpoint["state_dict"], expected["state_dict"])
    longer = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=False)
    assert longer["epoch"] == 4
    assert longer["global_step"] == 20
