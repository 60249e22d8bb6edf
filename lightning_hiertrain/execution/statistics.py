"""The running variance of a batch normalisation, put together from those of shares.

Each share is normalised by statistics of its own, so that its running variance lacks how far its
mean lies from that of the others. With counts n, means and variances by share

    (n - 1) variance = sum (n_i - 1) variance_i  +  sum n_i (mean_i - mean)^2

and both sides are taken out of the running statistics, of which the last mini-batches are a part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm


@dataclass(frozen=True, kw_only=True)
class ShareStatistics:
    """What one tier has made of a layer's running statistics."""

    values: float
    """How many values of each channel it has normalised at once."""
    mean: Tensor
    variance: Tensor


def merged_variance(
    old: Tensor, shares: Sequence[ShareStatistics], fractions: Sequence[float]
) -> Tensor:
    """Returns the running variance that one tier with all samples would have.

    It is exact for one mini-batch, for more of them right in the mean.

    Args:
        old: The running variance before.
        shares: What has become of it.
        fractions: Which part of a running statistic each mini-batch since then makes up.
    """
    dtype = torch.promote_types(old.dtype, torch.float32)
    before = old.to(dtype)
    recent = sum(fractions)
    count = sum(share.values for share in shares)
    mean = sum((share.mean.to(dtype) * share.values for share in shares), torch.zeros_like(before))
    mean = mean / count
    squares = torch.zeros_like(before)
    for share in shares:
        within = (share.variance.to(dtype) - (1 - recent) * before) / recent
        between = (share.mean.to(dtype) - mean).square() / sum(x * x for x in fractions)
        squares += (share.values - 1) * within + share.values * between
    return ((1 - recent) * before + recent * squares / (count - 1)).to(old.dtype)


def recent_fractions(layer: _BatchNorm, calls: int) -> list[float]:
    """Returns which part of a layer's running statistics its last calls make up."""
    if layer.momentum is None:
        assert layer.num_batches_tracked is not None
        return [1 / int(layer.num_batches_tracked)] * calls
    return [layer.momentum * (1 - layer.momentum) ** age for age in range(calls)]
