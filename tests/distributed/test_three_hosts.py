"""The page for three machines, followed to the letter in three network namespaces."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.launch import ROOT, Command, Exit, run_processes
from tests.distributed.namespaces import TIERS, Namespaces
from tests.distributed.training import train_plainly

PAGE = (ROOT / "docs/three_machines.md").read_text()
EXAMPLE = ROOT / "examples/lenet_cifar10"
ENVIRONMENT = {
    "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
    "OMP_NUM_THREADS": "1",
}
SAVE_WEIGHTS = '\n    import torch\n    torch.save(model.state_dict(), "weights.pt")\n'
GIVEN_SCHEDULE = """
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning_hiertrain import HierTrainStrategy, Schedule, Share
from tests.distributed.models import ModuleLeNet, loader

if __name__ == "__main__":
    schedule = Schedule(owner="cloud", shares={
        "device": Share(num_layers=3, num_samples=5),
        "edge": Share(num_layers=7, num_samples=4),
        "cloud": Share(num_layers=12, num_samples=3),
    })
    options = dict(accelerator="auto", devices=1, num_nodes=3, logger=False,
                   enable_checkpointing=False, enable_progress_bar=False)
    seed_everything(7)
    model = ModuleLeNet()
    data = loader("ModuleLeNet", count=44, batch_size=12, seed=1, shuffle=True)
    strategy = HierTrainStrategy(topology="topology.json", schedule=schedule)
    trainer = Trainer(strategy=strategy, max_steps=10, **options)
    trainer.fit(model, data)
    torch.save(model.state_dict(), "weights.pt")
    again = Trainer(strategy=HierTrainStrategy(topology="topology.json"), **options)
    (metrics,) = again.test(model, data)
    print("RANK", trainer.global_rank, trainer.strategy.tier, float(metrics["val_loss"]))
"""
"""The device and the cloud exchange everything through the edge; then another Trainer tests."""


def blocks(language: str, heading: str) -> list[str]:
    """Returns the code blocks below a heading of the page."""
    section = PAGE.split(f"\n## {heading}")[1].split("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


def in_network(text: str) -> str:
    """Puts the namespaces' addresses in the place of the page's."""
    hosts = Namespaces({})
    addresses = {
        "192.168.1.20": hosts.address("edge", seen_from="device"),
        "203.0.113.7": hosts.address("cloud", seen_from="edge"),
        "198.51.100.4": hosts.address("edge", seen_from="cloud"),
    }
    for there, here in addresses.items():
        text = text.replace(there, here)
    return text


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory, namespaces_reason: str | None) -> Path:
    """A folder in which topology and keys were made as the page says."""
    if namespaces_reason is not None:
        pytest.skip(namespaces_reason)
    folder = tmp_path_factory.mktemp("keys")
    (topology,) = blocks("python", "2")
    (commands,) = blocks("sh", "3")
    (folder / "make_topology.py").write_text(in_network(topology))
    argv = ["sh", "-ec", f"cd {folder}\n{commands}"]
    (end,) = run_processes([Command(argv=argv, env=ENVIRONMENT)], timeout_seconds=90)
    assert end.returncode == 0, end.output
    return folder


@pytest.fixture
def machines(keys: Path, three_hosts: Namespaces, tmp_path: Path) -> Mapping[str, Path]:
    """A folder for each machine, with what the page says must be in it, and no more."""
    folders = {tier: tmp_path / tier for tier in TIERS}
    for tier, folder in folders.items():
        folder.mkdir()
        data = ["cifar10_subset.npz"] if tier == "device" else []
        for name in ("model.py", "data.py", *data):
            shutil.copy(EXAMPLE / name, folder)
        for name in ("topology.json", f"{tier}.key"):
            shutil.copy(keys / name, folder)
    return folders


def run_on_hosts(
    hosts: Namespaces, folders: Mapping[str, Path], commands: Mapping[str, str]
) -> dict[str, Exit]:
    """Runs each tier's shell commands on its host, in its folder."""
    started = [
        Command(
            argv=hosts.command(tier, ["sh", "-c", f"cd {folders[tier]}\n{command}"]),
            env=ENVIRONMENT,
        )
        for tier, command in commands.items()
    ]
    ends = run_processes(started, timeout_seconds=150, grace_seconds=20)
    return dict(zip(commands, ends, strict=True))


def weights(folders: Mapping[str, Path], ends: Mapping[str, Exit]) -> list[dict[str, Any]]:
    """Returns the weights that each tier has saved."""
    for tier, end in ends.items():
        assert end.returncode == 0, f"{tier}:\n{end.output}"
    return [torch.load(folders[tier] / "weights.pt") for tier in TIERS]


def torchrun_commands() -> dict[str, str]:
    commands = [in_network(block) for block in blocks("sh", "5b")]
    return {re.findall(r"HIERTRAIN_TIER=(\w+)", command)[0]: command for command in commands}


def test_started_by_hand_it_measures_plans_and_trains(
    three_hosts: Namespaces, machines: Mapping[str, Path]
) -> None:
    (script,) = blocks("python", "4")
    script = script.replace("max_epochs=3", "max_epochs=1, limit_train_batches=14")
    for folder in machines.values():
        (folder / "train.py").write_text(script + SAVE_WEIGHTS)
    commands = dict(zip(TIERS, blocks("sh", "5a"), strict=True))
    ends = run_on_hosts(three_hosts, machines, commands)
    device, edge, cloud = weights(machines, ends)
    script = re.sub(r"strategy=Hier.*\)", 'strategy="auto"', script)
    script = script.replace("num_nodes=3", "num_nodes=1")
    (machines["device"] / "train_plainly.py").write_text(script + SAVE_WEIGHTS)
    alone = run_on_hosts(three_hosts, machines, {"device": "python train_plainly.py"})["device"]
    assert alone.returncode == 0, alone.output
    assert "HierTrain" not in alone.output
    expected = torch.load(machines["device"] / "weights.pt")
    for name, value in device.items():
        assert torch.equal(value, edge[name])
        assert torch.equal(value, cloud[name])
        torch.testing.assert_close(value, expected[name], atol=1e-4, rtol=0)
    assert "HierTrain: measuring 12 layers" in ends["device"].output
    assert "test_acc" in ends["device"].output
    assert (machines["device"] / "lightning_logs").exists()
    assert not (machines["edge"] / "lightning_logs").exists()


@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_started_by_torchrun_it_ends_as_plain_lightning_does(
    three_hosts: Namespaces, machines: Mapping[str, Path], rendezvous: str
) -> None:
    for folder in machines.values():
        (folder / "train.py").write_text(GIVEN_SCHEDULE)
    commands = torchrun_commands()
    if rendezvous == "c10d":
        options = re.findall(r"`(--rdzv-backend[^`]*)`", PAGE)[0].replace("\n", " ")
        host = re.findall(r"add\s+`(--rdzv-conf[^`]*)`", PAGE)[0]
        for tier, command in commands.items():
            address, port = re.findall(r"--master-addr (\S+) --master-port (\d+)", command)[0]
            asked = re.sub(r"--rdzv-endpoint \S+", f"--rdzv-endpoint {address}:{port}", options)
            asked += f" {host}" if tier == "edge" else ""
            command = re.sub(r"--master-addr \S+ --master-port \d+", asked, command)
            commands[tier] = re.sub(r"--node-rank \d", "", command)
    ends = run_on_hosts(three_hosts, machines, commands)
    expected = train_plainly("ModuleLeNet", max_steps=10)["weights"]
    for found in weights(machines, ends):
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=0)
    told = [re.findall(r"RANK (\d) (\w+) (\S+)", end.output)[0] for end in ends.values()]
    assert {rank for rank, _, _ in told} == {"0", "1", "2"}
    assert [tier for _, tier, _ in told] == list(ends)
    assert len({loss for _, _, loss in told}) == 1
    if rendezvous == "static":
        assert {tier: rank for rank, tier, _ in told} == {"edge": "0", "device": "1", "cloud": "2"}
