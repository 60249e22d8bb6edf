"""Carrying out a schedule: one training step on several tiers.

In: a `Schedule`, a `LayerChain`, the mini-batch on the data tier. Out: on the owner the same loss
    and gradients that one
machine would have, on every tier the weights that its role needs.

```
data tier       deal rows ------------------------------------------------------------> next batch
prefix worker   receive | layers 1..m | send activations |       | backward | gradients |      |
weights owner           receive | layers 1..m | join | m+1..N | loss | backward -> | add gradients |
optimizer |
```
"""

from lightning_hiertrain.execution.feed import DealtBatch, Feed, MiniBatch
from lightning_hiertrain.execution.owner import Owner
from lightning_hiertrain.execution.prefix import PrefixWorker
from lightning_hiertrain.execution.replica import Replicas

__all__ = ["DealtBatch", "Feed", "MiniBatch", "Owner", "PrefixWorker", "Replicas"]
