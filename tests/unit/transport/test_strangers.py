"""Strangers stay outside, each kind is logged once, and what goes on inside is not disturbed."""

from __future__ import annotations

import ast
import logging
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lightning_hiertrain
from tests.unit.transport.helpers import Proxy, make_topology, started
from tests.unit.transport.strangers import (
    NO_KEY,
    NOT_LISTED,
    OTHER_KEY,
    UNENCRYPTED,
    idle_connections,
    knock,
    replay,
    scan,
)

PAIR = (("device", "edge"),)
IDLE = 1000


@pytest.fixture
def usual_limit() -> Iterator[None]:
    """The number of files that a process may have open where nobody has raised it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 3 * IDLE:
        pytest.skip(f"a process may have {hard} files open here, {3 * IDLE} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_strangers_of_every_kind_leave_an_exchange_undisturbed(
    tmp_path: Path, caplog: Any, usual_limit: None
) -> None:
    with Proxy() as proxy:
        topology = make_topology(tmp_path, PAIR, through={PAIR[0]: proxy.port})
        proxy.target = int(str(topology.tier("edge").address).rpartition(":")[2])
        public_key = str(topology.tier("edge").public_key)
        with started(tmp_path, topology) as networks, caplog.at_level(logging.WARNING):
            device, edge = networks["device"], networks["edge"]
            stop, failed = threading.Event(), []

            def exchange() -> None:
                number = 0
                try:
                    while not stop.wait(0.005):
                        number += 1
                        device.send("edge", "up", torch.full((10_000,), number))
                        assert edge.receive("device", "up").unique().tolist() == [number]
                        edge.send("device", "down", number)
                        assert device.receive("edge", "down", timeout_seconds=2.0) == number
                except BaseException as error:
                    failed.append(error)

            thread = threading.Thread(target=exchange)
            thread.start()
            try:
                with idle_connections(proxy.target, IDLE) as standing:
                    for _ in range(2):
                        ends = knock(proxy.target, public_key)
                        scan(proxy.target)
                        replay(proxy.target, [bytes(heard) for heard in proxy.heard.values()])
                    assert standing() == IDLE
            finally:
                stop.set()
                thread.join(10)
            assert not failed
            assert [peer.lost for peer in edge._engine.protocol.peers.values()] == [None]
            stats = edge.stats()["device"]
    assert (stats["chunks_replayed"], stats["chunks_doubled"]) == (0, 0)
    assert ends.pop("a wrong key") == "HANDSHAKE_FAILED_AUTH"
    assert all(end.startswith(("HANDSHAKE_FAILED", "DISCONNECTED")) for end in ends.values())
    for kind in (NOT_LISTED, UNENCRYPTED, OTHER_KEY, NO_KEY):
        assert len([message for message in caplog.messages if kind in message]) == 1, kind
    assert len(caplog.messages) == 4


def test_a_recording_put_into_a_standing_connection_breaks_it_and_no_more(tmp_path: Path) -> None:
    with Proxy() as proxy:
        topology = make_topology(tmp_path, PAIR, through={PAIR[0]: proxy.port})
        proxy.target = int(str(topology.tier("edge").address).rpartition(":")[2])
        with started(tmp_path, topology) as networks:
            device, edge = networks["device"], networks["edge"]
            for number in range(20):
                device.send("edge", "x", number)
            assert [edge.receive("device", "x") for _ in range(20)] == list(range(20))
            proxy.inject()
            for number in range(20, 40):
                device.send("edge", "x", number)
            assert [edge.receive("device", "x") for _ in range(20)] == list(range(20, 40))
            assert not edge.poll("device", "x")
            # The connections that took the bytes are gone, those made in their place stand.
            assert len(proxy.heard) > 2


MODULES = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml", "importlib"}
CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "torch.jit.load", "np.load"}
METHODS = {"recv_pyobj", "recv_serialized", "import_module", "loads", "fromstring"}
HARMLESS = {"json.loads"}


def test_nothing_in_the_package_can_run_what_has_arrived() -> None:
    """Neither unpickled nor evaluated: there is nothing there to do it with."""
    root = Path(lightning_hiertrain.__file__).parent
    sources = sorted(root.rglob("*.py"))
    assert len(sources) > 50
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text())):
            found: set[str] = set()
            if isinstance(node, ast.Import):
                found = {alias.name.partition(".")[0] for alias in node.names} & MODULES
            elif isinstance(node, ast.ImportFrom) and node.module != "importlib.metadata":
                found = {str(node.module).partition(".")[0]} & MODULES
            elif isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                if name in CALLS or name.rpartition(".")[2] in METHODS:
                    found = {name} - HARMLESS
            assert not found, f"{path.relative_to(root)}: {found}"
