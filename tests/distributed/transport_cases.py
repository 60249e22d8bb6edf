"""What the tests of the transport run in each tier's process."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
import time
import traceback
from typing import Any

import torch

from lightning_hiertrain.errors import LinkError
from lightning_hiertrain.profiling.links import measure_links
from lightning_hiertrain.topology import Topology
from lightning_hiertrain.transport import Collectives, Network, rendezvous

TIERS = ("device", "edge", "cloud")


def my_tier() -> str:
    return TIERS[int(os.environ["LOCAL_RANK"]) + int(os.environ["NODE_RANK"])]


def local(**options: Any) -> Network:
    """This tier's network among local processes, with all tiers present."""
    run = f"test-{os.environ['MASTER_PORT']}-{os.getppid()}"
    network = Network.local(my_tier(), TIERS, run_id=run, **{"timeout_seconds": 30.0, **options})
    network.start()
    network.wait_for_peers()
    return network


def keyed(folder: str, **options: Any) -> Network:
    """This tier's network among hosts, with all tiers present."""
    tier = my_tier()
    network = Network.from_topology(
        tier,
        Topology.from_json(f"{folder}/topology.json"),
        private_key=f"{folder}/{tier}.key",
        **{"timeout_seconds": 30.0, **options},
    )
    network.start()
    network.wait_for_peers()
    return network


def open_network(folder: str | None, **options: Any) -> Network:
    return local(**options) if folder is None else keyed(folder, **options)


def big(tier: str) -> torch.Tensor:
    """50 MB that only this tier would send."""
    generator = torch.Generator().manual_seed(TIERS.index(tier))
    return torch.randn(12_500_000, generator=generator)


def exchange(folder: str | None = None) -> dict[str, Any]:
    """Everybody sends 50 MB to everybody, while all take part in collectives."""
    with open_network(folder) as network:
        tier = network.tier
        others = [other for other in TIERS if other != tier]
        own = big(tier)
        for other in others:
            network.send(other, "big", {"from": tier, "x": own})
        together = Collectives(network, TIERS)
        together.barrier("begin")
        result = {
            "broadcast": together.broadcast(f"from {tier}", "edge"),
            "gather": together.gather(TIERS.index(tier), "cloud"),
            "all_gather": together.all_gather({"x": torch.tensor(TIERS.index(tier))}),
            "any": [together.any(tier == "edge"), together.any(False)],
            "all": [together.all(tier == "edge"), together.all(True)],
        }
        result["all_gather"] = [int(value["x"]) for value in result["all_gather"]]
        arrived = {other: network.receive(other, "big") for other in others}
        result["intact"] = all(
            value["from"] == other and torch.equal(value["x"], big(other))
            for other, value in arrived.items()
        )
        together.barrier("end")
        result["stats"] = network.stats()
    return result


def overtake(folder: str | None = None) -> dict[str, Any]:
    """The device sends 50 MB of tensors to the cloud and then a small control message."""
    with open_network(folder) as network:
        together = Collectives(network, TIERS)
        result, tensor = {}, big("device")
        together.barrier("begin")
        if network.tier == "device":
            network.send("cloud", "big", tensor)
            network.send("cloud", "small", 1, control=True)
        if network.tier == "cloud":
            network.receive("device", "small")
            result["overtook"] = not network.poll("device", "big")
            result["intact"] = torch.equal(network.receive("device", "big"), tensor)
        together.barrier("end")
    return result


def speed() -> dict[str, float]:
    """Goodput of 4 MB messages and the round trip of 1 KB ones between device and edge."""
    with local() as network:
        together = Collectives(network, TIERS)
        result = {}
        kilobyte, tensor = torch.zeros(256), torch.randn(1_000_000)
        together.barrier("begin")
        if network.tier == "device":
            times = []
            for _ in range(200):
                begun = time.perf_counter()
                network.send("edge", "ping", kilobyte, control=True)
                network.receive("edge", "pong")
                times.append(time.perf_counter() - begun)
            result["round_trip_seconds"] = sorted(times)[100]
            begun = time.perf_counter()
            for _ in range(50):
                network.send("edge", "x", tensor)
            network.flush()
            result["bytes_per_second"] = 50 * 4e6 / (time.perf_counter() - begun)
        elif network.tier == "edge":
            for _ in range(200):
                network.send("device", "pong", network.receive("device", "ping"), control=True)
            for _ in range(50):
                network.receive("device", "x")
        together.barrier("end")
    return result


def lose(
    victim: str,
    how: str,
    folder: str | None = None,
    silence: float = 3.0,
    other_machines: bool = False,
) -> dict[str, Any]:
    """One tier ends while the others wait for it; returns what these were told, and when."""
    if other_machines:  # as if no tier could see another one's process
        rendezvous._machine = lambda: None
    network = open_network(folder, silence_seconds=silence)
    Collectives(network, TIERS).barrier("begin")
    begun = time.monotonic()
    if network.tier == victim:
        threading.Event().wait(0.3)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "stop":
            subprocess.Popen(["sh", "-c", f"sleep 9; kill -KILL {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "exit":
            os._exit(0)
        try:
            raise ValueError("a bad batch")
        except ValueError:
            network.abort(traceback.format_exc())
    told = {}
    for other in (victim, *TIERS):
        if network.tier not in (victim, other):
            try:
                network.receive(other, "never", timeout_seconds=10.0, operation="gradients")
            except LinkError as error:
                told[other] = (type(error).__name__, str(error), time.monotonic() - begun)
            if other == victim:
                break
    network.close()
    return told


def hold_the_gil(seconds: float) -> int:
    """The edge computes in one long call that holds the interpreter's lock."""
    with local(silence_seconds=2.0) as network:
        together = Collectives(network, TIERS)
        together.barrier("begin")
        if network.tier == "edge":
            ctypes.PyDLL(None).usleep(ctypes.c_uint(int(seconds * 1e6)))
        return len(together.all_gather(1))


def stream(folder: str, num_messages: int) -> list[int]:
    """The device sends numbered tensors to the cloud, which returns what it got."""
    with keyed(folder, silence_seconds=15.0) as network:
        together = Collectives(network, TIERS)
        together.barrier("begin")
        numbers = []
        for number in range(num_messages):
            if network.tier == "device":
                network.send("cloud", "x", torch.full((25_000,), number))
                threading.Event().wait(0.02)
            elif network.tier == "cloud":
                numbers.append(int(network.receive("device", "x").unique()))
        together.barrier("end")
    return numbers


def measure(folder: str | None = None, seconds: float = 1.0) -> list[tuple[Any, ...]]:
    with open_network(folder) as network:
        begun = time.monotonic()
        profiles = measure_links(network, seconds_per_link=seconds)
        took = time.monotonic() - begun
    return [
        (link.between, link.bandwidth_bytes_per_second, link.latency_seconds, took)
        for link in profiles
    ]
