"""The mixed-integer programme over what the search leaves, in CVXPY and solved by SCIP.

A slot holds one choice of roles, cuts and codecs; SCIP picks one slot and whole shares for it.
Because every share belongs to a slot, the relaxation is the convex hull of the slots, which is what
makes it quick. The programme is compiled once for each shape and its coefficients are parameters,
so that another profile or bandwidth solves it again without compiling.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from lightning_hiertrain.errors import PlanningError
from lightning_hiertrain.planning.boxes import BACKWARD, BUSY, FORWARD, MEMORY, Boxes, Paths
from lightning_hiertrain.planning.instance import Floats, Ints

_SCALE = 1000.0
"""The incumbent's time in the programme's units, so that SCIP's absolute tolerance is a relative
one of 1e-9."""
_COMPILED = threading.Lock()
"""Guards the compiled programmes: a plan may be made in the background."""


@dataclass(frozen=True, kw_only=True)
class Slots:
    """Choices of roles, cuts and codecs with their exact paths."""

    paths: Paths
    boxes: Boxes


@dataclass(frozen=True, kw_only=True)
class Solved:
    """What SCIP found."""

    slot: int
    shares: Ints
    bound: float
    """What SCIP proved: no slot takes less, in seconds."""
    gap: float
    """As SCIP reports it; 0 if it proved its solution optimal."""


def solve(
    slots: Slots, *, batch_size: int, scale: float, time_limit_seconds: float | None = None
) -> Solved | None:
    """Finds the best slot and shares, or `None` if no shares fit into memory in any slot.

    Raises:
        PlanningError: If SCIP fails, or finds nothing in time.
    """
    kept = {
        kind: _undominated(slots, kind, batch_size) for kind in (FORWARD, BACKWARD, BUSY, MEMORY)
    }
    count, num_tiers = slots.boxes.least.shape
    shape = tuple(_rounded_up(len(rows[0])) if rows else 0 for rows in kept.values())
    with _COMPILED:
        template = _template(1 << (count - 1).bit_length(), num_tiers, shape)
        template.fill(slots, kept, batch_size=batch_size, scale=scale)
        return template.solve(count, scale, time_limit_seconds)


def _cvxpy() -> Any:
    """Imports CVXPY when it is first needed; untyped, as its functions are not exported by name."""
    import cvxpy

    return cvxpy


def _rounded_up(length: int) -> int:
    return -(-length // 4) * 4


def _undominated(slots: Slots, kind: int, batch_size: int) -> list[Ints]:
    """For each slot its paths of this kind that no other covers at every vertex."""
    chosen = np.flatnonzero(slots.paths.kind == kind)
    if not len(chosen):
        return []
    free = (batch_size - slots.boxes.least.sum(axis=1))[:, None, None]
    slope = slots.paths.slope[:, chosen]
    values = slots.paths.at(slots.boxes.least)[:, chosen, None] + free * slope
    order = np.arange(len(chosen))
    rows = []
    for slot in range(len(values)):
        heights = values[slot][:, slots.boxes.taking_part[slot]]
        covers = (heights[:, None] >= heights[None]).all(axis=2)  # path i covers path j
        covers &= ~covers.T | (order[:, None] < order)  # of two equal ones the first stays
        kept = np.flatnonzero(~covers.any(axis=0))
        rows.append(chosen[kept])
    longest = max(len(row) for row in rows)
    return [np.concatenate([row, np.repeat(row[:1], longest - len(row))]) for row in rows]


@lru_cache(maxsize=32)
def _template(num_slots: int, num_tiers: int, shape: tuple[int, ...]) -> _Template:
    return _Template(num_slots, num_tiers, shape)


class _Template:
    """A compiled programme; the numbers in comments are the equations of docs/cost_model.md."""

    def __init__(self, num_slots: int, num_tiers: int, shape: tuple[int, ...]) -> None:
        cp = _cvxpy()
        self.num_slots, self.num_tiers, self.shape = num_slots, num_tiers, shape
        self.chosen: Any = cp.Variable(num_slots, boolean=True)
        self.shares: Any = cp.Variable((num_slots, num_tiers), integer=True)
        forward, backward, step = (cp.Variable(num_slots, nonneg=True) for _ in range(3))
        self.batch_size = cp.Parameter(nonneg=True)
        self.open = cp.Parameter(num_slots, nonneg=True)
        self.least = cp.Parameter((num_slots, num_tiers), nonneg=True)
        self.most = cp.Parameter((num_slots, num_tiers), nonneg=True)
        self.constants: dict[int, Any] = {}
        self.slopes: dict[int, Any] = {}
        constraints = [
            cp.sum(self.chosen) == 1,  # (20) one slot is taken
            self.chosen <= self.open,
            cp.sum(self.shares, axis=1)
            == self.batch_size * self.chosen,  # (21) its shares make up the mini-batch
            self.shares
            >= cp.multiply(self.least, self.chosen[:, None]),  # (22) who takes part has samples,
            self.shares <= cp.multiply(self.most, self.chosen[:, None]),  # who does not has none
            step >= forward + backward,  # (8), (14)
        ]
        for kind, length in zip((FORWARD, BACKWARD, BUSY, MEMORY), shape, strict=True):
            if not length:
                continue
            repeat = np.repeat(np.eye(num_slots), length, axis=0)
            constant = self.constants[kind] = cp.Parameter(num_slots * length)
            slope = self.slopes[kind] = cp.Parameter((num_slots * length, num_tiers))
            value = cp.multiply(constant, repeat @ self.chosen)
            value += cp.sum(cp.multiply(slope, repeat @ self.shares), axis=1)
            if kind == FORWARD:
                constraints.append(repeat @ forward >= value)  # (4), (11)
            elif kind == BACKWARD:
                constraints.append(repeat @ backward >= value)  # (6), (12)
            elif kind == BUSY:
                constraints.append(repeat @ step >= value)  # (13), (14)
            else:
                constraints.append(value <= 0)  # (15)
        self.problem: Any = cp.Problem(cp.Minimize(cp.sum(step)), constraints)

    def fill(
        self, slots: Slots, kept: dict[int, list[Ints]], *, batch_size: int, scale: float
    ) -> None:
        """Puts an instance's numbers in; unused slots are closed."""
        count = len(slots.boxes)
        self.batch_size.value = float(batch_size)
        self.open.value = (np.arange(self.num_slots) < count).astype(float)
        least = np.zeros((self.num_slots, self.num_tiers))
        least[:count] = slots.boxes.least
        most = np.zeros_like(least)
        most[:count] = slots.boxes.most
        self.least.value, self.most.value = least, most
        for (kind, rows), length in zip(kept.items(), self.shape, strict=True):
            if not length:
                continue
            unit = 1.0 if kind == MEMORY else _SCALE / scale
            constant: Floats = np.zeros((self.num_slots, length))
            slope: Floats = np.zeros((self.num_slots, length, self.num_tiers))
            for slot in range(count):
                used = rows[slot]
                constant[slot, : len(used)] = slots.paths.constant[slot, used] * unit
                slope[slot, : len(used)] = slots.paths.slope[slot, used] * unit
            self.constants[kind].value = constant.ravel()
            self.slopes[kind].value = slope.reshape(-1, self.num_tiers)

    def solve(self, count: int, scale: float, time_limit_seconds: float | None) -> Solved | None:
        cp = _cvxpy()
        settings: dict[str, Any] = {
            "limits/gap": 0.0,
            "numerics/feastol": 1e-7,
            "numerics/dualfeastol": 1e-7,
        }
        if time_limit_seconds is not None:
            settings["limits/time"] = max(time_limit_seconds, 0.01)
        try:
            self.problem.solve(solver=cp.SCIP, scip_params=settings)
        except cp.error.SolverError as error:
            raise PlanningError(f"SCIP found no schedule: {error}") from error
        if self.problem.status == cp.INFEASIBLE:
            return None
        if self.chosen.value is None:
            raise PlanningError(f"SCIP found no schedule: it reports {self.problem.status!r}")
        model = self.problem.solver_stats.extra_stats["model"]
        slot = int(np.argmax(self.chosen.value[:count]))
        return Solved(
            slot=slot,
            shares=np.rint(self.shares.value[slot]).astype(int),
            bound=float(model.getDualbound()) * scale / _SCALE,
            gap=float(model.getGap()),
        )
