"""What one schedule costs: the step's time and its phases, as docs/cost_model.md defines them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from lightning_hiertrain.planning.instance import Floats, Instance, make_instance
from lightning_hiertrain.profiles import Profile
from lightning_hiertrain.schedule import Schedule
from lightning_hiertrain.topology import Topology


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted time of one training step."""

    step_seconds: float
    input_seconds: float
    """Until the last tier has its samples; with overlap they travel during the step before and this
    is 0."""
    forward_seconds: float
    """Until the owner has the outputs of the whole mini-batch, inputs and overhead included."""
    loss_seconds: float
    backward_seconds: float
    """Until the owner and every prefix worker has its gradients; with overlap until the owner has
    them all."""
    update_seconds: float
    """Gradients of shared layers to the owner, the optimizer's step, weights back; with overlap the
    optimizer alone."""
    optimizer_seconds: float
    """The part of `update_seconds` that is the optimizer's."""
    overhead_seconds: float = 0.0
    """What passes before the owner's first layer besides transfers: the training loop, messages,
    and on the data tier the making of the mini-batch."""
    busy_seconds: Mapping[str, float] = field(default_factory=dict)
    """How long each tier computes and each link carries, by tier (`edge`) and direction
    (`edge>cloud`)."""

    @property
    def busiest(self) -> str:
        """The tier or link direction with the most to do."""
        return max(self.busy_seconds, key=lambda name: self.busy_seconds[name])


def predict(
    profile: Profile, schedule: Schedule, *, overlap: bool = True, topology: Topology | None = None
) -> Prediction:
    """Predicts how long one training step takes.

    Args:
        profile: What was measured.
        schedule: The plan, from `plan` or made by hand.
        overlap: Whether transfers overlap with computation, docs/cost_model.md section 3; else
            section 2.
        topology: Which links there are; the profile's by default.

    Returns:
        The time of the step and of its phases.

    Raises:
        ValueError: If the schedule does not fit the profile, or the topology does not.
    """
    _check_fit(profile, schedule)
    codecs = tuple(dict.fromkeys(("none", *schedule.codecs.values())))
    instance = make_instance(
        profile, batch_size=schedule.batch_size, topology=topology, codecs=codecs
    )
    step = Step(instance, schedule)
    return step.overlapped() if overlap else step.plain()


def _check_fit(profile: Profile, schedule: Schedule) -> None:
    if schedule.num_layers != len(profile.layers):
        raise ValueError(
            f"the schedule is for {schedule.num_layers} layers, the profile of "
            f"{profile.model!r} has {len(profile.layers)}; plan again with this profile"
        )
    for tier in schedule.shares:
        if tier not in profile.tiers:
            raise ValueError(
                f"the schedule names the tier {tier!r}, the profile's tiers are "
                f"{list(profile.tiers)}; plan again with this profile"
            )


class Step:
    """One schedule on one instance; equation numbers are those of docs/cost_model.md."""

    def __init__(self, instance: Instance, schedule: Schedule) -> None:
        self.instance = i = instance
        self.owner = i.names.index(schedule.owner)
        self.workers = [i.names.index(tier) for tier in schedule.prefix_workers]
        self.cut = {k: schedule.shares[i.names[k]].num_layers for k in self.workers}
        self.samples = {k: schedule.shares[i.names[k]].num_samples for k in self.workers}
        self.own_samples = schedule.shares[schedule.owner].num_samples
        self.codec = {
            k: i.codecs.index(schedule.codecs.get(i.names[k], "none")) for k in self.workers
        }
        self.chunks = {k: min(schedule.num_chunks, self.samples[k]) for k in self.workers}

    def rows_at(self, layer: int) -> int:
        """Samples that the owner carries through a layer: its own and those cut below it (n_k)."""
        return self.own_samples + sum(b for k, b in self.samples.items() if self.cut[k] < layer)

    def owner_seconds(self, cut: int, what: str) -> float:
        """The owner's time for layers cut+1..N, L^f_o or L^b_o at n_k samples."""
        fixed, slope = (
            getattr(self.instance, f"{what}_fixed"),
            getattr(self.instance, f"{what}_slope"),
        )
        total = 0.0
        for layer in range(cut + 1, self.instance.num_layers + 1):
            rows = self.rows_at(layer)
            if rows:
                total += fixed[self.owner, layer] - fixed[self.owner, layer - 1]
                total += rows * (slope[self.owner, layer] - slope[self.owner, layer - 1])
        return float(total)

    def worker_seconds(
        self, k: int, what: str, *, first: int = 1, rows: float | None = None
    ) -> float:
        """Prefix worker k's time for layers first..m_k on `rows` samples, b_k by default."""
        fixed, slope = (
            getattr(self.instance, f"{what}_fixed"),
            getattr(self.instance, f"{what}_slope"),
        )
        rows = self.samples[k] if rows is None else rows
        m = self.cut[k]
        return float(fixed[k, m] - fixed[k, first - 1] + rows * (slope[k, m] - slope[k, first - 1]))

    def activation_bytes(self, k: int) -> float:
        """b_k O_{m_k}."""
        return float(self.samples[k] * self.instance.output[self.cut[k]])

    def input_bytes(self, t: int) -> float:
        """Bytes that the data tier sends to tier t: its samples, and to the owner every target."""
        i = self.instance
        if t == i.data:
            return 0.0
        if t == self.owner:
            return float(self.own_samples * i.output[0] + i.batch_size * i.target)
        return float(self.samples[t] * i.output[0])

    def together(self, k: int, sizes: Mapping[tuple[int, int], float]) -> float:
        """Equation (1): the k-th of several transfers that start together and share links."""
        i = self.instance
        x, y = list(sizes)[k]
        if not sizes[x, y]:
            return 0.0
        load = sum(size * i.crosses[way] for way, size in sizes.items())
        return float(i.latency[x, y] + (load / i.link_rate)[i.crosses[x, y]].max())

    def inputs(self) -> dict[int, float]:
        """Equation (2): from when the mini-batch is dealt out until each tier has its samples."""
        sizes = {(self.instance.data, t): self.input_bytes(t) for t in (self.owner, *self.workers)}
        return {
            t: self.packing_seconds(t) + (self.together(index, sizes) if t != source else 0.0)
            for index, (source, t) in enumerate(sizes)
        }

    def packing_seconds(self, t: int) -> float:
        """How long the data tier packs samples before tier t has its own: those, or all others'."""
        i = self.instance
        own = self.own_samples if t == self.owner else self.samples.get(t, 0)
        return float((i.batch_size - own if t == i.data else own) * i.packing)

    def input_load(self) -> Floats:
        """Bytes of inputs and targets by link direction."""
        i = self.instance
        load: Floats = np.zeros(len(i.links))
        for t in (self.owner, *self.workers):
            load += self.input_bytes(t) * i.crosses[i.data, t]
        return load

    def delay_seconds(self, t: int) -> float:
        """What the next mini-batch's samples take from tier t's processor, with overlap (pi_t)."""
        packing = self.packing_seconds(t) if t == self.instance.data else 0.0
        return packing + float(self.instance.handling[t] @ self.input_load())

    def plain(self) -> Prediction:
        """The papers' model, equations (2) to (8)."""
        i, o = self.instance, self.owner
        inputs = self.inputs()
        start = self.first_cut()
        forward = inputs[o] + float(i.lead[o]) + self.owner_seconds(start, "forward")  # (4)
        backward = self.owner_seconds(start, "backward")  # (6)
        for k in self.workers:
            size, c = self.activation_bytes(k), self.codec[k]
            sent = size * i.encode[c, k] + i.latency[k, o] + size * i.ratio[c] / i.rate[k, o]
            arrival = inputs[k] + float(i.lead[k]) + self.worker_seconds(k, "forward")
            arrival += sent + size * i.decode[c, o]  # (3)
            forward = max(forward, arrival + self.owner_seconds(self.cut[k], "forward"))  # (4)
            returned = size * i.encode[c, o] + i.latency[o, k] + size * i.ratio[c] / i.rate[o, k]
            done = returned + size * i.decode[c, k] + self.worker_seconds(k, "backward")
            backward = max(backward, self.owner_seconds(self.cut[k], "backward") + done)  # (6)
        gradients = {(k, o): float(i.parameters[self.cut[k]]) for k in self.workers}
        weights = {(o, k): float(i.parameters[self.cut[k]]) for k in self.workers}
        update = float(i.optimizer[o])  # (7)
        for sizes in (gradients, weights):
            update += max((self.together(index, sizes) for index in range(len(sizes))), default=0.0)
        loss = float(i.loss[o])
        return Prediction(
            step_seconds=float(forward + loss + backward + update),  # (8)
            input_seconds=max(inputs.values()),
            forward_seconds=float(forward),
            loss_seconds=loss,
            backward_seconds=float(backward),
            update_seconds=update,
            optimizer_seconds=float(i.optimizer[o]),
            overhead_seconds=float(i.lead[o]),
            busy_seconds=self.busy({k: 1 for k in self.workers}),
        )

    def first_cut(self) -> int:
        """Where the owner begins: at its first layer, or without samples at the shallowest cut."""
        return 0 if self.own_samples or not self.workers else min(self.cut.values())

    def layerwise(self, k: int, layer: int, *, upward: bool) -> float:
        """Equation (9): the parameters of layers 1..layer between prefix worker k and the owner."""
        i, o = self.instance, self.owner
        if not i.parameters[layer]:
            return 0.0
        way = (k, o) if upward else (o, k)
        load = sum(
            i.parameters[min(layer, self.cut[j])] * i.crosses[(j, o) if upward else (o, j)]
            for j in self.workers
        )
        return float(i.latency[way] + (load / i.link_rate)[i.crosses[way]].max())

    def overlapped(self) -> Prediction:
        """The overlapped step, equations (9) to (14)."""
        i, o = self.instance, self.owner
        start = self.first_cut()
        forward = float(i.lead[o]) + self.owner_seconds(start, "forward")
        forward += self.delay_seconds(o)
        backward = self.owner_seconds(start, "backward")
        for k in self.workers:
            rest, rest_back = (
                self.owner_seconds(self.cut[k], "forward"),
                self.owner_seconds(self.cut[k], "backward"),
            )
            forward = max(forward, self.chunked_arrival(k) + rest)  # (11)
            backward = max(backward, rest_back + self.chunked_return(k))  # (12)
        loss, optimizer = float(i.loss[o]), float(i.optimizer[o])
        busy = self.busy(self.chunks)
        path = forward + loss + backward + optimizer
        return Prediction(
            step_seconds=float(max(path, *busy.values())),  # (14)
            input_seconds=0.0,
            forward_seconds=float(forward),
            loss_seconds=loss,
            backward_seconds=float(backward),
            update_seconds=optimizer,
            optimizer_seconds=optimizer,
            overhead_seconds=float(i.lead[o]),
            busy_seconds=busy,
        )

    def chunked_arrival(self, k: int) -> float:
        """Equation (10): when prefix worker k's activations are all on the owner."""
        i, o, c, chunks = self.instance, self.owner, self.codec[k], self.chunks[k]
        rows, size = self.samples[k] / chunks, self.activation_bytes(k)
        encode, sending = size * i.encode[c, k], size * i.ratio[c] / i.rate[k, o]
        later = (chunks - 1) * (self.worker_seconds(k, "forward", rows=rows) + encode / chunks)
        latest = 0.0
        for layer in range(1, self.cut[k] + 1):
            first = self.worker_seconds(k, "forward", first=layer, rows=rows) + encode / chunks
            through = max(first + later + sending / chunks, first + sending)
            ready = self.layerwise(k, layer, upward=False)
            if layer == 1:
                ready = max(ready, float(i.lead[k]))
            latest = max(latest, ready + through)
        latest += self.delay_seconds(k)
        return float(latest + i.latency[k, o] + size * i.decode[c, o] / chunks)

    def chunked_return(self, k: int) -> float:
        """Equation (12): from the gradient at cut m_k to those of layers 1..m_k on the owner."""
        i, o, c, chunks = self.instance, self.owner, self.codec[k], self.chunks[k]
        rows, size = self.samples[k] / chunks, self.activation_bytes(k)
        sending, computing = (
            size * i.ratio[c] / i.rate[o, k],
            chunks * self.worker_seconds(k, "backward", rows=rows) + size * i.decode[c, k],
        )
        done = size * i.encode[c, o] / chunks + i.latency[o, k]
        done += max(sending / chunks + computing, sending + computing / chunks)
        whole = self.worker_seconds(k, "backward", rows=rows)
        latest = 0.0
        for layer in range(1, self.cut[k] + 1):
            below = whole - self.worker_seconds(k, "backward", first=layer, rows=rows)
            latest = max(latest, done - below + self.layerwise(k, layer, upward=True))
        return float(latest)

    def busy(self, chunks: Mapping[int, int]) -> dict[str, float]:
        """Equation (13): what every tier computes and every link direction carries in one step."""
        i, o = self.instance, self.owner
        start = self.first_cut()
        tiers = dict.fromkeys(range(i.num_tiers), 0.0)
        if i.data not in (o, *self.workers):
            tiers[i.data] = i.dealing
        tiers[i.data] += self.packing_seconds(i.data)
        tiers[o] += self.owner_seconds(start, "forward") + self.owner_seconds(start, "backward")
        tiers[o] += float(i.loss[o] + i.optimizer[o] + i.overhead[o])
        load = self.input_load()
        for k in self.workers:
            rows, size, c = self.samples[k] / chunks[k], self.activation_bytes(k), self.codec[k]
            packing = size * (i.encode[c] + i.decode[c])
            computing = self.worker_seconds(k, "forward", rows=rows) + self.worker_seconds(
                k, "backward", rows=rows
            )
            tiers[k] += float(chunks[k] * computing + packing[k] + i.overhead[k])
            tiers[o] += float(packing[o])
            load = load + (size * i.ratio[c] + i.parameters[self.cut[k]]) * (
                1.0 * i.crosses[k, o] + i.crosses[o, k]
            )
        handling = i.handling @ load
        busy = {i.names[t]: float(seconds + handling[t]) for t, seconds in tiers.items()}
        for way, seconds in zip(i.links, load / i.link_rate, strict=True):
            busy[">".join(way)] = float(seconds)
        return busy
