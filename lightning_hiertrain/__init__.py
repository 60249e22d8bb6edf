"""Train one model across a device, an edge server and a cloud machine with PyTorch Lightning."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_hiertrain.partition import trace_layers
from lightning_hiertrain.planning import lower_bound, plan, predict
from lightning_hiertrain.profiles import Profile
from lightning_hiertrain.schedule import Schedule, Share
from lightning_hiertrain.strategy import HierTrainStrategy
from lightning_hiertrain.timeline_callback import TimelineCallback
from lightning_hiertrain.topology import Link, Tier, Topology

__all__ = [
    "HierTrainStrategy",
    "Link",
    "Profile",
    "Schedule",
    "Share",
    "Tier",
    "TimelineCallback",
    "Topology",
    "lower_bound",
    "plan",
    "predict",
    "trace_layers",
]

HierTrainStrategy.register_strategies(StrategyRegistry)
