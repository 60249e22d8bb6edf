"""Links are measured one after the other, by networks of one process over real sockets."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from lightning_hiertrain.profiles import LinkProfile
from lightning_hiertrain.profiling.links import measure_links
from tests.unit.transport.helpers import TIERS, Proxy, make_topology, started


def measure_all(networks, **options) -> list[tuple[LinkProfile, ...]]:
    with ThreadPoolExecutor(len(networks)) as threads:
        calls = [threads.submit(measure_links, each, **options) for each in networks.values()]
        return [call.result(60.0) for call in calls]


def test_every_link_is_measured_and_all_tiers_know_the_same(tmp_path):
    topology = make_topology(tmp_path)
    with started(tmp_path, topology) as networks:
        results = measure_all(networks, seconds_per_link=0.1)

    assert results[0] == results[1] == results[2]
    assert [link.between for link in results[0]] == [("device", "edge"), ("edge", "cloud")]
    assert all(isinstance(link, LinkProfile) for link in results[0])
    assert all(1e6 < link.bandwidth_bytes_per_second < 1e11 for link in results[0])
    assert all(0 < link.latency_seconds < 0.1 for link in results[0])


def test_the_slow_link_is_told_from_the_fast_one(tmp_path):
    links = (("device", "edge"), ("edge", "cloud"))
    with Proxy(bytes_per_second=2e6) as proxy:
        topology = make_topology(tmp_path, links, through={links[1]: proxy.port})
        proxy.target = int(topology.tier("cloud").address.rpartition(":")[2])
        with started(tmp_path, topology) as networks:
            fast, slow = measure_all(networks, seconds_per_link=3.0)[TIERS.index("device")]

    assert slow.bandwidth_bytes_per_second == pytest.approx(2e6, rel=0.4)
    assert fast.bandwidth_bytes_per_second > 5 * slow.bandwidth_bytes_per_second


def test_measuring_twice_works(tmp_path):
    with started(tmp_path, make_topology(tmp_path, (("device", "edge"),))) as networks:
        results = [measure_all(networks, seconds_per_link=0.05) for _ in range(2)]

    assert [len(links) for result in results for links in result] == [1, 1, 1, 1]


def test_a_budget_of_nothing_is_refused(tmp_path):
    with (
        started(tmp_path, make_topology(tmp_path, (("device", "edge"),))) as networks,
        pytest.raises(ValueError, match="`seconds_per_link` must be above 0, got 0"),
    ):
        measure_links(networks["device"], seconds_per_link=0)
