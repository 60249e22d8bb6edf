"""The cost of many schedules at once: each path through the step, affine in the shares.

A `Boxes` is a batch of sets of schedules: roles and codecs as given, each cut anywhere in an
interval, shares free. With the cuts fixed (`low == high`) the step's time is exactly

    max over forward paths + max over backward paths, and at least every busy time

each of them `constant + slopes . shares`. With intervals every term takes its least value in the
interval, so that the same expression is a lower bound for each schedule in the set: worker's layers
and parameters from the interval's low end, owner's layers from its high end (it then runs least),
activations from the smallest cut between. No path needs the prefix workers to be sorted: the
owner's remaining time after cut m is sum over tiers of b_t S(max(m, m_t)), where S is the owner's
per-sample time from a cut to the end.
"""

from __future__ import annotations

import numpy as np

from lightning_hiertrain.planning.boxes import BACKWARD, BUSY, FORWARD, MEMORY, Boxes, Paths
from lightning_hiertrain.planning.instance import Floats
from lightning_hiertrain.planning.terms import Tables, Terms


class PathTable(Tables):
    """Makes the paths of boxes for one instance and objective."""

    def paths(self, boxes: Boxes, *, num_terms: int = 4) -> Paths:
        """Returns the paths of these boxes.

        Args:
            boxes: The sets of schedules.
            num_terms: For the overlapped step, how many of the layers at which a transfer may be
                waited for are looked at; with all of them the paths are exact, with fewer a lower
                bound.
        """
        view = Terms(self, boxes)
        parts: list[tuple[Floats, Floats, int]] = []
        if self.objective == "plain":
            parts += [(*view.forward(), FORWARD), (*view.backward(), BACKWARD)]
        elif self.objective == "overlap":
            terms = min(num_terms, self.instance.num_layers)
            parts += [
                (*view.chunked_forward(terms), FORWARD),
                (*view.chunked_backward(terms), BACKWARD),
            ]
        if self.objective in ("overlap", "busiest"):
            parts.append((*view.busy(), BUSY))
        if self.has_limit.any():
            parts.append((*view.memory(), BUSY if self.objective == "memory" else MEMORY))
        return Paths(
            constant=np.concatenate([constant for constant, _, _ in parts], axis=1),
            slope=np.concatenate([slope for _, slope, _ in parts], axis=1),
            kind=np.concatenate([np.full(constant.shape[1], kind) for constant, _, kind in parts]),
        )
