"""What is noted while a tier works, and nothing where nobody looks on."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from torch import Tensor, nn

from lightning_hiertrain import TimelineCallback, trace_layers
from lightning_hiertrain.execution.watching import ChainEnd, OwnerWatch
from lightning_hiertrain.timeline.clocks import compare_clocks
from lightning_hiertrain.timeline.recorder import Recorder
from lightning_hiertrain.transport import Network
from lightning_hiertrain.transport.observing import Doing


def test_activities_nest_and_come_back() -> None:
    recorder = Recorder()
    network = SimpleNamespace(observer=recorder)
    with Doing(network, "forward", "chunk 1"), Doing(network, "codec"):
        pass
    with pytest.raises(ValueError, match="user"), Doing(network, "backward"):
        raise ValueError("user")
    words = [what for _, what, _ in recorder.notes()["activities"]]
    assert words == ["other", "forward", "codec", "forward", "other", "backward", "other", "other"]


def test_nothing_is_noted_without_an_observer() -> None:
    network = SimpleNamespace(observer=None)
    with Doing(network, "forward"):
        network.observer = recorder = Recorder()  # looks on from the next activity
    assert len(recorder.notes()["activities"]) == 2


def test_messages_are_noted_with_the_time_of_their_arrival() -> None:
    ours, theirs = (
        Network.local(tier, ("device", "edge"), run_id="timeline-messages")
        for tier in ("device", "edge")
    )
    with ours, theirs:
        ours.wait_for_peers(20)
        theirs.wait_for_peers(20)
        ours.observer, theirs.observer = (recorders := (Recorder(), Recorder()))
        ours.send("edge", "1/batch", torch.zeros(300_000))
        theirs.receive("device", "1/batch", operation="receive samples")
        theirs.observer = None
        theirs.send("device", "unseen", 1)
        sent, received = (recorder.notes() for recorder in recorders)
    (message,), (arrival,), (waited,) = sent["sent"], received["received"], received["waits"]
    assert message["bytes"] == arrival["bytes"] > 1_200_000
    assert message["queued"] <= arrival["began"] <= arrival["arrived"] <= waited["end"]
    assert waited["start"] <= arrival["arrived"]
    assert waited["operation"] == "receive samples"
    assert not received["sent"]


def test_clocks_of_one_machine_agree() -> None:
    networks = [
        Network.local(tier, ("device", "edge"), run_id="timeline-clocks")
        for tier in ("device", "edge")
    ]
    with networks[0], networks[1]:
        for network in networks:
            network.wait_for_peers(20)
        other = threading.Thread(
            target=compare_clocks, args=(networks[0], "edge"), kwargs={"name": "a"}
        )
        other.start()
        clocks = compare_clocks(networks[1], "edge", name="a")
        other.join(20)
    assert clocks["edge"].ahead_seconds == 0
    clock = clocks["device"]
    assert 0 < clock.uncertainty_seconds < 0.5
    assert abs(clock.ahead_seconds) <= clock.uncertainty_seconds + 1e-4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x)))


def test_the_end_of_the_chain_is_noticed_once() -> None:
    net, x = Net(), torch.randn(5, 4)
    chain, reached = trace_layers(net, x), list[Tensor]()
    with ChainEnd(chain, reached.append):
        output = net(x)
        (output * 2).sum()
    assert [tensor is output for tensor in reached] == [True]


def test_a_step_that_goes_another_way_is_left_alone() -> None:
    net, x = Net(), torch.randn(5, 4)
    chain, reached = trace_layers(net, x), list[Tensor]()
    with ChainEnd(chain, reached.append):
        other = net(x.tanh())
    assert torch.equal(other, net(x.tanh()))
    assert not reached


def test_the_owners_parts_are_named_between_cuts() -> None:
    net, x, recorder = Net(), torch.randn(5, 4), Recorder()
    watch = OwnerWatch(recorder, trace_layers(net, x), [1], own_rows=5)
    with watch.mode:
        watch.forward_from(0)
        watch.forward_from(1)
        loss = net(x).sum()
    loss.backward()
    watch.backward_from(1)
    words = [f"{what} {detail}" for _, what, detail in recorder.notes()["activities"]][1:-1]
    assert words == [
        "forward layers 1-1",
        "forward layers 2-3",
        "loss forward",
        "backward layers 3-2",
        "backward layers 1-1",
    ]


def test_impossible_steps_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`steps` must name steps from 0 on, got \[-1, 3\]"):
        TimelineCallback(steps=[3, -1])
    with pytest.raises(ValueError, match=r"got \[\]"):
        TimelineCallback(steps=[])


def test_another_strategy_is_refused() -> None:
    trainer = Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    with pytest.raises(MisconfigurationException, match="SingleDeviceStrategy"):
        TimelineCallback().on_train_start(trainer, Net())
