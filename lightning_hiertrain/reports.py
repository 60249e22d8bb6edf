"""Text for people: profiles, schedules, topologies, predictions and comparisons of policies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lightning_hiertrain.planning import Prediction
from lightning_hiertrain.profiles import Profile
from lightning_hiertrain.schedule import Schedule
from lightning_hiertrain.topology import Topology
from lightning_hiertrain.units import format_bandwidth, format_bytes, format_seconds


def table(rows: Iterable[Sequence[str]]) -> str:
    """Aligns columns: the first to the left, the others to the right."""
    rows = [tuple(row) for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        first, *others = (
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join([first, *others]).rstrip())
    return "\n".join(lines)


def schedule_report(schedule: Schedule) -> str:
    """The grid of a schedule and what it says besides."""
    lines = [schedule.grid()]
    for tier, codec in schedule.codecs.items():
        lines.append(f"{tier} packs its activations with {codec}")
    if schedule.num_chunks > 1:
        lines.append(f"prefix workers split their rows into {schedule.num_chunks} chunks")
    if schedule.predicted_seconds is not None:
        made_by = f" by policy {schedule.policy}" if schedule.policy else ""
        lines.append(f"predicted step: {format_seconds(schedule.predicted_seconds)}{made_by}")
    if schedule.optimality_gap:
        lines.append(
            f"not proven optimal: a better one may take up to {schedule.optimality_gap:.2%} less"
        )
    return "\n".join(lines)


def prediction_report(prediction: Prediction) -> str:
    """The phases of a predicted step and what is busy for how long."""
    phases = [
        ("forward, inputs included", prediction.forward_seconds),
        ("loss", prediction.loss_seconds),
        ("backward", prediction.backward_seconds),
        ("update, optimizer included", prediction.update_seconds),
    ]
    phases = [(name, seconds) for name, seconds in phases if seconds]
    waiting = prediction.step_seconds - sum(seconds for _, seconds in phases)
    if waiting > 1e-9 * prediction.step_seconds:
        phases.append((f"waiting for {prediction.busiest}", waiting))
    phases.append(("step", prediction.step_seconds))
    busy = [
        (f"  {name}", format_seconds(seconds), f"{seconds / prediction.step_seconds:.0%}")
        for name, seconds in prediction.busy_seconds.items()
        if seconds and prediction.step_seconds
    ]
    text = table([("phase", "predicted"), *((n, format_seconds(s)) for n, s in phases)])
    return text + "\n\n" + table([("busy", "time", "of the step"), *busy])


def policies_report(schedules: Mapping[str, Schedule | str]) -> str:
    """One line a policy: step time, against the best, who does what; or why there is none."""
    seconds = [s.predicted_seconds or 0.0 for s in schedules.values() if isinstance(s, Schedule)]
    best = min(seconds, default=0.0)
    rows: list[tuple[str, str, str]] = [("policy", "step", "times the best")]
    notes = [""]
    for policy, schedule in schedules.items():
        if isinstance(schedule, Schedule):
            value = schedule.predicted_seconds or 0.0
            rows.append((policy, format_seconds(value), f"{value / best:.2f}" if best else "-"))
            notes.append(_summary(schedule))
        else:
            rows.append((policy, "-", "-"))
            notes.append(schedule)
    lines = table(rows).splitlines()
    width = max(len(line) for line in lines)
    return "\n".join(
        f"{line:<{width}}  {note}".rstrip() for line, note in zip(lines, notes, strict=True)
    )


def _summary(schedule: Schedule) -> str:
    """`edge:70 device:20@3`: the owner's samples, then each prefix worker's and its cut."""
    parts = [f"{schedule.owner}:{schedule.shares[schedule.owner].num_samples}"]
    for tier in schedule.prefix_workers:
        share = schedule.shares[tier]
        codec = f"/{schedule.codecs[tier]}" if tier in schedule.codecs else ""
        parts.append(f"{tier}:{share.num_samples}@{share.num_layers}{codec}")
    return " ".join(parts)


def profile_report(profile: Profile, *, batch_size: int = 128) -> str:
    """Tiers, layers with their times for a whole mini-batch, and links."""
    names = list(profile.tiers)
    tiers = [("tier", "optimizer", "loss", "overhead", "memory")]
    for name, tier in profile.tiers.items():
        memory = "no limit" if tier.memory_bytes is None else format_bytes(tier.memory_bytes)
        mark = f"{name} (data)" if name == profile.data_tier else name
        loss = format_seconds(tier.loss_seconds(batch_size))
        optimizer, overhead = map(format_seconds, (tier.optimizer_seconds, tier.overhead_seconds))
        tiers.append((mark, optimizer, loss, overhead, memory))
    heads = [f"{name} {way}" for name in names for way in ("forward", "backward")]
    layers = [("layer", "output", "parameters", *heads)]
    for layer in profile.layers:
        times = [
            format_seconds(what[name](batch_size))
            for name in names
            for what in (layer.forward_seconds, layer.backward_seconds)
        ]
        output = format_bytes(layer.output_bytes_per_sample)
        layers.append((layer.name, output, format_bytes(layer.parameter_bytes), *times))
    links = [("link", "bandwidth", "latency")]
    links += [
        (
            "-".join(link.between),
            format_bandwidth(link.bandwidth_bytes_per_second),
            format_seconds(link.latency_seconds),
        )
        for link in profile.links
    ]
    dealing = profile.dealing_seconds
    head = (
        f"profile of {profile.model}: {len(profile.layers)} layers, a sample has "
        f"{format_bytes(profile.input_bytes_per_sample)} and its target "
        f"{format_bytes(profile.target_bytes_per_sample)}; times for {batch_size} samples"
    )
    if dealing(batch_size):
        head += (
            f"; {profile.data_tier} deals them out in {format_seconds(dealing.fixed)} and packs "
            f"them for others in {format_seconds(batch_size * dealing.per_sample)}"
        )
    return "\n\n".join([head, table(tiers), table(layers), table(links)])


def topology_report(topology: Topology) -> str:
    """Tiers with addresses and keys, and links."""
    tiers = [("tier", "address", "public key")]
    tiers += [(t.name, t.address or "-", t.public_key or "-") for t in topology.tiers]
    links = [("link", "dials")]
    links += [
        (link.name, link.address or topology.tier(link.between[1]).address or "-")
        for link in topology.links
    ]
    return "\n\n".join([table(tiers), table(links)])
