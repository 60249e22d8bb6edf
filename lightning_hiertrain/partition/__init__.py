"""From a user's module to a chain of layers.

In: a step (any function of a batch) and an example batch. Out: a `LayerChain`, plain data, and
`Passage`, the context in which the same step runs along the chain, stopping at a cut or taking in
other tiers' samples there.
"""

from lightning_hiertrain.partition.chain import Layer, LayerChain
from lightning_hiertrain.partition.passage import CutReached, Passage
from lightning_hiertrain.partition.tracing import trace_layers, trace_step

__all__ = ["CutReached", "Layer", "LayerChain", "Passage", "trace_layers", "trace_step"]
