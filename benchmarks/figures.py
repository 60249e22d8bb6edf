"""The papers' Figs. 1 to 3, measured on the testbed and drawn.

    python -m benchmarks.figures measure --model lenet5 --output runs/figures
    python -m benchmarks.figures draw runs/figures/lenet5.json --output docs/figures
    python -m benchmarks.figures table runs/figures/lenet5.json

Fig. 1 holds the predicted time of a step against the measured one, Figs. 2 and 3 the systems
against each other, over the bandwidth between edge and cloud.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LINK = "edge-cloud"
RATES_MBIT = (100.0, 50.0, 20.0, 10.0, 5.0, 2.0, 1.0)
CURVES = {
    "all-device": ("tab:gray", "o"),
    "all-edge": ("tab:olive", "s"),
    "all-cloud": ("tab:cyan", "D"),
    "jointdnn": ("tab:pink", "v"),
    "jalad": ("tab:purple", "^"),
    "ddp": ("tab:brown", "P"),
    "gpipe": ("tab:orange", "<"),
    "1f1b": ("tab:red", ">"),
    "hiertrain": ("tab:blue", "x"),
    "overlap": ("tab:green", "*"),
}
LABELS = {"hiertrain": "HierTrain, as published", "overlap": "lightning-hiertrain"}
TITLES = {"lenet5": "LeNet-5", "alexnet": "AlexNet"}

Curves = dict[str, dict[float, float]]


def curves(data: dict[str, Any]) -> Curves:
    """Returns each system's step time in seconds by bandwidth; of the ways of DDP the best."""
    found: Curves = {}
    for point in data["points"]:
        system = "ddp" if point["system"].startswith("ddp") else point["system"]
        rate, seconds = point["rates_mbit"].get(LINK), point["median_seconds"]
        if system in CURVES and rate is not None and seconds is not None:
            curve = found.setdefault(system, {})
            curve[rate] = min(seconds, curve.get(rate, math.inf))
    return {name: dict(sorted(found[name].items())) for name in CURVES if name in found}


def predictions(data: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Returns predicted and measured seconds, without and with overlap, each schedule once."""
    found: dict[str, dict[str, tuple[float, float]]] = {"without overlap": {}, "with overlap": {}}
    for point in data["points"]:
        if point.get("predicted_seconds") and point["median_seconds"] and "schedule" in point:
            if not isinstance(point["schedule"], dict):
                continue  # a pipeline's
            kind = "with overlap" if "overlap" in point["system"] else "without overlap"
            ran = {k: v for k, v in point["schedule"].items() if k in ("owner", "shares")}
            key = json.dumps([point["rates_mbit"], ran], sort_keys=True)
            found[kind][key] = (point["predicted_seconds"], point["median_seconds"])
    return {kind: list(points.values()) for kind, points in found.items()}


def table(data: dict[str, Any]) -> str:
    """Returns the step times and what follows from them, as Markdown."""
    found = curves(data)
    rates = sorted({rate for curve in found.values() for rate in curve})
    lines = ["| system | " + " | ".join(f"{rate:g} Mbit/s" for rate in rates) + " |"]
    lines.append("|---" * (1 + len(rates)) + "|")
    for name, curve in found.items():
        cells = [f"{curve[rate]:.3g}" if rate in curve else "-" for rate in rates]
        lines.append(f"| {LABELS.get(name, name)} | " + " | ".join(cells) + " |")
    bounds = {float(rate): bound for rate, bound in data["lower_bound_seconds"].items()}
    cells = [f"{bounds[rate]:.3g}" if rate in bounds else "-" for rate in rates]
    lines.append("| lower bound | " + " | ".join(cells) + " |")
    lines.append("")
    ours = found.get("overlap", {})
    for name, curve in found.items():
        shared = [rate for rate in curve if rate in ours]
        if name != "overlap" and shared:
            ratios = {rate: curve[rate] / ours[rate] for rate in shared}
            best = max(ratios, key=lambda rate: ratios[rate])
            lines.append(
                f"- over {LABELS.get(name, name)}: {_geometric(ratios.values()):.2f} times in the "
                f"geometric mean, at best {ratios[best]:.2f} at {best:g} Mbit/s, at worst "
                f"{min(ratios.values()):.2f}"
            )
    reached = [bounds[rate] / seconds for rate, seconds in ours.items() if rate in bounds]
    if reached:
        lines.append(f"- {_geometric(reached):.0%} of the lower bound in the geometric mean")
    for kind, points in predictions(data).items():
        errors = [abs(predicted / measured - 1) for predicted, measured in points]
        if errors:
            lines.append(
                f"- predictions {kind}: {len(errors)} schedules, median error "
                f"{statistics.median(errors):.1%}, greatest {max(errors):.1%}"
            )
    return "\n".join(lines)


def draw(data: dict[str, Any], output: Path) -> list[Path]:
    """Draws step time over bandwidth and predicted against measured; returns the files."""
    from matplotlib.figure import Figure

    output.mkdir(parents=True, exist_ok=True)
    title = f"{TITLES[data['model']]}, mini-batch of {data['batch_size']}"
    figure = Figure(figsize=(8, 4.4), layout="constrained")
    axes = figure.add_subplot()
    for name, curve in curves(data).items():
        color, marker = CURVES[name]
        label = LABELS.get(name, name)
        axes.plot(list(curve), list(curve.values()), color=color, marker=marker, label=label)
    bounds = sorted((float(r), s) for r, s in data["lower_bound_seconds"].items())
    axes.plot(*zip(*bounds, strict=True), "k--", linewidth=1, label="lower bound")
    axes.set(
        xscale="log",
        yscale="log",
        title=title,
        xlabel="bandwidth between edge and cloud (Mbit/s)",
        ylabel="time of a training step (s)",
    )
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.grid(alpha=0.3, which="both")
    figure.legend(fontsize="small", loc="outside right upper")
    sweep = output / f"{data['model']}_bandwidth.png"
    figure.savefig(sweep, dpi=150)

    figure = Figure(figsize=(4.6, 4.4), layout="constrained")
    axes = figure.add_subplot()
    everything = []
    for (kind, points), marker in zip(predictions(data).items(), "ox", strict=True):
        if points:
            axes.plot(*zip(*points, strict=True), marker, label=kind)
            everything += [value for point in points for value in point]
    if everything:
        ends = [min(everything), max(everything)]
        axes.plot(ends, ends, "k-", linewidth=1)
        axes.fill_between(ends, [0.85 * e for e in ends], [1.15 * e for e in ends], alpha=0.15)
        axes.legend(fontsize="small")
    axes.set(
        xscale="log",
        yscale="log",
        title=title,
        xlabel="predicted time of a step (s)",
        ylabel="measured (s)",
    )
    axes.grid(alpha=0.3, which="both")
    predicted = output / f"{data['model']}_predicted.png"
    figure.savefig(predicted, dpi=150)
    return [sweep, predicted]


def _geometric(ratios: Any) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios)))


def _measure(parsed: argparse.Namespace) -> None:
    from benchmarks.sweep import Plan, Sweep
    from benchmarks.testbed.config import read_config
    from benchmarks.testbed.testbed import Testbed

    parsed.output.mkdir(parents=True, exist_ok=True)
    wanted = Plan(
        model=parsed.model,
        rates_mbit=sorted(parsed.rates, reverse=True),
        pixels=parsed.pixels,
        steps=parsed.steps,
        warm_up=parsed.warm_up,
        limit_seconds=parsed.limit,
        profile_steps=parsed.profile_steps,
        profile_seconds=parsed.profile_seconds,
        num_splits=parsed.splits,
        num_varied=parsed.varied,
        compression=parsed.compression,
        reuse=parsed.reuse,
        **({"systems": parsed.systems} if parsed.systems else {}),
    )
    config = read_config(parsed.config) if parsed.config else read_config()
    with Testbed(config, say=_say) as bed:
        data = Sweep(bed, wanted, parsed.output, say=_say).measure()
    path = parsed.output / f"{parsed.model}.json"
    path.write_text(json.dumps(data, indent=1) + "\n")
    _say(f"written to {path}\n\n{table(data)}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("measure", help="measure one model on the testbed")
    measure.add_argument("config", nargs="?", type=Path, help="the testbed's TOML file")
    measure.add_argument("--model", choices=list(TITLES), default="lenet5")
    measure.add_argument("--output", type=Path, default=Path("runs/figures"))
    measure.add_argument("--rates", type=float, nargs="+", default=RATES_MBIT, help="Mbit/s")
    measure.add_argument("--systems", nargs="+", help="by default all; see benchmarks/sweep.py")
    measure.add_argument("--pixels", choices=["uint8", "float32"], default="uint8")
    measure.add_argument("--steps", type=int, default=20)
    measure.add_argument("--warm-up", type=int, default=4)
    measure.add_argument("--limit", type=float, default=120, help="seconds; slower is given up")
    measure.add_argument("--profile-steps", type=int, default=10)
    measure.add_argument("--profile-seconds", type=float, default=15)
    measure.add_argument("--splits", type=int, default=3, help="of pipelines, to try")
    measure.add_argument("--varied", type=int, default=12, help="schedules for Fig. 1")
    measure.add_argument("--compression", action="store_true", help="lossy codecs in our schedule")
    measure.add_argument("--reuse", type=Path, help="profile.json of an earlier run")
    for name in ("draw", "table"):
        command = commands.add_parser(name)
        command.add_argument("results", type=Path, nargs="+")
        command.add_argument("--output", type=Path, default=Path("docs/figures"))
    parsed = parser.parse_args(arguments)
    if parsed.command == "measure":
        _measure(parsed)
        return 0
    for path in parsed.results:
        data = json.loads(path.read_text())
        if parsed.command == "table":
            _say(f"{TITLES[data['model']]}\n\n{table(data)}\n")
        else:
            for file in draw(data, parsed.output):
                _say(str(file))
    return 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
