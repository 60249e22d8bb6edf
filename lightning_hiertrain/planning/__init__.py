"""Plans a training step: a profile goes in, the schedule that takes the least time comes out.

Needs neither torch nor Lightning. docs/cost_model.md derives every term and numbers the equations
that the code cites. The stage in order of use: `instance` turns a profile into arrays, `costs`
predicts one schedule, `paths` states the same costs for many schedules at once, `relaxation` bounds
them, `search` discards what cannot be optimal, `programme` lets SCIP prove the rest, `planner` is
the face.
"""

from lightning_hiertrain.planning.costs import Prediction, predict
from lightning_hiertrain.planning.planner import POLICIES, lower_bound, plan

__all__ = ["POLICIES", "Prediction", "lower_bound", "plan", "predict"]
