"""Moving what has arrived of a batch to this tier's accelerator."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_hiertrain.remote_data.datamodule import unwrapped

_HOOK = "transfer_batch_to_device"


def placed(batch: Any, module: LightningModule, dataloader_idx: int = 0) -> Any:
    """Returns a batch on the module's device, by the user's own hook if there is one.

    The hook may leave tensors on the CPU (lengths of packed sequences have to be there), and a
    tier may have an accelerator where the data tier has none.

    Args:
        batch: What has arrived, on the CPU.
        module: The user's module.
        dataloader_idx: Which of several loaders the batch is from.
    """
    device = module.device
    if device.type == "cpu" or batch is None:
        return batch
    datamodule = unwrapped(getattr(module._trainer, "datamodule", None))
    for holder in (datamodule, module):
        if holder is not None and is_overridden(_HOOK, holder):
            return getattr(holder, _HOOK)(batch, device, dataloader_idx)
    return move_data_to_device(batch, device)
