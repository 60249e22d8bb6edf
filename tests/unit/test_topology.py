from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings

from lightning_hiertrain.topology import Link, Tier, Topology, split_address
from tests.unit.json_values import ANY_JSON, damaged

KEY = "x" * 40


def example() -> Topology:
    return Topology(
        tiers=(
            Tier(name="device"),
            Tier(name="edge", address="10.0.0.2:7000", public_key=KEY),
            Tier(name="cloud", address="cloud.example:7000"),
        ),
        links=(
            Link(between=("device", "edge")),
            Link(between=("edge", "cloud"), address="[::1]:9"),
        ),
    )


def test_a_topology_survives_the_way_through_a_file(tmp_path: Path) -> None:
    example().to_json(tmp_path / "topology.json")
    assert Topology.from_json(tmp_path / "topology.json") == example()


def test_traffic_without_a_link_of_its_own_is_routed() -> None:
    topology = example()
    assert topology.route("device", "cloud") == ("device", "edge", "cloud")
    assert [link.name for link in topology.routed_links("cloud", "device")] == [
        "edge-cloud",
        "device-edge",
    ]
    assert topology.neighbours("edge") == ("device", "cloud")


def test_a_direct_link_is_the_shortest_route() -> None:
    assert Topology.local(("device", "edge", "cloud")).route("device", "cloud") == (
        "device",
        "cloud",
    )


@pytest.mark.parametrize(
    ("tiers", "links", "message"),
    [
        (("a", "a"), [("a", "a")], "two different tiers"),
        (("a", "a"), [], "tier names must differ"),
        (("a", "b"), [], "no chain of links joins tier 'a' to tier 'b'"),
        (("a", "b"), [("a", "c")], "names the tier 'c'"),
        (("a", "b"), [("b", "a")], "must name the lower tier first"),
        (("a", "b"), [("a", "b"), ("a", "b")], "listed twice"),
        ((), [], "at least one tier"),
    ],
)
def test_an_impossible_topology_is_refused(
    tiers: tuple[str, ...], links: list[tuple[str, str]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Topology(
            tiers=tuple(Tier(name=name) for name in tiers),
            links=tuple(Link(between=between) for between in links),
        )


@pytest.mark.parametrize("name", ["", "a b", "a-b", "a/b", "a=b", "a,b", "\x00"])
def test_a_tier_name_that_cannot_be_written_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="must be a word"):
        Tier(name=name)


def test_a_key_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="has 3 characters, a CURVE key has 40"):
        Tier(name="edge", public_key="abc")


@pytest.mark.parametrize("address", ["host", "host:", ":1", "host:0", "host:65536", "host:x"])
def test_an_address_that_cannot_be_dialled_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="must be 'host:port'"):
        split_address(address)


def test_an_address_is_split() -> None:
    assert split_address("[::1]:80") == ("::1", 80)


@pytest.mark.parametrize("text", ["", "[1]", "{", "\xff", "[" * 100_000])
def test_a_file_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "topology.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match="is not a topology file"):
        Topology.from_json(path)


@settings(max_examples=300, deadline=None)
@given(damaged(example().to_dict()) | ANY_JSON)
def test_any_json_is_a_valid_topology_or_a_value_error(data: object) -> None:
    try:
        topology = Topology.from_dict(data)  # type: ignore[arg-type]
    except ValueError:
        return
    assert Topology.from_dict(json.loads(json.dumps(topology.to_dict()))) == topology
