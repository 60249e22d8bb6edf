"""Training that goes on although a tier dies at a chosen moment.

One process imports everything once and forks the tiers of each scenario. Run as a module with a
file of scenarios; it writes what each tier reported.
"""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_hiertrain import HierTrainStrategy, Profile, Schedule, Share
from lightning_hiertrain.meeting import close_links
from lightning_hiertrain.profiles import AffineTime, LayerProfile, LinkProfile, TierProfile
from lightning_hiertrain.transport import Network
from tests.distributed.launch import free_ports

TIERS = ("device", "edge", "cloud")
BATCH, EPOCHS = 8, 3
SILENCE_SECONDS = 2.0
LIMIT_SECONDS = 60.0


class Counting(LightningModule):
    """Five layers; its step counts itself and keeps a list in front of the first cut."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)
        )
        self.steps_seen = 0
        self.kept: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.steps_seen += 1
        self.kept.append(batch_idx)
        loss = F.mse_loss(self.net(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.mse_loss(self.net(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)]


class Normalised(Counting):
    """With batch statistics and random numbers in front of the cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 8), nn.Linear(8, 2)
        )


MODELS = {cls.__name__: cls for cls in (Counting, Normalised)}


class Death(Callback):
    """Kills or stops this process where it is about to send or receive a certain message.

    Args:
        call: "send", "receive" or "any".
        which: A pattern of the message's tag, after which what was sent before has arrived; or how
            many messages there were before it.
        harm: The signal.
        note: Where to write the time.
    """

    def __init__(self, call: str, which: str | int, harm: str, note: Path) -> None:
        self.calls = ("send", "receive") if call == "any" else (call,)
        self.which, self.harm, self.note = which, harm, note
        self.count = 0

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        network = trainer.strategy.session.network  # type: ignore[attr-defined]
        for call in self.calls:
            setattr(network, call, self._watched(network, getattr(network, call)))

    def _watched(self, network: Network, original: Any) -> Any:
        def call(peer: str, tag: str, *args: Any, **kwargs: Any) -> Any:
            if self._is_it(network, tag):
                self.which = "none after it"
                self.note.write_text(repr(time.monotonic()))
                os.kill(os.getpid(), getattr(signal, self.harm))
            return original(peer, tag, *args, **kwargs)

        return call

    def _is_it(self, network: Network, tag: str) -> bool:
        self.count += 1
        if isinstance(self.which, int):
            return self.count > self.which
        if not re.fullmatch(self.which, tag):
            return False
        network.flush()
        return True


class Times(Callback):
    """Notes when each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.world_sizes: set[int] = set()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.ends.append(time.monotonic())
        self.world_sizes.add(trainer.world_size)


def schedule(owner: str, *, chunks: int = 2) -> Schedule:
    """The owner takes two rows, the prefix workers three each, through one and three layers."""
    depths = iter((1, 3))
    return Schedule(
        owner=owner,
        shares={
            tier: Share(num_layers=5, num_samples=2)
            if tier == owner
            else Share(num_layers=next(depths), num_samples=3)
            for tier in TIERS
        },
        num_chunks=chunks,
    )


def train(
    model: str = "Counting",
    owner: str | None = None,
    *,
    strategy: dict[str, Any] | None = None,
    accumulate: int = 1,
    samples: int = 36,
    checkpoints: str | None = None,
    planned: Literal["schedule", "profile", "measured"] = "schedule",
    callbacks: list[Callback] | None = None,
) -> dict[str, Any]:
    """Trains across the tiers, or by plain Lightning without an owner."""
    seed_everything(5)
    module = MODELS[model]()
    times = Times()
    made: Any = "auto"
    if owner is not None:
        arguments: dict[str, Any] = {"timeout_seconds": 30, "silence_seconds": SILENCE_SECONDS}
        if planned == "schedule":
            arguments["schedule"] = schedule(owner)
        elif planned == "profile":
            arguments["profile"] = profile()
        else:
            arguments |= {"profile_steps": 3, "profile_seconds": 0.3}
        made = HierTrainStrategy(**arguments, **(strategy or {}))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
    data = TensorDataset(x, x[:, :2].sin())
    trainer = Trainer(
        accelerator="cpu",
        devices=1 if owner is None else 3,
        strategy=made,
        precision="64-true",
        max_epochs=EPOCHS,
        accumulate_grad_batches=accumulate,
        callbacks=[
            times,
            *([] if checkpoints is None else [ModelCheckpoint(checkpoints)]),
            *(callbacks or ()),
        ],
        logger=False,
        enable_checkpointing=checkpoints is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        module,
        DataLoader(data, batch_size=BATCH, shuffle=True),
        DataLoader(data, batch_size=BATCH),
    )
    return {
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "metrics": {name: value.clone() for name, value in trainer.callback_metrics.items()},
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "global_step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "steps_seen": module.steps_seen,
        "kept": module.kept,
        "world_sizes": times.world_sizes,
        "ends": times.ends,
        "schedule": None if owner is None else trainer.strategy.schedule.to_dict(),
    }


def profile() -> Profile:
    """A profile of the small model by which computation is dear and the cloud is the fastest."""
    speeds = {"device": 1.0, "edge": 1.5, "cloud": 2.0}
    times = {
        tier: AffineTime(fixed=1e-4, per_sample=1e-2 / speed) for tier, speed in speeds.items()
    }
    sizes = [(64, 320), (64, 0), (64, 576), (64, 0), (16, 144)]
    return Profile(
        model="Counting",
        input_bytes_per_sample=32,
        target_bytes_per_sample=16,
        data_tier="device",
        tiers=dict.fromkeys(TIERS, TierProfile()),
        layers=tuple(
            LayerProfile(
                name=f"layer{index}",
                output_bytes_per_sample=outputs,
                parameter_bytes=parameters,
                forward_seconds=times,
                backward_seconds=times,
            )
            for index, (outputs, parameters) in enumerate(sizes)
        ),
        links=tuple(
            LinkProfile(between=pair, bandwidth_bytes_per_second=1e6, latency_seconds=1e-3)
            for pair in (("device", "edge"), ("edge", "cloud"))
        ),
    )


def random_scenario(chance: random.Random) -> dict[str, Any]:
    """Returns a run in which one or two tiers that can be spared die at a random moment."""
    owner = chance.choice(["device", "edge", "cloud"])
    victims = [tier for tier in ("edge", "cloud") if tier != owner]
    if chance.random() < 0.6:
        victims = [chance.choice(victims)]
    return {
        "owner": owner,
        "deaths": {victim: ("any", chance.randrange(220)) for victim in victims},
        "harm": "SIGSTOP" if chance.random() < 0.1 else "SIGKILL",
        "accumulate": chance.choice([1, 1, 3]),
        "strategy": {"overlap": chance.random() < 0.7},
    }


def run_scenario(folder: str | Path, scenario: dict[str, Any]) -> dict[str, Any]:
    """Trains with one tier that dies.

    Args:
        folder: Where the tiers write.
        scenario: `deaths` (by victim: call and tag), `harm`, and arguments of `train`.

    Returns:
        Each tier's exit code, output and report, and when the victim died.
    """
    folder, (port,) = Path(folder), free_ports(1)
    deaths, harm = scenario.pop("deaths", {}), scenario.pop("harm", "SIGKILL")
    tiers = TIERS if scenario.get("owner") else ("device",)
    note = folder / "died"
    note.unlink(missing_ok=True)
    pids = {}
    for rank, tier in enumerate(tiers):
        death = [Death(*deaths[tier], harm, note)] if tier in deaths else []
        pid = os.fork()
        if pid == 0:
            os.setsid()
            with (folder / f"{tier}.txt").open("wb") as output:
                for descriptor in (1, 2):
                    os.dup2(output.fileno(), descriptor)
            os.environ |= {
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(len(tiers)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            if not scenario.get("owner"):
                os.environ.pop("MASTER_PORT")
            _work(folder / f"{tier}.pt", {**scenario, "callbacks": death})
        pids[tier] = pid
    stopped = {tier: pids[tier] for tier in (deaths if harm == "SIGSTOP" else ())}
    ends = _wait({tier: pid for tier, pid in pids.items() if tier not in stopped})
    for pid in stopped.values():
        os.kill(pid, signal.SIGCONT)
    ends |= _wait(stopped)
    report: dict[str, Any] = {"died": float(note.read_text()) if note.exists() else None}
    for tier in tiers:
        path = folder / f"{tier}.pt"
        report[tier] = {
            "exit": ends[tier],
            "output": (folder / f"{tier}.txt").read_text(errors="replace"),
            "result": torch.load(path, weights_only=False) if path.exists() else None,
        }
        path.unlink(missing_ok=True)
    return report


def _work(path: Path, arguments: dict[str, Any]) -> NoReturn:
    code = 0
    try:
        torch.save(train(**arguments), path)
        close_links()
    except BaseException as error:
        code = int(error.code or 0) if isinstance(error, SystemExit) else 1
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(pids: dict[str, int]) -> dict[str, int | None]:
    """Waits for processes, and kills those that hang."""
    ends: dict[str, int | None] = {}
    deadline = time.monotonic() + LIMIT_SECONDS
    while len(ends) < len(pids):
        for tier, pid in pids.items():
            if tier not in ends:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    ends[tier] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    ends[tier] = None
        time.sleep(0.02)
    return ends
