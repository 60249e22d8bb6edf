"""Which cases are worth measuring: from a profile, before anything of them is run."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_hiertrain import Profile, Schedule, Share, predict
from lightning_hiertrain.profiles import LinkProfile

MICROBATCHES = (4, 8)
SHARE_STEPS = 32
"""Shares are searched in steps of a mini-batch's 32nd part."""


def with_links(profile: Profile, links: Sequence[dict[str, Any]]) -> Profile:
    """Returns a profile with links as they were measured at another rate."""
    return replace(profile, links=tuple(LinkProfile(**link) for link in links))


def best_splits(
    profile: Profile, layer_names: Sequence[str], batch_size: int, count: int
) -> list[dict[str, Any]]:
    """Returns the pipelines that should be fastest, without a name and schedule.

    Args:
        profile: Layers and links.
        layer_names: All modules of the chain; the profile may have joined some.
        batch_size: Samples in a mini-batch.
        count: How many splits for each number of micro-batches.
    """
    places = [layer_names.index(layer.name.rpartition(".")[2]) + 1 for layer in profile.layers]
    found = []
    for parts in MICROBATCHES:
        rated = [
            (_pipeline_seconds(profile, cuts, batch_size, parts), cuts)
            for cuts in itertools.combinations(range(1, len(places)), 2)
        ]
        for seconds, cuts in sorted(rated)[:count]:
            found.append(
                {
                    "cuts": [places[cut - 1] for cut in cuts],
                    "num_microbatches": parts,
                    "predicted_seconds": seconds,
                }
            )
    return found


def _pipeline_seconds(
    profile: Profile, cuts: tuple[int, int], batch_size: int, parts: int
) -> float:
    """Plays GPipe: all micro-batches forward, then all backward, each link carrying one at once."""
    rows = batch_size // parts
    tiers = list(profile.tiers)
    ends = [0, *cuts, len(profile.layers)]
    stages = [profile.layers[a:b] for a, b in itertools.pairwise(ends)]
    forward = [
        sum(layer.forward_seconds[tier](rows) for layer in stage)
        for tier, stage in zip(tiers, stages, strict=True)
    ]
    backward = [
        sum(layer.backward_seconds[tier](rows) for layer in stage)
        for tier, stage in zip(tiers, stages, strict=True)
    ]
    transfers = [
        link.latency_seconds
        + rows * profile.layers[cut - 1].output_bytes_per_sample / link.bandwidth_bytes_per_second
        for cut, link in zip(cuts, profile.links, strict=True)
    ]
    done = _through([0.0] * parts, forward, transfers)
    return _through([done[-1]] * parts, backward[::-1], transfers[::-1])[-1]


def _through(
    ready: list[float], stages: Sequence[float], transfers: Sequence[float]
) -> list[float]:
    """Returns when each micro-batch has passed all stages."""
    for stage, seconds in enumerate(stages):
        free, done = 0.0, []
        for time in ready:
            free = max(free, time) + seconds
            done.append(free)
        if stage == len(transfers):
            return done
        free, ready = 0.0, []
        for time in done:
            free = max(free, time) + transfers[stage]
            ready.append(free)
    return ready


def best_shares(profile: Profile, batch_size: int, *, with_device: bool = True) -> list[int]:
    """Returns the rows by tier with which the slowest of computing and feeding takes least.

    What all-reduce takes is the same for all shares.
    """
    tiers = list(profile.tiers)
    first, second = (link.bandwidth_bytes_per_second for link in profile.links)
    size = profile.input_bytes_per_sample + profile.target_bytes_per_sample

    def seconds(shares: tuple[int, int, int]) -> float:
        computing = [
            sum(
                layer.forward_seconds[tier](rows) + layer.backward_seconds[tier](rows)
                for layer in profile.layers
            )
            for tier, rows in zip(tiers, shares, strict=True)
        ]
        feeding = [size * (shares[1] + shares[2]) / first, size * shares[2] / second]
        return max(*computing, *feeding)

    step = max(1, batch_size // SHARE_STEPS)
    device = range(0, batch_size + 1, step) if with_device else (0,)
    options = [
        (own, edge, batch_size - own - edge)
        for own in device
        for edge in range(0, batch_size - own + 1, step)
    ]
    return list(min(options, key=seconds))


def varied_schedules(
    profile: Profile, batch_size: int, count: int, *, overlap: bool, slowest: float
) -> list[Schedule]:
    """Returns schedules that differ in owner, cuts and shares, to hold predictions against.

    Args:
        profile: Layers and links.
        batch_size: Samples in a mini-batch.
        count: How many; the owners take turns.
        overlap: How they are to be predicted.
        slowest: Those that would take longer are left out.
    """
    chance = random.Random(0)
    tiers, depth = list(profile.tiers), len(profile.layers)
    found: list[Schedule] = []
    for attempt in range(200 * count):
        owner = tiers[attempt % len(tiers)]
        weights = [chance.choice((0, 1, 2, 4, 8)) for _ in tiers]
        total = sum(weights) or 1
        samples = {t: batch_size * w // total for t, w in zip(tiers, weights, strict=True)}
        samples[owner] += batch_size - sum(samples.values())
        shares = {
            tier: Share(
                num_layers=depth
                if tier == owner
                else chance.randint(1, depth)
                if samples[tier]
                else 0,
                num_samples=samples[tier],
            )
            for tier in tiers
        }
        schedule = Schedule(owner=owner, shares=shares, policy="varied")
        seconds = predict(profile, schedule, overlap=overlap).step_seconds
        if seconds <= slowest and len(schedule.prefix_workers) > 0:
            found.append(replace(schedule, predicted_seconds=seconds))
        if len(found) == count:
            break
    return found
