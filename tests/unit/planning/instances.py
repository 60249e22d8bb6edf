"""Random planning problems, small and large, from a seed."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from lightning_hiertrain import profiles as p


def random_profile(
    seed: int,
    *,
    num_layers: int,
    names: tuple[str, ...] = ("device", "edge", "cloud"),
    mesh: float = 0.3,
    memory: bool = False,
    data: int = 0,
) -> p.Profile:
    """Tiers of random speed on a chain of links; `mesh` is the chance of each further link."""
    r = np.random.default_rng(seed)
    speed = {name: 10 ** r.uniform(-0.5, 1.2) for name in names}
    fixed_scale = 10 ** r.uniform(-5, -2.5)
    layers, size = [], r.uniform(5e3, 1e5)
    for index in range(num_layers):
        size = max(16.0, size * r.uniform(0.3, 1.5))
        work = 0.0 if r.random() < 0.15 else 10 ** r.uniform(-5, -3)
        fixed = 0.0 if r.random() < 0.3 else fixed_scale * r.random()

        def times(
            factor: float, work: float = work, fixed: float = fixed
        ) -> dict[str, p.AffineTime]:
            return {
                name: p.AffineTime(
                    fixed=float(fixed * r.uniform(0.3, 2)),
                    per_sample=float(factor * work / speed[name] * r.uniform(0.8, 1.25)),
                )
                for name in names
            }

        layers.append(
            p.LayerProfile(
                name=f"layer{index}",
                output_bytes_per_sample=int(size),
                parameter_bytes=0 if r.random() < 0.3 else int(10 ** r.uniform(2, 5.5)),
                forward_seconds=times(1.0),
                backward_seconds=times(2.0),
            )
        )
    order = [*pairwise(names)]
    order += [
        (names[a], names[b])
        for a in range(len(names))
        for b in range(a + 2, len(names))
        if r.random() < mesh
    ]
    total = sum(layer.parameter_bytes for layer in layers)
    activations = sum(layer.output_bytes_per_sample for layer in layers)
    profile = p.Profile(
        model="random",
        input_bytes_per_sample=int(10 ** r.uniform(2, 4.5)),
        target_bytes_per_sample=int(r.choice([0, 8, 4000])),
        data_tier=names[data],
        tiers={
            name: p.TierProfile(
                optimizer_seconds=float(r.uniform(0, 2e-3)),
                overhead_seconds=float(r.choice([0.0, 1.0]) * r.uniform(0, 5e-3)),
                memory_bytes=int(5 * total + activations * r.uniform(1, 12))
                if memory and r.random() < 0.7
                else None,
                loss_seconds=p.AffineTime(fixed=float(r.uniform(0, 1e-3)), per_sample=1e-6),
            )
            for name in names
        },
        layers=tuple(layers),
        links=tuple(
            p.LinkProfile(
                between=between,
                bandwidth_bytes_per_second=float(10 ** r.uniform(5.5, 8)),
                latency_seconds=float(r.choice([0.0, 1.0]) * r.uniform(0, 0.01)),
            )
            for between in order
        ),
        dealing_seconds=p.AffineTime(
            fixed=float(r.choice([0.0, 1.0]) * r.uniform(0, 5e-3)),
            per_sample=float(r.choice([0.0, 1.0]) * r.uniform(0, 1e-4)),
        ),
    )
    return with_transfer_seconds(
        profile,
        {name: float(r.choice([0.0, 1.0]) * 10 ** r.uniform(-9, -7)) for name in names},
    )


def with_transfer_seconds(profile: p.Profile, seconds: dict[str, float]) -> p.Profile:
    """Returns the profile with what a byte takes from each tier's processor, 0 if not named."""
    tiers = {
        name: replace(tier, transfer_seconds_per_byte=seconds.get(name, 0.0))
        for name, tier in profile.tiers.items()
    }
    return replace(profile, tiers=tiers)
