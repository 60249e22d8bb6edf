"""The description of a testbed and what is made of it, without making anything."""

import tomllib

import pytest

from benchmarks.testbed.config import DEFAULT, LinkConfig, parse_config, read_config
from benchmarks.testbed.network import shaping
from benchmarks.testbed.quota import find_controllers, quota_and_period


def described(**changes):
    return tomllib.loads(DEFAULT.read_text()) | changes


def test_the_default_is_three_tiers_on_two_cores():
    config = read_config()

    assert [(tier.name, tier.cores, tier.threads) for tier in config.tiers] == [
        ("device", 0.1, 1),
        ("edge", 0.4, 1),
        ("cloud", 1.0, 1),
    ]
    assert config.link("device-edge").bandwidth_bytes_per_second == 50e6 / 8
    assert config.link("cloud-edge").bandwidth_bytes_per_second == 10e6 / 8
    assert config.quota_period_seconds == 0.01


def test_every_key_is_read(tmp_path):
    path = tmp_path / "testbed.toml"
    path.write_text(
        """
        quota_period_ms = 5
        [[tiers]]
        name = "low"
        cores = 0.5
        threads = 2
        memory_mib = 512
        [[tiers]]
        name = "high"
        cores = 1
        [[links]]
        between = ["low", "high"]
        bandwidth_mbit = 8
        latency_ms = 20
        queue_ms = 50
        """
    )
    config = read_config(path)
    tier, link = config.tiers[0], config.links[0]

    assert (tier.threads, tier.memory_bytes) == (2, 512 * 2**20)
    assert (link.bandwidth_bytes_per_second, link.latency_seconds) == (1e6, 0.02)
    assert (link.queue_seconds, config.quota_period_seconds) == (0.05, 0.005)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tires": []}, "key 'tires', which means nothing"),
        ({"tiers": {"name": "device"}}, r"headed \[\[tiers\]\]"),
        ({"tiers": [{"name": "device"}]}, "lacks the key 'cores'"),
        ({"tiers": [{"name": "device", "cores": 0}]}, "at least 0.01.*, got 0"),
        ({"tiers": [{"name": "device", "cores": float("nan")}]}, "cores of 'device'.*got nan"),
        ({"tiers": [{"name": "device", "cores": True}]}, "got True"),
        ({"tiers": [{"name": "a b", "cores": 1}]}, "'a b' must be letters and digits"),
        ({"tiers": [{"name": "thirteenlong1", "cores": 1}]}, "13 characters; at most 12"),
        ({"tiers": [{"name": "device", "cores": 1, "threads": 0.5}]}, "whole number"),
        ({"tiers": [{"name": "device", "cores": 1}]}, "two or more tiers"),
        ({"links": [{"between": ["device"], "bandwidth_mbit": 1}]}, "two different tiers"),
        ({"links": [{"between": ["device", "edge"], "bandwidth_mbit": -1}]}, "got -1"),
        ({"links": [{"between": ["device", "moon"], "bandwidth_mbit": 1}]}, "tier 'moon'"),
        ({"links": [{"between": ["edge", "device"], "bandwidth_mbit": 1}]}, "lower tier first"),
        ({"links": [{"between": ["device", "edge"], "bandwidth_mbit": 1}]}, "'device' to 'cloud'"),
        ({"links": 2 * [{"between": ["device", "edge"], "bandwidth_mbit": 1}]}, "twice"),
        ({"quota_period_ms": 0}, "quota_period_ms"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        parse_config(described(**changes))


def test_the_file_is_named_when_it_is_not_toml(tmp_path):
    path = tmp_path / "wrong.toml"
    path.write_text("tiers = [")

    with pytest.raises(ValueError, match=r"wrong\.toml"):
        read_config(path)


def test_tiers_that_are_not_neighbours_are_reached_through_the_ones_between():
    names = ("a", "b", "c", "d")
    config = parse_config(
        {
            "tiers": [{"name": name, "cores": 1} for name in names],
            "links": [
                {"between": list(ends), "bandwidth_mbit": 1}
                for ends in (("a", "b"), ("b", "c"), ("b", "d"))
            ],
        }
    )

    assert config.next_hops("a") == {"b": "b", "c": "b", "d": "b"}
    assert config.next_hops("c") == {"b": "b", "a": "b", "d": "b"}
    assert config.next_hops("b") == {"a": "a", "c": "c", "d": "d"}


def test_a_link_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"no link 'device-cloud'; the links are \['device-edge'"):
        read_config().link("device-cloud")


LINK = LinkConfig(between=("a", "b"), bandwidth_bytes_per_second=1e6 / 8, latency_seconds=0.02)


def test_a_token_bucket_alone_limits_a_link_without_netem():
    (add,) = shaping("to-b", LINK, netem=False)
    remove, again = shaping("to-b", LINK, netem=False, change=True)

    assert " ".join(add) == (
        "qdisc add dev to-b root handle 1: tbf rate 1000000bit burst 16384b latency 100ms"
    )
    # What waits in the queue may be too large for a smaller bucket: a new queue takes its place.
    assert remove == ["qdisc", "delete", "dev", "to-b", "root"]
    assert again == add


def test_netem_holds_packets_back_before_the_bucket():
    delay, bucket = shaping("to-b", LINK, netem=True)
    changes = shaping("to-b", LINK, netem=True, change=True)

    assert " ".join(delay).startswith("qdisc add dev to-b root handle 1: netem delay 20000us")
    assert " ".join(bucket).startswith("qdisc add dev to-b parent 1:1 handle 10: tbf rate")
    assert changes == [["qdisc", "delete", "dev", "to-b", "parent", "1:1"], bucket]


@pytest.mark.parametrize(
    ("cores", "expected"), [(0.1, (1000, 10_000)), (1.0, (10_000, 10_000)), (0.02, (1000, 50_000))]
)
def test_no_quota_is_below_what_the_kernel_takes(cores, expected):
    assert quota_and_period(cores, 0.01) == expected


def test_cgroups_of_version_1_are_found():
    found = find_controllers(
        "cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0\n"
        "cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n"
        "cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n"
    )

    assert found.version == 1
    assert str(found.cpu) == "/sys/fs/cgroup/cpu,cpuacct"
    assert str(found.memory) == "/sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("offered", "expected"), [("cpuset cpu io memory", True), ("cpu", False), ("pids", None)]
)
def test_cgroups_of_version_2_are_found(tmp_path, offered, expected):
    (tmp_path / "cgroup.controllers").write_text(offered + "\n")
    found = find_controllers(f"cgroup2 {tmp_path} cgroup2 rw,nosuid 0 0\n")

    if expected is None:
        assert found is None
    else:
        assert (found.version, found.cpu, found.memory is not None) == (2, tmp_path, expected)
