"""What the owner's step or hook did, made to happen on the other tiers as well.

In goes the user's LightningModule; out come payloads that a link can carry, and on the other tiers
the same log calls, metric states, attributes and step outputs.
"""

from lightning_hiertrain.mirror.mirroring import OWNER_HOOKS, Mirror
from lightning_hiertrain.mirror.quiet import quietly
from lightning_hiertrain.mirror.recording import Recording

__all__ = ["OWNER_HOOKS", "Mirror", "Recording", "quietly"]
