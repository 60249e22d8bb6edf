"""The terms of the cost model for a batch of boxes, equation by equation.

Shapes: n boxes, p paths or prefix workers, t tiers (whose share a slope is for), j layers, l or e
    links.
"""

from __future__ import annotations

import numpy as np

from lightning_hiertrain.planning.boxes import Boxes
from lightning_hiertrain.planning.instance import Floats, Instance, Ints


class Tables:
    """Look-up tables of one instance and objective.

    Args:
        instance: The problem's numbers.
        codec_sets: Sets of codecs, as tuples of indices; a box names one for each prefix worker.
        objective: `"plain"`, `"overlap"`, `"busiest"` (busy times alone) or `"memory"` (the
            greatest excess over a tier's memory, as a fraction of it).
        prefetch: Whether the next mini-batch's samples take up memory too.
    """

    def __init__(
        self,
        instance: Instance,
        codec_sets: list[tuple[int, ...]],
        objective: str,
        *,
        prefetch: bool,
    ) -> None:
        self.instance = i = instance
        self.objective, self.prefetch = objective, prefetch
        size = i.num_layers + 1
        self.least_output = np.zeros((size, size))
        for low in range(size):
            self.least_output[low, low:] = np.minimum.accumulate(i.output[low:])
        self.output_sum = np.concatenate([[0.0], np.cumsum(i.output[1:])])

        def least(values: Floats) -> Floats:
            return np.stack([values[list(chosen)].min(axis=0) for chosen in codec_sets])

        ratio = i.ratio[:, None, None]
        # Tables by (codec set, prefix worker, owner): seconds a byte.
        up, down = ratio / i.rate[None], ratio / i.rate.T[None]
        self.encode_up, self.decode_up = least(_pairs(i.encode, 0)), least(_pairs(i.decode, 1))
        self.encode_down, self.decode_down = least(_pairs(i.encode, 1)), least(_pairs(i.decode, 0))
        self.up, self.down, self.ratio = least(up), least(down), least(i.ratio)
        self.way_up = least(_pairs(i.encode, 0) + up + _pairs(i.decode, 1))
        self.way_down = least(_pairs(i.encode, 1) + down + _pairs(i.decode, 0))
        self.packing_worker = least(_pairs(i.encode + i.decode, 0))
        self.packing_owner = least(_pairs(i.encode + i.decode, 1))
        self.has_limit = np.isfinite(i.memory)


def _pairs(by_tier: Floats, axis: int) -> Floats:
    """Spreads a table (codec, tier) to (codec, worker, owner), the tier being one of the two."""
    size = by_tier.shape[1]
    spread = by_tier[:, :, None] if axis == 0 else by_tier[:, None, :]
    return np.broadcast_to(spread, (len(by_tier), size, size))


class Terms:
    """The terms of one batch of boxes."""

    def __init__(self, table: Tables, boxes: Boxes) -> None:
        self.table, self.boxes, self.i = table, boxes, table.instance
        count, size = len(boxes), self.i.num_tiers
        self.rows, self.tiers = np.arange(count), np.arange(size)
        self.owner, self.active = boxes.owner, boxes.active
        self.is_owner = self.owner[:, None] == self.tiers
        self.least = table.least_output[boxes.low, boxes.high] * self.active
        first = np.where(self.active, boxes.high, self.i.num_layers).min(axis=1)
        own = np.where(boxes.empty_owner & self.active.any(axis=1), first, 0)
        # Where each tier's samples are with the owner: its cut; a path of an idle tier repeats the
        # owner's own.
        self.start = np.where(self.active, boxes.high, own[:, None])
        self.on_owner = np.where(self.active, boxes.high, 0)
        self.identity = np.eye(size)
        self.chunks = boxes.chunks[:, None].astype(float)

    def pick(self, by_codec: Floats) -> Floats:
        """Looks up a table (codec set, worker, owner) for each worker of each box."""
        return np.asarray(by_codec[self.boxes.codec, self.tiers, self.owner[:, None]])

    def on_worker(self, values: Floats) -> Floats:
        """Slopes (n, p, t) that are `values` (n, p) for the path's own worker."""
        return np.asarray((values * self.active)[:, :, None] * self.identity)

    def rest(self, what: str) -> tuple[Floats, Floats]:
        """The owner's time from each path's cut to the end: constants (n, p), slopes (n, p, t)."""
        fixed, slope = getattr(self.i, f"{what}_fixed"), getattr(self.i, f"{what}_slope")
        owner = self.owner[:, None]
        constant = fixed[owner, -1] - fixed[owner, self.start]
        later = np.maximum(self.start[:, :, None], self.on_owner[:, None, :])
        return constant, slope[owner, -1][:, :, None] - slope[owner[:, :, None], later]

    def constant_seconds(self) -> Floats:
        """The loss and the optimizer's step."""
        return np.asarray(self.i.loss[self.owner] + self.i.optimizer[self.owner])

    def owner_overhead(self) -> Floats:
        """What the owner's own path begins with, (n, p); a prefix worker's has its own."""
        return np.asarray(~self.active * self.i.lead[self.owner][:, None])

    def forward(self) -> tuple[Floats, Floats]:
        """Equations (2) to (4), constants of (7); a path for each link that inputs wait for."""
        i, low = self.i, self.boxes.low
        constant, slope = self.rest("forward")
        constant = constant + self.active * (
            i.forward_fixed[self.tiers, low] + i.latency[self.tiers, self.owner[:, None]]
        )
        constant = constant + self.active * i.lead + self.owner_overhead()
        constant = constant + (self.constant_seconds() + self.update())[:, None]
        slope = slope + self.on_worker(
            i.forward_slope[self.tiers, low] + self.pick(self.table.way_up) * self.least
        )
        waits, wait_slopes = self.inputs()
        constants, slopes = constant[:, :, None] + waits, slope[:, :, None, :] + wait_slopes
        count, size = constant.shape
        return constants.reshape(count, -1), slopes.reshape(count, -1, size)

    def inputs(self) -> tuple[Floats, Floats]:
        """Equation (2): constants (n, p, l), slopes (n, p, l, t); l links from the data tier."""
        i, d = self.i, self.i.data
        hops = [np.flatnonzero(i.crosses[d, t]) for t in self.tiers]
        longest = max(1, *(len(hop) for hop in hops))
        count, size = self.is_owner.shape
        constants, slopes = np.zeros((count, size, longest)), np.zeros((count, size, longest, size))
        targets = i.batch_size * i.target
        sends = self.active | (self.is_owner & (~self.boxes.empty_owner[:, None] | (targets > 0)))
        for t in self.tiers:
            for index in range(longest if len(hops[t]) else 0):
                link = hops[t][min(index, len(hops[t]) - 1)]
                sent = sends[:, t]
                crossing = i.crosses[d, :, link]
                wait = i.latency[d, t] + crossing[self.owner] * targets / i.link_rate[link]
                constants[:, t, index] = np.where(sent, wait, 0.0)
                slopes[:, t, index] = sent[:, None] * crossing * i.output[0] / i.link_rate[link]
                slopes[:, t, index, t] += sent * i.packing
        slopes[:, d] = self.packed()[:, None, :]
        idle = ~(self.active | self.is_owner)  # repeats the owner's own path
        box, tier = np.nonzero(idle)
        constants[box, tier] = constants[box, self.owner[box]]
        slopes[box, tier] = slopes[box, self.owner[box]]
        return constants, slopes

    def packed(self) -> Floats:
        """What the data tier packs before its own first layer: slopes (n, t)."""
        takes_part = self.active | self.is_owner
        return np.asarray(self.i.packing * (takes_part & (self.tiers != self.i.data)))

    def delays(self) -> tuple[Floats, Floats]:
        """What the next inputs take from the tier on which a path begins: (n, p), (n, p, t)."""
        i = self.i
        begins = np.where(self.active, self.tiers, self.owner[:, None])
        by_tier = i.handling @ i.crosses[i.data].T  # (the tier that it takes from, the target)
        constant = by_tier[begins, self.owner[:, None]] * i.batch_size * i.target
        takes_part = self.active | self.is_owner
        slope = by_tier[begins] * i.output[0] * takes_part[:, None, :]
        slope = slope + (begins == i.data)[:, :, None] * self.packed()[:, None, :]
        return np.asarray(constant), np.asarray(slope)

    def update(self) -> Floats:
        """Equation (7) without the optimizer: parameter gradients to the owner and weights back."""
        sizes = self.i.parameters[self.boxes.low] * self.active
        total = np.zeros(len(self.boxes))
        for crosses, latency in self.directions():
            seconds = np.einsum("nk,nke->ne", sizes, crosses) / self.i.link_rate
            waits = latency + (seconds[:, None, :] * crosses).max(axis=2, initial=0.0)
            total += np.where(sizes > 0, waits, 0.0).max(axis=1)
        return total

    def directions(self) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
        """For each box and worker the links to the owner and their latency; and the way back."""
        owner = self.owner[:, None]
        up = self.i.crosses[self.tiers, owner].astype(float)
        down = self.i.crosses[owner, self.tiers].astype(float)
        return (up, self.i.latency[self.tiers, owner]), (down, self.i.latency[owner, self.tiers])

    def backward(self) -> tuple[Floats, Floats]:
        """Equations (5) and (6)."""
        i, low = self.i, self.boxes.low
        constant, slope = self.rest("backward")
        constant = constant + self.active * (
            i.backward_fixed[self.tiers, low] + i.latency[self.owner[:, None], self.tiers]
        )
        slope = slope + self.on_worker(
            i.backward_slope[self.tiers, low] + self.pick(self.table.way_down) * self.least
        )
        return constant, slope

    def layers(self, num_terms: int) -> Ints:
        """Layers (n, p, j), from 1 to the low end, at which the overlapped step may wait."""
        low = np.maximum(self.boxes.low, 1)[:, :, None]
        if num_terms >= self.i.num_layers:
            return np.minimum(np.arange(1, self.i.num_layers + 1), low)
        return np.asarray(1 + np.round((low - 1) * np.linspace(0.0, 1.0, num_terms)).astype(int))

    def layerwise(self, layers: Ints, *, upward: bool) -> Floats:
        """Equation (9): the parameters of layers 1..j, for each of `layers` (n, p, j)."""
        crosses, latency = self.directions()[0 if upward else 1]
        longest = np.minimum(
            layers[:, :, :, None], self.boxes.low[:, None, None, :]
        )  # (n, p, j, k)
        sizes = self.i.parameters[longest] * self.active[:, None, None, :]
        seconds = np.einsum("npjk,nke->npje", sizes, crosses) / self.i.link_rate
        waits = latency[:, :, None] + (seconds * crosses[:, :, None, :]).max(axis=3, initial=0.0)
        return np.where((self.i.parameters[layers] > 0) & self.active[:, :, None], waits, 0.0)

    def chunked_forward(self, num_terms: int) -> tuple[Floats, Floats]:
        """Equations (9) to (11)."""
        i, table, low, c = self.i, self.table, self.boxes.low, self.chunks
        layers = self.layers(num_terms)
        tiers = self.tiers[:, None]
        fixed, slope = i.forward_fixed, i.forward_slope
        encode, sending = self.pick(table.encode_up) * self.least, self.pick(table.up) * self.least
        first_fixed = fixed[self.tiers, low][:, :, None] - fixed[tiers, layers - 1]
        first_slope = (
            slope[self.tiers, low][:, :, None] - slope[tiers, layers - 1] + encode[:, :, None]
        )
        later_fixed = (c - 1) * fixed[self.tiers, low]
        later_slope = (c - 1) / c * (slope[self.tiers, low] + encode)
        decode = self.pick(table.decode_up) * self.least / c
        computing = (
            first_fixed + later_fixed[:, :, None],
            first_slope / c[:, :, None] + (later_slope + sending / c + decode)[:, :, None],
        )
        travelling = (first_fixed, first_slope / c[:, :, None] + (sending + decode)[:, :, None])
        wait = self.layerwise(layers, upward=False)
        wait[:, :, 0] = np.maximum(wait[:, :, 0], i.lead)  # j = 1
        wait = wait + i.latency[self.tiers, self.owner[:, None]][:, :, None]
        constant, rest = self.rest("forward")
        constant = constant + self.constant_seconds()[:, None] + self.owner_overhead()
        delay, delay_slope = self.delays()
        constant, rest = constant + delay, rest + delay_slope
        return self.combine(constant, rest, wait, (computing, travelling))

    def chunked_backward(self, num_terms: int) -> tuple[Floats, Floats]:
        """Equations (9) and (12)."""
        i, table, low, c = self.i, self.table, self.boxes.low, self.chunks
        layers = self.layers(num_terms)
        tiers = self.tiers[:, None]
        fixed, slope = i.backward_fixed, i.backward_slope
        encode, sending = (
            self.pick(table.encode_down) * self.least / c,
            self.pick(table.down) * self.least,
        )
        whole_fixed = c * fixed[self.tiers, low]
        whole_slope = slope[self.tiers, low] + self.pick(table.decode_down) * self.least
        below_fixed, below_slope = (
            fixed[tiers, layers - 1],
            slope[tiers, layers - 1] / c[:, :, None],
        )
        computing = (
            whole_fixed[:, :, None] - below_fixed,
            (encode + sending / c + whole_slope)[:, :, None] - below_slope,
        )
        travelling = (
            (whole_fixed / c)[:, :, None] - below_fixed,
            (encode + sending + whole_slope / c)[:, :, None] - below_slope,
        )
        wait = (
            self.layerwise(layers, upward=True)
            + i.latency[self.owner[:, None], self.tiers][:, :, None]
        )
        return self.combine(*self.rest("backward"), wait, (computing, travelling))

    def combine(
        self, constant: Floats, rest: Floats, wait: Floats, ways: tuple[tuple[Floats, Floats], ...]
    ) -> tuple[Floats, Floats]:
        """Joins workers' terms (n, p, j) with the owner's rest; other paths have the rest alone."""
        count, size = constant.shape
        constants, slopes = [], []
        for fixed, slope in ways:
            constants.append(constant[:, :, None] + self.active[:, :, None] * (fixed + wait))
            own = (slope * self.active[:, :, None])[:, :, :, None] * self.identity[:, None, :]
            slopes.append(rest[:, :, None, :] + own)
        return (
            np.concatenate([part.reshape(count, -1) for part in constants], axis=1),
            np.concatenate([part.reshape(count, -1, size) for part in slopes], axis=1),
        )

    def busy(self) -> tuple[Floats, Floats]:
        """Equation (13): tiers first, then link directions."""
        i, low, table = self.i, self.boxes.low, self.table
        owner = self.owner
        rest_fixed, rest_slope = (
            np.add(*pair) for pair in zip(self.rest("forward"), self.rest("backward"), strict=True)
        )
        worker_fixed = self.active * (
            self.chunks * (i.forward_fixed + i.backward_fixed)[self.tiers, low] + i.overhead
        )
        worker_slope = (i.forward_slope + i.backward_slope)[self.tiers, low]
        worker_slope = worker_slope + self.pick(table.packing_worker) * self.least
        own_fixed = rest_fixed[self.rows, owner] + self.constant_seconds() + i.overhead[owner]
        own_slope = (
            rest_slope[self.rows, owner] + self.pick(table.packing_owner) * self.least * self.active
        )
        constant = np.where(self.is_owner, own_fixed[:, None], worker_fixed)
        slope = np.where(
            self.is_owner[:, :, None], own_slope[:, None, :], self.on_worker(worker_slope)
        )
        travelling = self.active | self.is_owner
        constant[:, i.data] += np.where(travelling[:, i.data], 0.0, i.dealing)
        slope[:, i.data] += self.packed()
        (up, _), (down, _) = self.directions()
        both = up + down
        sizes = i.parameters[low] * self.active
        link_constant = np.einsum("nk,nke->ne", sizes, both)
        link_constant = link_constant + i.crosses[i.data, owner] * i.batch_size * i.target
        link_slope = (self.least * table.ratio[self.boxes.codec])[:, None, :] * both.transpose(
            0, 2, 1
        )
        link_slope = link_slope + travelling[:, None, :] * i.crosses[i.data].T * i.output[0]
        constant = constant + link_constant @ i.handling.T
        slope = slope + np.einsum("net,xe->nxt", link_slope, i.handling)
        return (
            np.concatenate([constant, link_constant / i.link_rate], axis=1),
            np.concatenate([slope, link_slope / i.link_rate[:, None]], axis=1),
        )

    def memory(self) -> tuple[Floats, Floats]:
        """Equation (15) over the limit, for tiers with one: at most 0 where memory suffices."""
        i, table, boxes = self.i, self.table, self.boxes
        inputs = i.output[0] * (2.0 if table.prefetch else 1.0)
        total = i.parameters[-1]
        worker_constant = (total + i.parameters[boxes.low]) * self.active
        worker_slope = self.on_worker(inputs + table.output_sum[boxes.low])
        own_constant = 2.0 * total + i.optimizer_state + i.batch_size * i.target
        above = table.output_sum[-1] - table.output_sum[np.maximum(boxes.high - 1, 0)]
        own_slope = np.where(self.active, above, inputs + table.output_sum[-1])
        constant = np.where(self.is_owner, own_constant, worker_constant)
        slope = np.where(self.is_owner[:, :, None], own_slope[:, None, :], worker_slope)
        limited = table.has_limit
        limit = i.memory[limited]
        return constant[:, limited] / limit - 1.0, slope[:, limited] / limit[:, None]
