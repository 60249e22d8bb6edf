"""The `hiertrain` command: plan, sweep, show, timeline, keys, check. Needs no training process.

A wrong file, format or unit ends it with one line on the standard error and exit status 2.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from lightning_hiertrain.errors import HierTrainError, PlanningError
from lightning_hiertrain.planning import POLICIES, lower_bound, plan, predict
from lightning_hiertrain.profiles import Profile
from lightning_hiertrain.reports import (
    policies_report,
    prediction_report,
    profile_report,
    schedule_report,
    table,
    topology_report,
)
from lightning_hiertrain.schedule import Schedule
from lightning_hiertrain.timeline.command import show_timeline
from lightning_hiertrain.topology import Topology, read_json
from lightning_hiertrain.units import format_bandwidth, format_seconds, parse_bandwidth

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALL = "all"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: The words after `hiertrain`; those of the process by default.

    Returns:
        The exit status: 0, 1 if a check has found something to fix, or 2 after one line about what
        is wrong.
    """
    commands: dict[str, Callable[[Namespace], str | tuple[str, int]]] = {
        "plan": _plan,
        "sweep": _sweep,
        "show": _show,
        "timeline": _timeline,
        "keys": _keys,
        "check": _check,
    }
    try:
        parsed = _parser().parse_args(None if arguments is None else list(arguments))
        done = commands[parsed.subcommand](parsed[parsed.subcommand])
    except (ArgumentError, HierTrainError, ValueError, OSError, ImportError) as error:
        sys.stderr.write(f"hiertrain: error: {' '.join(str(error).split())}\n")
        return 2
    text, status = done if isinstance(done, tuple) else (done, 0)
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough, as `head` has
        sys.stderr.close()
    return status


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="hiertrain",
        description="Plans training across device, edge and cloud from a measured profile.",
        exit_on_error=False,
    )
    commands = parser.add_subcommands(required=True)

    command = _command("Plans a training step and compares all policies.")
    _add_planning_arguments(command)
    command.add_argument("--policy", default="hiertrain", help="a policy's name, or `all`")
    command.add_argument("--out", type=str, help="file for the schedule; of `all`, the fastest")
    commands.add_subcommand("plan", command, help="plan a training step and compare all policies")

    command = _command("Plans every policy over a range of one link's bandwidth.")
    _add_planning_arguments(command)
    command.add_argument("--link", required=True, type=str, help="for example edge-cloud")
    command.add_argument("--from", required=True, type=str, help="for example 1Mbit")
    command.add_argument("--to", required=True, type=str, help="for example 100Mbit")
    command.add_argument("--points", type=int, default=13, help="bandwidths, evenly in logarithm")
    command.add_argument("--plot", type=str, help="file for the figure, .png, .svg or .pdf")
    commands.add_subcommand("sweep", command, help="step time of every policy against bandwidth")

    command = _command("Prints a profile, schedule or topology file.")
    command.add_argument("file", type=str)
    command.add_argument("--batch_size", type=int, default=128, help="for a profile's times")
    commands.add_subcommand("show", command, help="print a profile, schedule or topology")

    command = _command("Says where the time of recorded training steps went.")
    command.add_argument("file", type=str, help="what `TimelineCallback` has written")
    command.add_argument("--step", type=int | None, default=None, help="one step; else their mean")
    command.add_argument("--profile", type=str, help="profile file, to predict from another one")
    command.add_argument("--trace", type=str, help="file for a trace, for Perfetto or Chrome")
    command.add_argument("--plot", type=str, help="file for the picture, .png, .svg or .pdf")
    commands.add_subcommand("timeline", command, help="show where a training step's time went")

    command = _command("Makes a key pair for each tier and puts the public keys into the file.")
    command.add_argument("topology", type=str)
    command.add_argument("--out", type=str, help="folder for the private keys; the file's own")
    commands.add_subcommand("keys", command, help="make the keys of a topology")

    command = _command("Looks, on every host at once, whether a run on this topology would work.")
    command.add_argument("topology", type=str)
    command.add_argument("--tier", type=str, help="this host's tier; the one whose key is here")
    command.add_argument("--private_key", type=str, help="key file; TIER.key beside the topology")
    command.add_argument("--timeout_seconds", type=float, default=120.0, help="for other tiers")
    command.add_argument("--seconds_per_link", type=float, default=2.0, help="to measure it")
    commands.add_subcommand("check", command, help="check hosts and links before a run")
    return parser


def _command(description: str) -> ArgumentParser:
    return ArgumentParser(description=description, exit_on_error=False)


def _add_planning_arguments(command: ArgumentParser) -> None:
    command.add_argument("profile", type=str, help="profile file")
    command.add_argument("--batch_size", type=int, default=128)
    command.add_argument("--overlap", type=bool, default=True, help="plan the overlapped step")
    command.add_argument(
        "--chunk_counts", type=list[int], default=[1, 4], help="chunks to choose from"
    )
    command.add_argument("--compression", type=bool, default=False, help="allow codecs")
    command.add_argument("--accuracy_loss_limit", type=float, default=0.01)
    command.add_argument("--keep_inputs_on_data_tier", type=bool, default=False)
    command.add_argument("--least_depth", type=int, default=1)
    command.add_argument("--time_limit_seconds", type=float | None, default=None)
    command.add_argument("--topology", type=str, help="topology file: which links there are")
    command.add_argument(
        "--bandwidth",
        action="append",
        type=str,
        help="replaces a link's bandwidth, edge-cloud=10Mbit; may be given several times",
    )


class _Problem:
    """What the planning arguments ask for."""

    def __init__(self, arguments: Namespace) -> None:
        self.profile = Profile.from_json(arguments.profile)
        for change in arguments.bandwidth or ():
            link, equals, value = change.partition("=")
            if not equals:
                raise ValueError(
                    f"{change!r} is not a link's bandwidth: write it as edge-cloud=10Mbit"
                )
            self.profile = with_bandwidth(self.profile, link, parse_bandwidth(value))
        topology = Topology.from_json(arguments.topology) if arguments.topology else None
        self.common: dict[str, Any] = {
            "batch_size": arguments.batch_size,
            "topology": topology,
            "compression": arguments.compression,
            "accuracy_loss_limit": arguments.accuracy_loss_limit,
        }
        self.options: dict[str, Any] = {
            "overlap": arguments.overlap,
            "keep_inputs_on_data_tier": arguments.keep_inputs_on_data_tier,
            "least_depth": arguments.least_depth,
            "chunk_counts": tuple(arguments.chunk_counts),
            "time_limit_seconds": arguments.time_limit_seconds,
        }

    def plan(self, profile: Profile, policy: str) -> Schedule:
        return plan(profile, policy=policy, **self.common, **self.options)

    def plan_all(self, profile: Profile) -> dict[str, Schedule | str]:
        """Each policy's schedule, or why it has none."""
        plans: dict[str, Schedule | str] = {}
        for policy in POLICIES:
            try:
                plans[policy] = self.plan(profile, policy)
            except PlanningError as error:
                plans[policy] = str(error)
            except ValueError as error:
                if policy == "hiertrain":
                    raise  # it is not the policy that is wrong
                plans[policy] = str(error)
        return plans

    def bound(self, profile: Profile) -> float:
        return lower_bound(profile, **self.common)


def with_bandwidth(profile: Profile, name: str, bytes_per_second: float) -> Profile:
    """Returns the profile with another bandwidth on one link.

    Raises:
        ValueError: If there is no such link.
    """
    ends = set(name.split("-"))
    if not any(ends == set(link.between) for link in profile.links):
        known = ["-".join(link.between) for link in profile.links]
        raise ValueError(f"there is no link {name!r}; the links are {known}")
    return replace(
        profile,
        links=tuple(
            replace(link, bandwidth_bytes_per_second=bytes_per_second)
            if ends == set(link.between)
            else link
            for link in profile.links
        ),
    )


def _plan(arguments: Namespace) -> str:
    problem = _Problem(arguments)
    profile = problem.profile
    plans = problem.plan_all(profile)
    if arguments.policy == ALL:
        made = {name: made for name, made in plans.items() if isinstance(made, Schedule)}
    else:
        chosen = plans.get(arguments.policy)
        if not isinstance(chosen, Schedule):
            chosen = problem.plan(profile, arguments.policy)  # raises what there is to say
            plans[arguments.policy] = chosen
        made = {arguments.policy: chosen}
    if not made:
        raise PlanningError(str(plans["hiertrain"]))
    overlap, topology = arguments.overlap, problem.common["topology"]
    parts = []
    for name, schedule in made.items():
        predicted = predict(profile, schedule, overlap=overlap, topology=topology)
        head = f"policy {name} for {profile.model}, mini-batch of {arguments.batch_size}"
        parts.append("\n\n".join([head, schedule_report(schedule), prediction_report(predicted)]))
    parts.append(policies_report(plans))
    parts.append(f"lower bound of any schedule: {format_seconds(problem.bound(profile))}")
    if arguments.out:
        fastest = min(made.values(), key=lambda schedule: schedule.predicted_seconds or math.inf)
        fastest.to_json(arguments.out)
        parts.append(f"schedule written to {arguments.out}")
    return "\n\n".join(parts)


def _sweep(arguments: Namespace) -> str:
    problem = _Problem(arguments)
    first, last = parse_bandwidth(arguments["from"]), parse_bandwidth(arguments.to)
    if arguments.points < 2:
        raise ValueError(f"`points` is {arguments.points}; a sweep needs at least 2")
    ratio = (last / first) ** (1 / (arguments.points - 1))
    bandwidths = [first * ratio**index for index in range(arguments.points)]
    curves: dict[str, list[float]] = {name: [] for name in (*POLICIES, "lower bound")}
    for bandwidth in bandwidths:
        profile = with_bandwidth(problem.profile, arguments.link, bandwidth)
        for policy, schedule in problem.plan_all(profile).items():
            seconds = schedule.predicted_seconds if isinstance(schedule, Schedule) else None
            curves[policy].append(math.nan if seconds is None else seconds)
        curves["lower bound"].append(problem.bound(profile))
    rows = [(arguments.link, *curves)]
    for index, bandwidth in enumerate(bandwidths):
        cells = [curve[index] for curve in curves.values()]
        times = ["-" if math.isnan(cell) else format_seconds(cell) for cell in cells]
        rows.append((format_bandwidth(bandwidth), *times))
    text = f"step time of {problem.profile.model}, mini-batch of {arguments.batch_size}\n\n"
    text += table(rows)
    if arguments.plot:
        title = f"{problem.profile.model}, mini-batch of {arguments.batch_size}"
        figure = _figure(arguments.link, bandwidths, curves, title)
        figure.savefig(arguments.plot, dpi=150)
        text += f"\n\nfigure written to {arguments.plot}"
    return text


def _figure(
    link: str, bandwidths: list[float], curves: dict[str, list[float]], title: str
) -> Figure:
    """Draws step time against bandwidth, a curve a policy, as the papers' figures 2 and 3."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "`--plot` needs matplotlib, which is not installed: pip install matplotlib"
        ) from error
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    megabits = [8e-6 * bandwidth for bandwidth in bandwidths]
    markers = dict(zip(POLICIES, "osDv^x", strict=True))
    for name, seconds in curves.items():
        if name in markers:
            axes.plot(megabits, seconds, marker=markers[name], markersize=4, label=name)
        else:
            axes.plot(megabits, seconds, "k--", linewidth=1, label=name)
    axes.set(
        xscale="log",
        yscale="log",
        title=title,
        xlabel=f"bandwidth of {link} (Mbit/s)",
        ylabel="predicted time of a training step (s)",
    )
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small")
    return figure


def _show(arguments: Namespace) -> str:
    data = read_json(arguments.file, kind="profile, schedule or topology")
    if "layers" in data:
        return profile_report(Profile.from_dict(data), batch_size=arguments.batch_size)
    if "shares" in data:
        return schedule_report(Schedule.from_dict(data))
    if "tiers" in data:
        return topology_report(Topology.from_dict(data))
    raise ValueError(
        f"{arguments.file} is not a profile, schedule or topology: it has none of the fields "
        "'layers', 'shares' and 'tiers'"
    )


def _timeline(arguments: Namespace) -> str:
    return show_timeline(
        arguments.file,
        step=arguments.step,
        profile=arguments.profile,
        trace=arguments.trace,
        plot=arguments.plot,
    )


def _keys(arguments: Namespace) -> str:
    from lightning_hiertrain.transport.keys import make_keys

    path = Path(arguments.topology)
    topology = Topology.from_json(path)
    folder = Path(arguments.out) if arguments.out else path.parent
    made = make_keys(topology, folder)
    made.to_json(path)
    lines = [f"public keys written to {path}: copy it to every host"]
    lines += [
        f"{folder / (name + '.key')}: copy it to the host of tier {name} alone"
        for name in made.names
    ]
    return "\n".join(lines)


def _check(arguments: Namespace) -> tuple[str, int]:
    from lightning_hiertrain.host_check import check_host, tier_of_host

    topology = Topology.from_json(arguments.topology)
    tier = arguments.tier or tier_of_host(arguments.topology, topology)
    topology.tier(tier)
    beside = Path(arguments.topology).with_name(f"{tier}.key")
    check = check_host(
        tier,
        topology,
        private_key=arguments.private_key or (beside if beside.exists() else None),
        timeout_seconds=arguments.timeout_seconds,
        seconds_per_link=arguments.seconds_per_link,
        say=lambda what: sys.stderr.write(f"{what}\n"),
    )
    return check.report(), 0 if check.is_ready else 1


if __name__ == "__main__":
    sys.exit(main())
