"""Noticing that tiers or links are no longer as fast as profiled, and planning anew.

Every tier notes how long it was busy in each step and how fast tensors left it (`reports`). The
data tier finds out what that says of each tier's speed and each link's rate (`estimates`), whether
another schedule would save enough (`decision`), and when to switch (`watch`).
"""

from lightning_hiertrain.drift.watch import DriftWatch, NoWatch

__all__ = ["DriftWatch", "NoWatch"]
