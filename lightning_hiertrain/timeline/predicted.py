"""The predicted step laid out in time: when each tier computes and each message travels.

The cost model (docs/cost_model.md) gives sums and maxima; this is the course of events behind them,
so that it can be drawn beside what was measured. Its phases end when the model says.
"""

from __future__ import annotations

from lightning_hiertrain.planning.costs import Prediction, Step, predict
from lightning_hiertrain.planning.instance import make_instance
from lightning_hiertrain.profiles import Profile
from lightning_hiertrain.schedule import Schedule
from lightning_hiertrain.timeline.data import OTHER, PredictedStep, Span, Transfer
from lightning_hiertrain.topology import Topology


def predicted_step(
    profile: Profile, schedule: Schedule, *, overlap: bool, topology: Topology | None = None
) -> PredictedStep:
    """Predicts one step and lays it out.

    Args:
        profile: What was measured.
        schedule: The schedule in force.
        overlap: Whether transfers overlap with computation.
        topology: Which links there are; the profile's by default.

    Raises:
        ValueError: If the schedule does not fit the profile, or the topology does not.
    """
    prediction = predict(profile, schedule, overlap=overlap, topology=topology)
    codecs = tuple(dict.fromkeys(("none", *schedule.codecs.values())))
    instance = make_instance(
        profile, batch_size=schedule.batch_size, topology=topology, codecs=codecs
    )
    layout = _Layout(Step(instance, schedule), prediction, overlap)
    layout.lay_out()
    return PredictedStep(
        seconds=prediction.step_seconds,
        phases={
            "forward": prediction.forward_seconds,
            "loss": prediction.loss_seconds,
            "backward": prediction.backward_seconds,
            "update": prediction.update_seconds,
        },
        busy_seconds=dict(prediction.busy_seconds),
        spans=tuple(layout.spans),
        transfers=tuple(layout.transfers),
    )


class _Layout:
    """One step; equation numbers are those of docs/cost_model.md."""

    def __init__(self, step: Step, prediction: Prediction, overlap: bool) -> None:
        self.step = step
        self.prediction = prediction
        self.overlap = overlap
        self.owner = step.instance.names[step.owner]
        self.chunks = step.chunks if overlap else dict.fromkeys(step.workers, 1)
        self.spans: list[Span] = []
        self.transfers: list[Transfer] = []

    def lay_out(self) -> None:
        """Lays out the phases one after the other."""
        p = self.prediction
        inputs = self._inputs()
        ready = {t: self._overhead(t, start) for t, start in inputs.items()}
        arrivals = {k: self._worker_forward(k, ready[k]) for k in self.step.workers}
        self._owner_forward(ready[self.step.owner], arrivals)
        start = p.forward_seconds + p.loss_seconds
        self._compute(self.owner, p.forward_seconds, start, "loss")
        self._owner_backward(start)
        for k in self.step.workers:
            left = start + self.step.owner_seconds(self.step.cut[k], "backward")
            self._worker_backward(k, left)
        self._update(start + p.backward_seconds)

    def _inputs(self) -> dict[int, float]:
        step, i = self.step, self.step.instance
        inputs = step.inputs()
        for t, seconds in inputs.items():
            size = step.input_bytes(t)
            if size:
                dealt = 0.0 if self.overlap else float(i.lead[t])
                queued = dealt + step.packing_seconds(t)
                end = dealt + seconds
                self._transfer(i.names[i.data], i.names[t], queued, end, size, "samples")
        packed = step.packing_seconds(i.data)
        ready = float(i.lead[i.data] if i.data in inputs else i.dealing)
        if i.data not in inputs:
            self._compute(i.names[i.data], 0.0, ready, OTHER)
        self._compute(i.names[i.data], ready, ready + packed, "codec", "samples")
        return {t: step.delay_seconds(t) for t in inputs} if self.overlap else inputs

    def _overhead(self, t: int, start: float) -> float:
        """When tier t has got through what is no layer's, and begins with its first layer."""
        i = self.step.instance
        self._compute(i.names[t], 0.0, float(i.overhead[t]), OTHER)
        return start + float(i.lead[t])

    def _worker_forward(self, k: int, start: float) -> float:
        """Equations (3) and (10): when the activations of prefix worker k are on the owner."""
        step, i, o, chunks = self.step, self.step.instance, self.step.owner, self.chunks[k]
        name, rows, size, c = i.names[k], step.samples[k] / chunks, *self._activations(k)
        delay = step.delay_seconds(k)
        if self.overlap and i.parameters[step.cut[k]]:
            until = step.layerwise(k, step.cut[k], upward=False)
            self._transfer(self.owner, name, 0.0, until, i.parameters[step.cut[k]], "weights")
        now = free = unpacked = start
        for chunk in range(chunks):
            for layer in range(1, step.cut[k] + 1):
                if self.overlap and chunk == 0:
                    now = max(now, delay + step.layerwise(k, layer, upward=False))
                seconds = step.worker_seconds(k, "forward", first=layer, rows=rows)
                if layer < step.cut[k]:
                    seconds -= step.worker_seconds(k, "forward", first=layer + 1, rows=rows)
                self._compute(name, now, now + seconds, "forward", f"chunk {chunk + 1}")
                now += seconds
            packed = now + size * i.encode[c, k] / chunks
            self._compute(name, now, packed, "codec", f"chunk {chunk + 1}")
            now, sent = packed, max(packed, free)
            free = sent + size * i.ratio[c] / i.rate[k, o] / chunks
            arrival = free + i.latency[k, o]
            unpacked = arrival + size * i.decode[c, o] / chunks
            part = size * i.ratio[c] / chunks
            what = "activations"
            self._transfer(name, self.owner, sent, arrival, part, what, f"chunk {chunk + 1}")
            self._compute(self.owner, arrival, unpacked, "codec", "activations")
        return float(unpacked)

    def _owner_forward(self, start: float, arrivals: dict[int, float]) -> None:
        step = self.step
        now, cut = start, step.first_cut()
        for bound in (*sorted(set(step.cut.values())), step.instance.num_layers):
            seconds = step.owner_seconds(cut, "forward") - step.owner_seconds(bound, "forward")
            self._compute(self.owner, now, now + seconds, "forward", f"layers {cut + 1}-{bound}")
            here = [arrivals[k] for k in step.workers if step.cut[k] == bound]
            now, cut = max([now + seconds, *here]), bound

    def _owner_backward(self, start: float) -> None:
        step = self.step
        now, cut = start, step.instance.num_layers
        for bound in (*sorted(set(step.cut.values()), reverse=True), step.first_cut()):
            seconds = step.owner_seconds(bound, "backward") - step.owner_seconds(cut, "backward")
            self._compute(self.owner, now, now + seconds, "backward", f"layers {cut}-{bound + 1}")
            now, cut = now + seconds, bound

    def _worker_backward(self, k: int, left: float) -> None:
        """Equations (5) and (12): from the gradient at the cut on."""
        step, i, o, chunks = self.step, self.step.instance, self.step.owner, self.chunks[k]
        name, rows, size, c = i.names[k], step.samples[k] / chunks, *self._activations(k)
        part = size * i.ratio[c] / chunks
        packing = size * i.encode[c, o] / chunks
        sent, done = left + packing, left
        for chunk in range(chunks):
            detail, arrived = f"chunk {chunk + 1}", sent + part / i.rate[o, k]
            start = left + chunk * packing
            self._compute(self.owner, start, start + packing, "codec", "activation gradients")
            came = arrived + i.latency[o, k]
            self._transfer(self.owner, name, sent, came, part, "activation gradients", detail)
            sent = arrived
            unpacked = max(done, came) + size * i.decode[c, k] / chunks
            self._compute(name, max(done, came), unpacked, "codec", detail)
            done = unpacked + step.worker_seconds(k, "backward", rows=rows)
            self._compute(name, unpacked, done, "backward", detail)
        if not self.overlap or not i.parameters[step.cut[k]]:
            return
        whole = step.worker_seconds(k, "backward", rows=rows)
        complete = {
            layer: done - whole + step.worker_seconds(k, "backward", first=layer, rows=rows)
            for layer in range(1, step.cut[k] + 1)
            if i.parameters[layer] > i.parameters[layer - 1]
        }
        until = max(t + step.layerwise(k, layer, upward=True) for layer, t in complete.items())
        size = i.parameters[step.cut[k]]
        self._transfer(name, self.owner, min(complete.values()), until, size, "gradients")

    def _update(self, start: float) -> None:
        """Equation (7), or the optimizer alone."""
        steps = start + (0.0 if self.overlap else self._exchange(start, "gradients"))
        done = steps + self.prediction.optimizer_seconds
        self._compute(self.owner, steps, done, "optimizer")
        if not self.overlap:
            self._exchange(done, "weights")

    def _exchange(self, start: float, what: str) -> float:
        step, i, o = self.step, self.step.instance, self.step.owner
        ways = {(k, o) if what == "gradients" else (o, k): k for k in step.workers}
        sizes = {way: float(i.parameters[step.cut[k]]) for way, k in ways.items()}
        longest = 0.0
        for index, (source, target) in enumerate(sizes):
            seconds = step.together(index, sizes)
            names, size = (i.names[source], i.names[target]), sizes[source, target]
            if size:
                self._transfer(*names, start, start + seconds, size, what)
            longest = max(longest, seconds)
        return longest

    def _activations(self, k: int) -> tuple[float, int]:
        return self.step.activation_bytes(k), self.step.codec[k]

    def _compute(self, tier: str, start: float, end: float, what: str, detail: str = "") -> None:
        if end <= start:
            return
        last = self.spans[-1] if self.spans else None
        start, end = float(start), float(end)
        if last and (last.tier, last.what, last.detail, last.end) == (tier, what, detail, start):
            start = self.spans.pop().start
        self.spans.append(Span(tier=tier, start=start, end=end, what=what, detail=detail))

    def _transfer(
        self,
        source: str,
        target: str,
        queued: float,
        arrived: float,
        size: float,
        what: str,
        detail: str = "",
    ) -> None:
        self.transfers.append(
            Transfer(
                source=source,
                target=target,
                queued=float(queued),
                arrived=float(arrived),
                num_bytes=round(float(size)),
                what=what,
                detail=detail,
            )
        )
