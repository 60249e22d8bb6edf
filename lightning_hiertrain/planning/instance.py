"""A profile as arrays: prefix sums over layers, and what every route between two tiers carries.

Legend, as in docs/cost_model.md. Tiers are numbered by rank, t = 0..T-1; cuts by the layer before
them, m = 0..N.

    forward_fixed[t, m], forward_slope[t, m]   sums over layers 1..m of the parts of L^f_t
    output[m]                  O_m, bytes a sample at cut m; output[0] = Q
    parameters[m]              P_1 + .. + P_m
    rate[x, y], latency[x, y]  W_xy and a_xy on the route from x to y
    crosses[x, y, e]           whether that route crosses the directed link e
    handling[t, e]             kappa_t if the directed link e begins or ends on tier t, else 0
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from lightning_hiertrain.planning.codecs import codec_profile
from lightning_hiertrain.profiles import AffineTime, Profile
from lightning_hiertrain.topology import Topology

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
_LONGEST_SECONDS = 1e9


@dataclass(frozen=True, kw_only=True)
class Instance:
    """All numbers of one planning problem; see the legend above."""

    names: tuple[str, ...]
    batch_size: int
    least_samples: int
    """Samples that a tier takes at least, if any."""
    data: int
    """The data tier."""
    forward_fixed: Floats
    forward_slope: Floats
    backward_fixed: Floats
    backward_slope: Floats
    output: Floats
    parameters: Floats
    target: float
    """Bytes of one sample's target."""
    loss: Floats
    """Seconds for the whole mini-batch, by tier."""
    optimizer: Floats
    overhead: Floats
    """Seconds of a step that are no layer's, by tier."""
    dealing: float
    """Seconds in which the data tier makes a mini-batch ready to be dealt out."""
    packing: float
    """Seconds in which it packs a sample for another tier."""
    optimizer_state: float
    memory: Floats
    """Bytes by tier, infinite where there is no limit."""
    links: tuple[tuple[str, str], ...]
    """The directed links."""
    link_rate: Floats
    rate: Floats
    latency: Floats
    crosses: Bools
    handling: Floats
    codecs: tuple[str, ...]
    ratio: Floats
    encode: Floats
    """Seconds per byte by codec and tier."""
    decode: Floats

    @property
    def num_tiers(self) -> int:
        return len(self.names)

    @property
    def num_layers(self) -> int:
        return len(self.output) - 1

    @property
    def lead(self) -> Floats:
        """What a step begins with on each tier, h'_t: all wait until the data tier has dealt."""
        lead = np.maximum(self.overhead, self.dealing)
        lead[self.data] = self.overhead[self.data]
        return lead


def make_instance(
    profile: Profile,
    *,
    batch_size: int,
    topology: Topology | None = None,
    codecs: tuple[str, ...] = ("none",),
    least_samples: int = 1,
) -> Instance:
    """Turns a profile into arrays.

    Args:
        profile: What was measured.
        batch_size: Samples in the mini-batch.
        topology: Which links there are; the profile's by default. Each of its links needs a
            measurement.
        codecs: Names of the codecs that may be used.
        least_samples: Samples that a tier takes at least, if any.

    Raises:
        ValueError: If the topology does not fit the profile, or a codec is unknown.
    """
    names = tuple(profile.tiers)
    topology = _checked(profile, topology)
    links, link_rate, rate, latency, crosses = _routes(profile, topology, names)
    figures = [codec_profile(profile, name) for name in codecs]

    def sums(values: list[float]) -> Floats:
        return np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=float))])

    def part(what: str, attribute: str) -> Floats:
        times: list[list[AffineTime]] = [
            [getattr(layer, what)[t] for layer in profile.layers] for t in names
        ]
        return np.stack([sums([getattr(time, attribute) for time in row]) for row in times])

    parameters = sums([layer.parameter_bytes for layer in profile.layers])
    state = profile.optimizer_state_bytes
    instance = Instance(
        names=names,
        batch_size=batch_size,
        least_samples=least_samples,
        data=names.index(profile.data_tier),
        forward_fixed=part("forward_seconds", "fixed"),
        forward_slope=part("forward_seconds", "per_sample"),
        backward_fixed=part("backward_seconds", "fixed"),
        backward_slope=part("backward_seconds", "per_sample"),
        output=np.array(
            [
                profile.input_bytes_per_sample,
                *(layer.output_bytes_per_sample for layer in profile.layers),
            ],
            float,
        ),
        parameters=parameters,
        target=float(profile.target_bytes_per_sample),
        loss=np.array([profile.tiers[t].loss_seconds(batch_size) for t in names]),
        optimizer=np.array([profile.tiers[t].optimizer_seconds for t in names], float),
        overhead=np.array([profile.tiers[t].overhead_seconds for t in names], float),
        dealing=float(profile.dealing_seconds.fixed),
        packing=float(profile.dealing_seconds.per_sample),
        optimizer_state=float(2 * parameters[-1] if state is None else state),
        memory=np.array([_limit(profile.tiers[t].memory_bytes) for t in names]),
        links=links,
        link_rate=link_rate,
        rate=rate,
        latency=latency,
        crosses=crosses,
        handling=np.array(
            [
                [profile.tiers[t].transfer_seconds_per_byte if t in way else 0.0 for way in links]
                for t in names
            ]
        ).reshape(len(names), len(links)),
        codecs=codecs,
        ratio=np.array([codec.bytes_ratio for codec in figures]),
        encode=np.array(
            [[codec.encode_seconds_per_byte.get(t, 0.0) for t in names] for codec in figures]
        ),
        decode=np.array(
            [[codec.decode_seconds_per_byte.get(t, 0.0) for t in names] for codec in figures]
        ),
    )
    _check_magnitudes(instance)
    return instance


def _check_magnitudes(instance: Instance) -> None:
    """Refuses numbers that are possible alone but not together."""
    i = instance
    with np.errstate(over="ignore"):
        times = (i.forward_fixed + i.backward_fixed)[:, -1] + i.loss + i.optimizer + i.overhead
        times = times + i.dealing + i.batch_size * i.packing
        times = times + i.batch_size * (i.forward_slope + i.backward_slope)[:, -1]
        load = i.batch_size * (i.output.max() + i.target) + 2 * i.parameters[-1]
        carrying = load / i.link_rate if len(i.link_rate) else np.zeros(1)
        packing = load * (i.encode + i.decode)
        handling = load * i.handling.sum(axis=1)
    for what, values in (
        ("computing", times),
        ("carrying", carrying),
        ("packing", packing),
        ("handling", handling),
    ):
        if not (values < _LONGEST_SECONDS).all():
            raise ValueError(
                f"{what} one mini-batch would take {values.max():.3g} s by this profile, and the "
                f"planner counts up to {_LONGEST_SECONDS:.0e} s; profile it again"
            )


def _limit(memory_bytes: int | None) -> float:
    return np.inf if memory_bytes is None else float(memory_bytes)


def _checked(profile: Profile, topology: Topology | None) -> Topology:
    if topology is None:
        return profile.topology
    if topology.names != tuple(profile.tiers):
        raise ValueError(
            f"the topology has the tiers {list(topology.names)} and the profile "
            f"{list(profile.tiers)}; they must be the same, in the same order"
        )
    for link in topology.links:
        if profile.link(*link.between) is None:
            raise ValueError(
                f"the topology has the link {link.name!r}, which the profile has not; its links "
                f"are {['-'.join(link.between) for link in profile.links]}; profile the links again"
            )
    return topology


def _routes(
    profile: Profile, topology: Topology, names: tuple[str, ...]
) -> tuple[tuple[tuple[str, str], ...], Floats, Floats, Floats, Bools]:
    links = tuple(way for link in topology.links for way in (link.between, link.between[::-1]))
    measured = [profile.link(*way) for way in links]
    link_rate = np.array(
        [link.bandwidth_bytes_per_second for link in measured if link is not None], float
    )
    link_latency = np.array([link.latency_seconds for link in measured if link is not None], float)
    size = len(names)
    rate, latency = np.full((size, size), np.inf), np.zeros((size, size))
    crosses = np.zeros((size, size, len(links)), bool)
    for x, source in enumerate(names):
        for y, target in enumerate(names):
            hops = (
                [links.index(hop) for hop in pairwise(topology.route(source, target))]
                if x != y
                else []
            )
            if hops:
                crosses[x, y, hops] = True
                rate[x, y] = link_rate[hops].min()
                latency[x, y] = link_latency[hops].sum()
    return links, link_rate, rate, latency, crosses
