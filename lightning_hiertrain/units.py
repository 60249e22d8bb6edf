"""Reads and writes quantities as people do: `10Mbit`, `1.25MB/s`, `12.5 ms`."""

from __future__ import annotations

import math
import re

_PREFIXES = {
    "": 1.0,
    "k": 1e3,
    "K": 1e3,
    "M": 1e6,
    "G": 1e9,
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
}
_BANDWIDTH = re.compile(r"\s*([0-9.eE+]+|[0-9.]+[eE]-[0-9]+)\s*([kKMG]i?)?(bit|bp|B)(/?s)?\s*")


def parse_bandwidth(text: str) -> float:
    """Reads a bandwidth, `10Mbit`, `10Mbit/s` or `1.25MB/s`, as bytes per second.

    Raises:
        ValueError: If it is not a number above 0 with a unit.
    """
    match = _BANDWIDTH.fullmatch(text)
    try:
        number = float(match.group(1)) if match else math.nan
    except ValueError:
        number = math.nan
    if not match or (match.group(3) == "bp") != (match.group(4) == "s" and match.group(3) == "bp"):
        number = math.nan
    if not math.isfinite(number) or number <= 0:
        raise ValueError(
            f"{text!r} is not a bandwidth: give a number above 0 and a unit, such as 10Mbit or "
            "1.25MB/s"
        )
    assert match is not None
    bytes_per_unit = 1.0 if match.group(3) == "B" else 0.125
    return number * _PREFIXES[match.group(2) or ""] * bytes_per_unit


def format_bandwidth(bytes_per_second: float) -> str:
    """Writes a bandwidth in bits, as network links are named."""
    bits = 8 * bytes_per_second
    for limit, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if bits >= limit:
            return f"{bits / limit:.4g} {prefix}bit/s"
    return f"{bits:.4g} bit/s"


def format_seconds(seconds: float) -> str:
    """Writes a time with four digits."""
    for limit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= limit:
            return f"{seconds / limit:.4g} {name}"
    return "0 s" if seconds == 0 else f"{seconds:.3g} s"


def format_bytes(size: float) -> str:
    """Writes a size with four digits."""
    for limit, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= limit:
            return f"{size / limit:.4g} {prefix}B"
    return f"{size:.4g} B"
