"""Trains LeNet-5 on CIFAR-10 from the command line, an ordinary LightningCLI script.

`python train.py fit --config config.yaml` trains across three local tiers; every setting of the
file can be overridden, for example `--trainer.max_epochs 3`, `--data.root ~/cifar10` or
`--trainer.strategy auto --trainer.devices 1`.
"""

from data import CIFAR10DataModule
from lightning.pytorch.cli import LightningCLI
from model import LeNet5


def main() -> None:
    """Runs the command line."""
    LightningCLI(
        LeNet5,
        CIFAR10DataModule,
        seed_everything_default=0,
        save_config_kwargs={"overwrite": True},
    )


if __name__ == "__main__":
    main()
