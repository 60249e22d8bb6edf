"""From measured seconds to `fixed + per_sample * num_samples`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from lightning_hiertrain.profiles import AffineTime


def fit_affine(
    seconds: Mapping[int, Sequence[float]], typical: Mapping[int, float] | None = None
) -> AffineTime:
    """Fits a time that is affine in the number of samples, neither part below 0.

    Least squares on one typical time for each count, residuals relative to it, so that small
    counts, which carry the fixed part, are not drowned by large ones. The fit goes through the
    largest count: parts of a step then add up to the step there, whatever bends below it (caches,
    vector widths), and most of a mini-batch is trained in large shares.

    Args:
        seconds: Measurements by number of samples, at least one.
        typical: The time to fit to, by number of samples; by default the median.

    Returns:
        The fit; with a single count everything is taken to grow with the samples.

    Raises:
        ValueError: If there is no measurement.
    """
    if typical is None:
        typical = {count: median(values) for count, values in seconds.items() if values}
    if not typical:
        raise ValueError("there is no measurement to fit a time to; profile for longer")
    counts = sorted(typical)
    if len(counts) == 1:
        fixed, per_sample = 0.0, typical[counts[0]] / counts[0]
    else:
        fixed, per_sample = _least_squares(counts, [typical[count] for count in counts])
    return AffineTime(
        fixed=fixed,
        per_sample=per_sample,
        relative_spread=_relative_spread(seconds, fixed, per_sample),
        sample_counts=tuple(counts),
    )


def _least_squares(counts: Sequence[int], times: Sequence[float]) -> tuple[float, float]:
    largest, last = counts[-1], times[-1]
    floor = max(*times, 1e-12) * 1e-6
    weights = [1.0 / max(time, floor) ** 2 for time in times]
    runs = [largest - count for count in counts]
    rises = [last - time for time in times]
    products = sum(w * run * rise for w, run, rise in zip(weights, runs, rises, strict=True))
    squares = sum(w * run * run for w, run in zip(weights, runs, strict=True))
    # One unknown and a convex objective: outside the bounds the nearest bound is best.
    per_sample = min(max(products / squares, 0.0), last / largest)
    return max(last - per_sample * largest, 0.0), per_sample


def _relative_spread(
    seconds: Mapping[int, Sequence[float]], fixed: float, per_sample: float
) -> float:
    """Returns the median relative distance of all measurements from the fit."""
    distances = []
    for count, values in seconds.items():
        fitted = fixed + per_sample * count
        if fitted > 0:
            distances += [abs(value - fitted) / fitted for value in values]
    return median(distances) if distances else 0.0
