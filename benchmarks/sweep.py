"""Measures step times over the bandwidth of the link between edge and cloud, on one testbed.

Everything of a model is measured in one sitting: the profile, the schedules that the policies plan
from it, and the peers, alternately named `system` below. The outcome is one JSON file.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.testbed.testbed import ROOT, Testbed
from benchmarks.workloads.candidates import best_shares, best_splits, varied_schedules, with_links
from benchmarks.workloads.models import BATCH_SIZES, make_chain
from lightning_hiertrain import Profile, Schedule, lower_bound, plan
from lightning_hiertrain.errors import PlanningError

RATES_MBIT = (100.0, 50.0, 20.0, 10.0, 5.0, 2.0, 1.0)
POLICIES = ("all-device", "all-edge", "all-cloud", "jointdnn", "jalad", "hiertrain")
SYSTEMS = (*POLICIES, "overlap", "ddp", "pipeline", "plain")
"""`hiertrain` is the papers' schedule without overlap, `overlap` this package's own."""
LINK = "edge-cloud"
SEARCH_STEPS = ("--steps", "2", "--warm-up", "1")

Case = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be measured, and how."""

    model: str
    rates_mbit: Sequence[float] = RATES_MBIT
    systems: Sequence[str] = SYSTEMS
    pixels: str = "uint8"
    steps: int = 20
    warm_up: int = 4
    limit_seconds: float = 120.0
    profile_steps: int = 10
    profile_seconds: float = 15.0
    num_splits: int = 3
    """Pipelines' splits that are tried for each number of micro-batches."""
    num_varied: int = 12
    """Schedules of many kinds, measured at `varied_rate_mbit` to hold predictions against."""
    varied_rate_mbit: float = 10.0
    compression: bool = False
    """Whether this package's own schedule may pack activations."""
    reuse: Path | None = None
    """A `profile.json` of an earlier run on a testbed alike."""
    timeout_seconds: float = 4 * 3600.0
    options: Sequence[str] = field(default_factory=tuple)
    """Further options of the workload `hiertrain`."""

    @property
    def batch_size(self) -> int:
        return BATCH_SIZES[self.model]


class Sweep:
    """One sitting.

    Args:
        bed: The testbed, made.
        wanted: What is to be measured.
        output: Folder for logs and raw results.
        say: Is told what happens.
    """

    def __init__(
        self, bed: Testbed, wanted: Plan, output: Path, *, say: Callable[[str], None]
    ) -> None:
        self._bed = bed
        self._plan = wanted
        self._output = output
        self._say = say
        self._points: list[dict[str, Any]] = []
        self._runs = 0

    def measure(self) -> dict[str, Any]:
        """Measures everything and returns what is to be kept."""
        wanted = self._plan
        calibration = self._bed.calibrate()
        self._say(calibration.report())
        measured = self._profile()
        profile = Profile.from_dict(measured["profile"])
        at_rate = {
            rate: with_links(profile, measured["links_by_rate_mbit"][f"{rate:g}"])
            for rate in self._rates()
        }
        self._data = {
            "format": 1,
            "model": wanted.model,
            "batch_size": wanted.batch_size,
            "pixels": wanted.pixels,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": sys.argv,
            "commit": _commit(),
            "machine": measured["machine"],
            "calibration": calibration.to_dict(),
            **{name: measured[name] for name in ("profile", "links_by_rate_mbit")},
            "lower_bound_seconds": {
                f"{rate:g}": lower_bound(at_rate[rate], batch_size=wanted.batch_size)
                for rate in wanted.rates_mbit
            },
        }
        policies = [name for name in POLICIES if name in wanted.systems]
        self._run_schedules(self._planned(at_rate, policies, overlap=False), overlap=False)
        if "overlap" in wanted.systems:
            self._run_schedules(self._planned(at_rate, ["hiertrain"], overlap=True), overlap=True)
        if "plain" in wanted.systems:
            self._run("hiertrain", None, "--plain")
        if "ddp" in wanted.systems:
            self._run_ddp(at_rate)
        if "pipeline" in wanted.systems:
            self._run_pipelines(at_rate)
        return self._kept()

    def _kept(self) -> dict[str, Any]:
        return {**self._data, "points": self._points}

    def _rates(self) -> list[float]:
        return sorted({*self._plan.rates_mbit, self._plan.varied_rate_mbit}, reverse=True)

    def _profile(self) -> dict[str, Any]:
        wanted = self._plan
        path = wanted.reuse
        if path is None:
            rates = [f"{rate:g}" for rate in self._rates()]
            options = ["--profile", "--rates", *rates, "--steps", "0"]
            options += ["--profile-steps", str(wanted.profile_steps)]
            options += ["--profile-seconds", str(wanted.profile_seconds)]
            path = self._start("hiertrain", options) / "profile.json"
        measured: dict[str, Any] = json.loads(path.read_text())
        return measured

    # Schedules

    def _planned(
        self, at_rate: dict[float, Profile], policies: Sequence[str], *, overlap: bool
    ) -> list[Case]:
        """Plans for each rate, the fastest link first."""
        wanted = self._plan
        cases: list[Case] = []
        for rate in wanted.rates_mbit:
            for policy in policies:
                try:
                    schedule = plan(
                        at_rate[rate],
                        batch_size=wanted.batch_size,
                        policy=policy,
                        overlap=overlap,
                        compression=wanted.compression and overlap,
                    )
                except PlanningError as error:
                    self._say(f"{policy} has no schedule at {rate:g} Mbit/s: {error}")
                    continue
                cases.append(_case("overlap" if overlap else policy, rate, schedule))
        profile = at_rate[wanted.varied_rate_mbit]
        varied = varied_schedules(
            profile,
            wanted.batch_size,
            wanted.num_varied,
            overlap=overlap,
            slowest=wanted.limit_seconds / 4,
        )
        system = "varied, overlap" if overlap else "varied"
        cases += [_case(system, wanted.varied_rate_mbit, schedule) for schedule in varied]
        return cases

    def _run_schedules(self, cases: list[Case], *, overlap: bool) -> None:
        """Measures equal schedules once, and leaves out what would take too long."""
        alike: dict[str, list[Case]] = {}
        for case in cases:
            if case["predicted_seconds"] > 1.5 * self._plan.limit_seconds:
                self._say(f"{case['name']} is left out, predicted {case['predicted_seconds']:.3g}")
                self._points.append({**case, "median_seconds": None, "left_out": True})
                continue
            shares = {k: v for k, v in case["schedule"].items() if k in _WHAT_RUNS}
            key = json.dumps([case["rates_mbit"], shares], sort_keys=True)
            alike.setdefault(key, []).append(case)
        if not alike:
            return
        total = sum(group[0]["predicted_seconds"] for group in alike.values())
        self._say(f"{len(alike)} different schedules, {total:.0f} s by prediction for a step each")
        options = [] if not overlap else list(self._plan.options)
        options += [] if overlap else ["--no-overlap"]
        results = self._run("hiertrain", [group[0] for group in alike.values()], *options, keep=0)
        by_name = {result["name"]: result for result in results}
        for group in alike.values():
            result = by_name.get(group[0]["name"])
            if result is not None:
                self._points += [{**result, **case} for case in group]
        self._write()

    # Peers

    def _run_ddp(self, at_rate: dict[float, Profile]) -> None:
        size = self._plan.batch_size
        cases: list[Case] = []
        for rate in self._plan.rates_mbit:
            shares = {
                "ddp, equal shares": [size - 2 * (size // 3), size // 3, size // 3],
                "ddp, best shares": best_shares(at_rate[rate], size),
                "ddp, device idle": best_shares(at_rate[rate], size, with_device=False),
            }
            cases += [{**_named(name, rate), "shares": rows} for name, rows in shares.items()]
        self._run_until_done("ddp", cases)

    def _run_pipelines(self, at_rate: dict[float, Profile]) -> None:
        """Tries the splits that should be good with few steps, then measures the best of them."""
        wanted = self._plan
        names = [name for name, _ in make_chain(wanted.model, wanted.pixels).named_children()]
        tried: list[Case] = []
        for rate in wanted.rates_mbit:
            splits = best_splits(at_rate[rate], names, wanted.batch_size, wanted.num_splits)
            for kind in ("gpipe", "1f1b"):
                for number, split in enumerate(splits):
                    case = {**_named(f"{kind} {number}", rate), **split, "schedule": kind}
                    tried.append({**case, "system": kind})
        results = self._run_until_done("pipeline", tried, *SEARCH_STEPS, keep=False)
        best: dict[tuple[str, float], Case] = {}
        for result in results:
            key = result["system"], result["rates_mbit"][LINK]
            seconds = result["median_seconds"]
            if seconds is not None and (key not in best or seconds < best[key]["searched_seconds"]):
                case = next(case for case in tried if case["name"] == result["name"])
                best[key] = {**case, "searched_seconds": seconds, "num_tried": len(tried)}
        self._run_until_done("pipeline", list(best.values()))

    def _run_until_done(
        self, workload: str, cases: list[Case], *options: str, keep: bool = True
    ) -> list[dict[str, Any]]:
        """Starts a peer again behind each case that was given up.

        What was given up on a fast link is not tried on a slower one.
        """
        left, results = list(cases), []
        while left:
            made = self._run(workload, left, *options, keep=keep)
            if not made:
                self._say(f"{workload} gave no result for {left[0]['name']} and is left")
                break
            results += made
            given_up = {result["system"] for result in made if result["median_seconds"] is None}
            done = {result["name"] for result in results}
            left = [case for case in left if case["name"] not in done]
            for case in [case for case in left if case["system"] in given_up]:
                self._points.append({**case, "median_seconds": None, "given_up_earlier": True})
            left = [case for case in left if case["system"] not in given_up]
        return results

    # Processes

    def _run(
        self, workload: str, cases: list[Case] | None, *options: str, keep: bool | int = True
    ) -> list[dict[str, Any]]:
        """Runs a workload and returns the results that it wrote before it ended."""
        wanted = self._plan
        words = ["--steps", str(wanted.steps), "--warm-up", str(wanted.warm_up)]
        words += ["--limit", str(wanted.limit_seconds), *options]
        if cases is not None:
            path = self._output / f"cases-{self._runs + 1}.json"
            path.write_text(json.dumps({"cases": cases}, indent=1) + "\n")
            words += ["--cases", str(path.resolve())]
        written = self._start(workload, words) / f"{workload}.json"
        results = json.loads(written.read_text())["results"] if written.exists() else []
        if keep:
            named = {"system": "plain", "rates_mbit": {}}
            self._points += [{**named, **result} for result in results]
            self._write()
        return list(results)

    def _start(self, workload: str, options: Sequence[str]) -> Path:
        """Runs a workload on all hosts and returns the folder of the data tier's results."""
        wanted = self._plan
        self._runs += 1
        output = self._output / f"{self._runs:02}-{workload}"
        argv = [sys.executable, "-m", f"benchmarks.workloads.{workload}", "--model", wanted.model]
        argv += ["--pixels", wanted.pixels, *options]
        self._say(f"{output.name}: {' '.join(argv[2:])}")
        ended = self._bed.run(argv, output, timeout_seconds=wanted.timeout_seconds)
        failed = {tier: end.returncode for tier, end in ended.items() if end.returncode != 0}
        if failed:
            self._say(f"{output.name} did not end well: {failed}; see {output}")
        return output / self._bed.config.names[0]

    def _write(self) -> None:
        path = self._output / f"{self._plan.model}.json"
        path.write_text(json.dumps(self._kept(), indent=1) + "\n")


_WHAT_RUNS = ("owner", "shares", "codecs", "num_chunks")


def _named(system: str, rate: float) -> Case:
    return {"name": f"{system} at {rate:g}", "system": system, "rates_mbit": {LINK: rate}}


def _case(system: str, rate: float, schedule: Schedule) -> Case:
    case = _named(system, rate)
    if system.startswith("varied"):
        shares = ",".join(
            f"{share.num_layers}x{share.num_samples}" for share in schedule.shares.values()
        )
        case["name"] += f" {schedule.owner} {shares}"
    return {
        **case,
        "schedule": schedule.to_dict(),
        "predicted_seconds": schedule.predicted_seconds,
    }


def _commit() -> str | None:
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or None
