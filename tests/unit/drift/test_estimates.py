"""What reports say of tiers and links: drift is seen, noise and outliers are not."""

from __future__ import annotations

import random

import pytest

from lightning_hiertrain.drift.estimates import Drift, Estimates, Expected, Figure
from lightning_hiertrain.drift.reports import Report
from lightning_hiertrain.topology import Link, Tier, Topology
from lightning_hiertrain.transport.goodput import Goodput

TOPOLOGY = Topology(
    tiers=tuple(Tier(name=name) for name in ("device", "edge", "cloud")),
    links=(Link(between=("device", "edge")), Link(between=("edge", "cloud"))),
)
RATES = {"device-edge": 6e6, "edge-cloud": 6e6}
EXPECTED = Expected(seconds={"device": 0.2, "edge": 0.4}, idle_tiers=frozenset({"cloud"}))


def estimates() -> Estimates:
    return Estimates(EXPECTED, TOPOLOGY, RATES)


def busy(*seconds: float) -> Report:
    return Report(schedule=0, busy_seconds=seconds)


def sent(**rates: float) -> Report:
    """A report of a tenth of a second in which links to these tiers were busy."""
    return Report(
        schedule=0,
        goodput={to: Goodput(num_bytes=0.1 * rate, seconds=0.1) for to, rate in rates.items()},
    )


def test_a_tier_that_is_four_times_slower_is_seen_within_five_steps():
    known = estimates()
    known.take("edge", busy(*[0.4] * 20))
    for step in range(1, 6):
        known.take("edge", busy(1.6))
        assert bool(known.drift()) == (step == 5)
    assert known.drift() == Drift(slowness={"edge": pytest.approx(4.0)})


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_no_drift(seed: int):
    chance, known = random.Random(seed), estimates()
    for _ in range(200):
        known.take("edge", busy(0.4 * chance.gauss(1.0, 0.1)))
        known.take("device", sent(edge=6e6 * chance.uniform(0.75, 1.3)))
        assert not known.drift()


def test_outliers_are_no_drift():
    known = estimates()
    for step in range(60):
        known.take("edge", busy(4.0 if step % 3 == 0 else 0.4))
        known.take("device", sent(edge=1e5 if step % 3 == 0 else 6e6))
        assert not known.drift()


def test_values_on_both_sides_of_the_band_are_no_drift():
    figure = Figure(believed=1.0)
    for value in [2.0, 0.5] * 4:
        figure.take(value)
    assert figure.drifted is None


def test_what_is_believed_is_no_drift_any_more_and_a_recovery_is():
    known = estimates()
    known.take("edge", busy(*[1.6] * 5))
    known.tiers.believe(known.drift().slowness)
    known.take("edge", busy(*[1.6] * 8))
    assert not known.drift()

    known.take("edge", busy(*[0.4] * 5))
    assert known.drift().slowness == {"edge": pytest.approx(1.0)}


def test_a_tier_without_samples_that_recovers_is_seen_in_its_training_loop():
    known = estimates()
    known.tiers.believe({"cloud": 4.0})
    known.expect(EXPECTED)
    known.take("cloud", busy(*[0.04] * 8))
    assert not known.drift()
    known.take("cloud", busy(*[0.016] * 5))
    assert known.drift().slowness == {"cloud": pytest.approx(1.6)}


def test_a_tier_without_samples_never_becomes_slower_nor_faster_than_profiled():
    known = estimates()
    known.take("cloud", busy(*[0.01] * 8, *[0.1] * 8, *[0.001] * 8))
    assert not known.drift()


def test_a_link_that_carries_less_is_seen_from_either_end():
    for source, target in (("edge", "cloud"), ("cloud", "edge")):
        known = estimates()
        known.take(source, sent(**{target: 6e6}))
        known.take(source, sent(**{target: 2.5e5}))
        assert not known.drift()
        known.take(source, sent(**{target: 2.4e5}))
        (rate,) = known.drift().bytes_per_second.values()
        assert rate == pytest.approx(2.45e5, rel=0.01)


def test_what_a_link_carries_at_least_tells_of_a_rise_and_never_of_a_fall():
    known = estimates()
    for _ in range(5):
        slow = {"cloud": Goodput(least_bytes_per_second=1e5)}
        known.take("edge", Report(schedule=0, goodput=slow))
    assert not known.drift()
    for _ in range(2):
        fast = {"cloud": Goodput(least_bytes_per_second=2e7)}
        known.take("edge", Report(schedule=0, goodput=fast))
    assert known.drift().bytes_per_second == {"edge-cloud": pytest.approx(2e7)}


def test_what_is_relayed_tells_of_no_link():
    known = estimates()
    for _ in range(10):
        known.take("device", sent(cloud=2e5))
    assert not known.drift()


def test_moments_tell_of_a_link_together():
    known = estimates()
    for moment in range(1, 11):
        report = Report(schedule=0, goodput={"cloud": Goodput(num_bytes=400, seconds=4e-3)})
        known.take("edge", report)
        assert bool(known.drift()) == (moment == 10)
    assert known.drift().bytes_per_second == {"edge-cloud": pytest.approx(1e5)}


def test_a_link_that_shows_half_of_what_it_carries_is_believed_by_what_was_measured():
    links = estimates().links
    for _ in range(3):
        links.take("edge", {"cloud": Goodput(num_bytes=3e5, seconds=0.1)})
    links.believe(links.drifted())
    assert links.unconfirmed == {"edge-cloud"}
    links.confirm({"edge-cloud": 6e6})
    assert not links.unconfirmed
    assert links.bytes_per_second["edge-cloud"] == 6e6

    for _ in range(3):
        links.take("edge", {"cloud": Goodput(num_bytes=3e5, seconds=0.1)})
    assert not links.drifted()
    for _ in range(3):
        links.take("edge", {"cloud": Goodput(num_bytes=3e4, seconds=0.1)})
    assert links.drifted() == {"edge-cloud": pytest.approx(6e5)}
