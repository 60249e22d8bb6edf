from __future__ import annotations

import pytest

from lightning_hiertrain.units import (
    format_bandwidth,
    format_bytes,
    format_seconds,
    parse_bandwidth,
)


@pytest.mark.parametrize(
    ("text", "bytes_per_second"),
    [
        ("10Mbit", 1.25e6),
        ("10 Mbit/s", 1.25e6),
        ("10Mbps", 1.25e6),
        ("1.25MB/s", 1.25e6),
        ("1.5e3kB/s", 1.5e6),
        ("2GB", 2e9),
        ("800bit", 100.0),
        ("1MiB/s", 2.0**20),
    ],
)
def test_bandwidths_are_read(text: str, bytes_per_second: float) -> None:
    assert parse_bandwidth(text) == pytest.approx(bytes_per_second)


@pytest.mark.parametrize(
    "text", ["10", "", "Mbit", "10Mb", "10mbit", "-1Mbit", "0Mbit", "1e999Mbit", "nanMbit", "..bit"]
)
def test_what_is_no_bandwidth_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a bandwidth: give a number above 0 and a unit"):
        parse_bandwidth(text)


def test_quantities_are_written_with_the_fitting_unit() -> None:
    assert [format_seconds(s) for s in (0, 1.5, 0.0125, 2e-5)] == [
        "0 s",
        "1.5 s",
        "12.5 ms",
        "20 us",
    ]
    assert [format_bandwidth(b) for b in (1.25e6, 10)] == ["10 Mbit/s", "80 bit/s"]
    assert [format_bytes(b) for b in (3, 1500, 2.5e9)] == ["3 B", "1.5 kB", "2.5 GB"]
