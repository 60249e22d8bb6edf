"""Exhaustive search: every owner, every cut, every share, with a cost function of its own.

Written from the design's recursions, layer by layer and chunk by chunk; shares nothing with
`lightning_hiertrain.planning`. The shares are vectors (one entry for each way to deal out the
mini-batch), so that NumPy tries all of them at once.
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise, product

import numpy as np

from lightning_hiertrain.profiles import Profile


def path(profile: Profile, source: str, target: str) -> list[tuple[str, str]]:
    """The directed links from source to target, fewest first, lower ranks first."""
    joined = {frozenset(link.between) for link in profile.links}
    queue, seen = deque([[source]]), {source}
    while queue:
        way = queue.popleft()
        if way[-1] == target:
            return list(pairwise(way))
        for name in profile.tiers:
            if name not in seen and frozenset((way[-1], name)) in joined:
                seen.add(name)
                queue.append([*way, name])
    raise AssertionError("not connected")


def link(profile: Profile, hop: tuple[str, str]):
    return next(x for x in profile.links if set(x.between) == set(hop))


def affine(time, rows):
    return np.where(rows > 0, time.fixed + time.per_sample * rows, 0.0)


class Costs:
    """The step time of one owner and one cut for each other tier, for vectors of shares."""

    def __init__(self, profile, owner, cuts, codecs=None, chunks=1, figures=None):
        self.p, self.o, self.cuts = profile, owner, cuts
        self.codecs, self.c, self.figures = codecs or {}, chunks, figures or {}
        self.workers = sorted((k for k in cuts if cuts[k]), key=lambda k: cuts[k])

    def rate(self, a, b):
        return min(link(self.p, hop).bandwidth_bytes_per_second for hop in path(self.p, a, b))

    def latency(self, a, b):
        return sum(link(self.p, hop).latency_seconds for hop in path(self.p, a, b))

    def layer(self, tier, index, what, rows):
        return affine(getattr(self.p.layers[index - 1], f"{what}_seconds")[tier], rows)

    def run(self, tier, first, last, what, rows):
        return sum((self.layer(tier, i, what, rows) for i in range(first, last + 1)), 0.0 * rows)

    def output(self, k):
        return self.p.layers[self.cuts[k] - 1].output_bytes_per_sample

    def parameters(self, depth):
        return sum(layer.parameter_bytes for layer in self.p.layers[:depth])

    def figure(self, k, tier):
        """Ratio of bytes, and seconds per byte to pack and to unpack on a tier."""
        codec = self.figures.get(self.codecs.get(k, "none"))
        if codec is None:
            return 1.0, 0.0, 0.0
        return (
            codec.bytes_ratio,
            codec.encode_seconds_per_byte.get(tier, 0.0),
            codec.decode_seconds_per_byte.get(tier, 0.0),
        )

    def together(self, sizes):
        """Transfers (source, target) -> bytes that start at once: seconds of each."""
        seconds = {}
        for way, size in sizes.items():
            slowest = 0.0
            for hop in path(self.p, *way):
                load = sum(s for other, s in sizes.items() if hop in path(self.p, *other))
                slowest = np.maximum(slowest, load / link(self.p, hop).bandwidth_bytes_per_second)
            seconds[way] = np.where(size > 0, self.latency(*way) + slowest, 0.0)
        return seconds

    def inputs(self, b):
        d, q = self.p.data_tier, self.p.input_bytes_per_sample
        total = sum(b.values())
        sizes = {(d, k): b[k] * q for k in self.workers if k != d}
        if self.o != d:
            sizes[d, self.o] = b[self.o] * q + total * self.p.target_bytes_per_sample
        seconds = self.together(sizes)
        for way in seconds:
            seconds[way] = seconds[way] + b[way[1]] * self.p.dealing_seconds.per_sample
        return {
            k: self.packed(b) if k == d else seconds.get((d, k), 0.0 * total)
            for k in (self.o, *self.workers)
        }, sizes

    def packed(self, b):
        """What the data tier does for others before it begins with its own samples."""
        others = sum(b.values()) - b[self.p.data_tier]
        return others * self.p.dealing_seconds.per_sample

    def carried(self, load, tier):
        """What bytes by link direction take from a tier's processor at both ends of each hop."""
        seconds = self.p.tiers[tier].transfer_seconds_per_byte
        return sum(size * seconds for hop, size in load.items() if tier in hop)

    def delay(self, b, tier):
        """What the next inputs take from a tier that is about to begin with a step."""
        load = {}
        for way, size in self.inputs(b)[1].items():
            for hop in path(self.p, *way):
                load[hop] = load.get(hop, 0.0) + size
        return self.carried(load, tier) + self.packed(b) * (tier == self.p.data_tier)

    def stages(self, b):
        """(first layer, last layer, samples) of the owner between arrivals, shallowest first."""
        rows, start, stages = b[self.o], 0, []
        for k in self.workers:
            stages.append((start + 1, self.cuts[k], rows))
            rows, start = rows + b[k], self.cuts[k]
        return [*stages, (start + 1, len(self.p.layers), rows)]

    def constant(self, total):
        tier = self.p.tiers[self.o]
        return affine(tier.loss_seconds, total), tier.optimizer_seconds

    def overhead(self, tier):
        return self.p.tiers[tier].overhead_seconds

    def lead(self, tier):
        own = self.overhead(tier)
        return own if tier == self.p.data_tier else max(own, self.p.dealing_seconds.fixed)

    def plain(self, b):
        o, total = self.o, sum(b.values())
        inputs, _ = self.inputs(b)
        stages = self.stages(b)
        time = inputs[o] + self.lead(o)
        for k, (first, last, rows) in zip(self.workers, stages, strict=False):
            size = b[k] * self.output(k)
            ratio, pack, _ = self.figure(k, k)
            _, _, unpack = self.figure(k, o)
            arrival = inputs[k] + self.lead(k)
            arrival = arrival + self.run(k, 1, self.cuts[k], "forward", b[k]) + size * pack
            arrival = arrival + self.latency(k, o) + size * ratio / self.rate(k, o) + size * unpack
            time = np.maximum(time + self.run(o, first, last, "forward", rows), arrival)
        first, last, rows = stages[-1]
        forward = time + self.run(o, first, last, "forward", rows)
        clock, done = self.run(o, first, last, "backward", rows), []
        for k, (first, last, rows) in zip(self.workers[::-1], stages[-2::-1], strict=True):
            size = b[k] * self.output(k)
            ratio, pack, _ = self.figure(k, o)
            _, _, unpack = self.figure(k, k)
            way = size * pack + self.latency(o, k) + size * ratio / self.rate(o, k) + size * unpack
            done.append(clock + way + self.run(k, 1, self.cuts[k], "backward", b[k]))
            clock = clock + self.run(o, first, last, "backward", rows)
        backward = np.maximum.reduce([clock, *done])
        loss, optimizer = self.constant(total)
        update = optimizer
        for ways in ([(k, o) for k in self.workers], [(o, k) for k in self.workers]):
            sizes = {
                way: np.full_like(total, self.parameters(self.cuts[k]), dtype=float)
                for way, k in zip(ways, self.workers, strict=True)
            }
            if sizes:
                update = update + np.maximum.reduce(list(self.together(sizes).values()))
        return forward + loss + backward + update

    def weights_at(self, k, depth, up):
        """When layers 1..depth have travelled, all workers' in order and sharing links."""
        if not self.parameters(depth):
            return 0.0
        way = (k, self.o) if up else (self.o, k)
        slowest = 0.0
        for hop in path(self.p, *way):
            load = sum(
                self.parameters(min(depth, self.cuts[j]))
                for j in self.workers
                if hop in path(self.p, *((j, self.o) if up else (self.o, j)))
            )
            slowest = max(slowest, load / link(self.p, hop).bandwidth_bytes_per_second)
        return self.latency(*way) + slowest

    def overlapped(self, b):
        """Simulates chunks and layers one by one."""
        o, c = self.o, self.c
        total = sum(b.values())
        stages = self.stages(b)
        time = self.lead(o) + self.delay(b, o)
        for k, (first, last, rows) in zip(self.workers, stages, strict=False):
            part = b[k] / c
            size = part * self.output(k)
            ratio, pack, _ = self.figure(k, k)
            _, _, unpack = self.figure(k, o)
            clock, wire = 0.0 * total + self.lead(k), 0.0 * total
            for chunk in range(c):
                for layer in range(1, self.cuts[k] + 1):
                    if chunk == 0:
                        clock = np.maximum(clock, self.weights_at(k, layer, up=False))
                    clock = clock + self.layer(k, layer, "forward", part)
                clock = clock + size * pack
                wire = np.maximum(wire, clock) + size * ratio / self.rate(k, o)
            arrival = wire + self.latency(k, o) + size * unpack
            arrival = arrival + self.delay(b, k)
            time = np.maximum(time + self.run(o, first, last, "forward", rows), arrival)
        first, last, rows = stages[-1]
        forward = time + self.run(o, first, last, "forward", rows)
        clock, done = self.run(o, first, last, "backward", rows), []
        for k, (first, last, rows) in zip(self.workers[::-1], stages[-2::-1], strict=True):
            part = b[k] / c
            size = part * self.output(k)
            ratio, pack, _ = self.figure(k, o)
            _, _, unpack = self.figure(k, k)
            wire = clock + size * pack + self.latency(o, k)
            working = 0.0 * total
            for _ in range(c):
                wire = wire + size * ratio / self.rate(o, k)
                working = np.maximum(working, wire) + size * unpack
                ready = {}
                for layer in range(self.cuts[k], 0, -1):
                    working = working + self.layer(k, layer, "backward", part)
                    ready[layer] = working
            done += [ready[layer] + self.weights_at(k, layer, up=True) for layer in ready]
            clock = clock + self.run(o, first, last, "backward", rows)
        backward = np.maximum.reduce([clock, *done])
        loss, optimizer = self.constant(total)
        step = forward + loss + backward + optimizer
        return np.maximum(step, self.busiest(b))

    def busiest(self, b):
        o, c, d = self.o, self.c, self.p.data_tier
        total = sum(b.values())
        loss, optimizer = self.constant(total)
        busy = {name: 0.0 * total for name in self.p.tiers}
        for first, last, rows in self.stages(b):
            for what in ("forward", "backward"):
                busy[o] = busy[o] + self.run(o, first, last, what, rows)
        busy[o] = busy[o] + loss + optimizer
        for tier in (o, *self.workers):
            busy[tier] = busy[tier] + self.overhead(tier)
        if d not in (o, *self.workers):
            busy[d] = busy[d] + self.p.dealing_seconds.fixed
        busy[d] = busy[d] + self.packed(b)
        load = {}

        def send(source, target, size):
            for hop in path(self.p, source, target):
                load[hop] = load.get(hop, 0.0) + size

        for way, size in self.inputs(b)[1].items():
            send(*way, size)
        for k in self.workers:
            size = b[k] * self.output(k)
            for what in ("forward", "backward"):
                busy[k] = busy[k] + c * self.run(k, 1, self.cuts[k], what, b[k] / c)
            for tier in (k, o):
                ratio, pack, unpack = self.figure(k, tier)
                busy[tier] = busy[tier] + size * (pack + unpack)
            for way in ((k, o), (o, k)):
                send(*way, size * ratio + self.parameters(self.cuts[k]))
        for tier in busy:
            busy[tier] = busy[tier] + self.carried(load, tier)
        links = [size / link(self.p, hop).bandwidth_bytes_per_second for hop, size in load.items()]
        return np.maximum.reduce([*busy.values(), *links, 0.0 * total])

    def fits(self, b, overlap):
        """Where the shares fit into every tier's memory."""
        o, total = self.o, sum(b.values())
        outputs = [layer.output_bytes_per_sample for layer in self.p.layers]
        inputs = self.p.input_bytes_per_sample * (2 if overlap else 1)
        everything = self.parameters(len(outputs))
        state = self.p.optimizer_state_bytes
        state = 2 * everything if state is None else state
        need = {o: 2 * everything + state + total * self.p.target_bytes_per_sample}
        need[o] = need[o] + b[o] * (inputs + sum(outputs))
        for k in self.workers:
            need[o] = need[o] + b[k] * sum(outputs[self.cuts[k] - 1 :])
            need[k] = everything + self.parameters(self.cuts[k])
            need[k] = need[k] + b[k] * (inputs + sum(outputs[: self.cuts[k]]))
        ok = np.ones(len(total), bool)
        for tier, size in need.items():
            limit = self.p.tiers[tier].memory_bytes
            ok &= size <= (np.inf if limit is None else limit) * (1 + 1e-12)
        return ok


def deal(batch_size: int, least: list[int]) -> np.ndarray:
    """All ways to deal a mini-batch out to tiers that have at least so many samples each."""
    free = batch_size - sum(least)
    if free < 0:
        return np.zeros((len(least), 0))
    ways = [w for w in product(range(free + 1), repeat=len(least) - 1) if sum(w) <= free]
    return np.array([[*w, free - sum(w)] for w in ways], float).T + np.array(least)[:, None]


def exhaustive(
    profile: Profile,
    batch_size: int,
    *,
    mode: str,
    chunk_counts=(1,),
    least_samples=1,
    codecs=("none",),
    figures=None,
    allowed=lambda owner, cuts, empty: True,
):
    """The least step time over all schedules, infinite if none fits into memory."""
    best, names = np.inf, list(profile.tiers)
    depths = range(len(profile.layers) + 1)
    for owner in names:
        others = [name for name in names if name != owner]
        for cut in product(depths, repeat=len(others)):
            cuts = dict(zip(others, cut, strict=True))
            workers = [k for k in others if cuts[k]]
            for chunks in chunk_counts if workers else (1,):
                for empty in (False, True) if workers else (False,):
                    if not allowed(owner, cuts, empty):
                        continue
                    taking = workers if empty else [owner, *workers]
                    shares = deal(
                        batch_size,
                        [max(1 if k == owner else chunks, least_samples) for k in taking],
                    )
                    if not shares.shape[1]:
                        continue
                    b = {k: np.zeros(shares.shape[1]) for k in names}
                    b.update(zip(taking, shares, strict=True))
                    for chosen in product(codecs, repeat=len(workers)):
                        costs = Costs(
                            profile,
                            owner,
                            cuts,
                            dict(zip(workers, chosen, strict=True)),
                            chunks,
                            figures,
                        )
                        seconds = {
                            "plain": costs.plain,
                            "overlap": costs.overlapped,
                            "busiest": costs.busiest,
                        }[mode](b)
                        seconds = np.where(costs.fits(b, mode == "overlap"), seconds, np.inf)
                        best = min(best, float(seconds.min()))
    return best
