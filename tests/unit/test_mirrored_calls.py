"""What one tier tells the others of its steps."""

from types import SimpleNamespace
from typing import Any

from lightning_hiertrain.mirrored_calls import MirroredCalls
from tests.unit.transport.helpers import TIERS, make_topology, started


def test_a_step_of_one_tier_does_not_stop_to_tell_those_that_look_on(tmp_path) -> None:
    with started(tmp_path, make_topology(tmp_path)) as networks:
        device, woken = networks["device"], []
        wake = device._engine.wake
        device._engine.wake = lambda: (woken.append(1), wake())
        mirror: Any = SimpleNamespace(trainer=None)
        calls = MirroredCalls(device, mirror)

        calls.onlookers = frozenset(TIERS[1:])
        for number in range(5):
            calls.tell("x", number)
        assert not woken
        for tier in TIERS[1:]:
            received = [
                networks[tier].receive("device", "x", timeout_seconds=5.0) for _ in range(5)
            ]
            assert received == [0, 1, 2, 3, 4]

        calls.onlookers = frozenset({"cloud"})
        calls.tell("x", 5)
        assert woken
        assert networks["edge"].receive("device", "x", timeout_seconds=5.0) == 5
