"""Trains torchvision's AlexNet from the command line, an ordinary LightningCLI script.

`python train.py fit --config config.yaml` trains across three local tiers; every setting of the
file can be overridden, for example `--trainer.max_epochs 3`,
`--data.root ~/imagenet --model.num_classes 1000` or
`--trainer.strategy auto --trainer.devices 1`.
"""

from data import ImageNetDataModule
from lightning.pytorch.cli import LightningCLI
from model import AlexNet


def main() -> None:
    """Runs the command line."""
    LightningCLI(
        AlexNet,
        ImageNetDataModule,
        seed_everything_default=0,
        save_config_kwargs={"overwrite": True},
    )


if __name__ == "__main__":
    main()
