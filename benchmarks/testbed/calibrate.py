"""Measures what a testbed really gives, before anything is run on it."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.testbed.testbed import Testbed

PROBE = Path(__file__).with_name("probe.py")
PORT = 5800
LEAST_TRANSFER_SECONDS = 1.0
LEAST_TRANSFER_BYTES = 200_000
"""A slow link is measured for longer."""
PATIENCE_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class LinkCalibration:
    """Raw TCP on one link."""

    nominal_bytes_per_second: float
    up_bytes_per_second: float
    down_bytes_per_second: float
    round_trip_seconds: float


@dataclass(frozen=True, kw_only=True)
class TierCalibration:
    """A matrix product on one tier, while the others do the same."""

    nominal_cores: float
    cores: float
    """CPU time per second of wall time."""
    flops_per_second: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What a testbed gives."""

    links: Mapping[str, LinkCalibration]
    tiers: Mapping[str, TierCalibration]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def report(self) -> str:
        """Returns a table of what was asked for and what there is."""
        lines = []
        for name, link in self.links.items():
            rates = (
                link.nominal_bytes_per_second,
                link.up_bytes_per_second,
                link.down_bytes_per_second,
            )
            asked, up, down = (f"{8e-6 * rate:.4g}" for rate in rates)
            lines.append(
                f"link {name:<12} {asked:>6} Mbit/s asked, raw TCP {up} up, {down} down, "
                f"round trip {1e3 * link.round_trip_seconds:.3g} ms"
            )
        for name, tier in self.tiers.items():
            lines.append(
                f"tier {name:<12} {tier.nominal_cores:>6.4g} cores asked, {tier.cores:.3f} got, "
                f"matmul {1e-9 * tier.flops_per_second:.3g} GFLOP/s"
            )
        return "\n".join(lines)


def calibrate(bed: Testbed, *, matmul_seconds: float = 1.5) -> Calibration:
    """Measures every link by itself, then all tiers at once.

    Raises:
        OSError: If a probe fails or does not end.
    """
    links = {}
    for link in bed.config.links:
        rate = bed.network.rates[link.name]
        seconds = max(LEAST_TRANSFER_SECONDS, LEAST_TRANSFER_BYTES / rate)
        low, high = link.between
        arguments = [bed.network.address(high, seen_from=low), str(PORT), str(seconds)]
        with _probe(bed, high, "serve", *arguments) as server:
            server.expect("ready")
            with _probe(bed, low, "dial", *arguments) as client:
                measured = {**client.result(), **server.result()}
        links[link.name] = LinkCalibration(nominal_bytes_per_second=rate, **measured)
    return Calibration(links=links, tiers=_matmuls(bed, matmul_seconds))


def _matmuls(bed: Testbed, seconds: float) -> dict[str, TierCalibration]:
    with (
        _probes(bed, bed.config.names, "matmul", str(seconds)) as probes,
    ):
        for probe in probes.values():
            probe.expect("ready")
        for probe in probes.values():
            probe.go()
        results = {tier: probe.result() for tier, probe in probes.items()}
    return {
        tier.name: TierCalibration(nominal_cores=tier.cores, **results[tier.name])
        for tier in bed.config.tiers
    }


class _Probe:
    """One running probe."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self._name = name
        self._process = process
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.strip())
        self._lines.put("")

    def line(self) -> str:
        try:
            line = self._lines.get(timeout=PATIENCE_SECONDS)
        except queue.Empty:
            raise OSError(f"{self._name} said nothing for {PATIENCE_SECONDS} s") from None
        if not line:
            assert self._process.stderr is not None
            raise OSError(f"{self._name} failed: {self._process.stderr.read().strip()[-2000:]}")
        return line

    def expect(self, text: str) -> None:
        line = self.line()
        if line != text:
            raise OSError(f"{self._name} said {line!r} instead of {text!r}")

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def result(self) -> dict[str, float]:
        result: dict[str, float] = json.loads(self.line())
        return result


@contextmanager
def _probe(bed: Testbed, tier: str, *arguments: str) -> Iterator[_Probe]:
    with _probes(bed, (tier,), *arguments) as probes:
        yield probes[tier]


@contextmanager
def _probes(bed: Testbed, tiers: tuple[str, ...], *arguments: str) -> Iterator[dict[str, _Probe]]:
    processes: dict[str, subprocess.Popen[str]] = {}
    try:
        for tier in tiers:
            processes[tier] = subprocess.Popen(
                bed.network.command(tier, [sys.executable, str(PROBE), *arguments]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=bed.environment(tier),
                start_new_session=True,
            )
        yield {
            tier: _Probe(f"the probe {arguments[0]!r} on {tier}", process)
            for tier, process in processes.items()
        }
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
