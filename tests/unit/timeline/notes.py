"""Made-up notes of two tiers, with numbers that are easy to follow.

```
time         0    1    2    3    4    5    6    7    8    9   10
device       | forward | send |   waits for edge       | backward  | other
device>edge                 ===== 3-4
edge         | forward |  waits    | loss | backward | send  optim |
edge>device                                          ===== 7-8
```

The edge's clock is 100 s ahead.
"""

from __future__ import annotations

from typing import Any

from lightning_hiertrain.schedule import Schedule, Share
from lightning_hiertrain.timeline import Timeline
from lightning_hiertrain.timeline.joining import join

AHEAD = {"device": 0.0, "edge": 100.0}
ACTIVATIONS, RETURNED = "1/activations/0", "1/activation_gradients/0"


def notes() -> dict[str, dict[str, Any]]:
    return {
        "device": {
            "activities": [
                (-5.0, "other", ""),
                (0.0, "forward", "chunk 1"),
                (2.0, "codec", "chunk 1"),
                (8.0, "backward", "chunk 1"),
                (9.5, "other", ""),
                (20.0, "other", ""),
            ],
            "waits": [wait("edge", RETURNED, 2.5, 8.0)],
            "sent": [{"peer": "edge", "tag": ACTIVATIONS, "bytes": 4000, "queued": 2.5}],
            "received": [message("edge", RETURNED, 3000, began=7.5, arrived=8.0)],
            "ends": {"0": 0.0, "1": 10.5},
        },
        "edge": {
            "activities": [
                (95.0, "other", ""),
                (100.0, "forward", "layers 1-2"),
                (104.0, "forward", "layers 3-4"),
                (104.5, "loss", "forward"),
                (105.0, "backward", "layers 4-3"),
                (109.0, "optimizer", ""),
                (110.0, "weights", ""),
                (120.0, "other", ""),
            ],
            "waits": [wait("device", ACTIVATIONS, 102.0, 104.0)],
            "sent": [{"peer": "device", "tag": RETURNED, "bytes": 3000, "queued": 107.0}],
            "received": [message("device", ACTIVATIONS, 4000, began=103.0, arrived=104.0)],
            "ends": {"0": 100.0, "1": 110.0},
        },
    }


def wait(peer: str, tag: str, start: float, end: float) -> dict[str, Any]:
    return {
        "peer": peer,
        "tag": tag,
        "operation": f"receive {tag}",
        "start": start,
        "end": end,
        "sends": False,
    }


def message(peer: str, tag: str, num_bytes: int, *, began: float, arrived: float) -> dict[str, Any]:
    return {"peer": peer, "tag": tag, "bytes": num_bytes, "began": began, "arrived": arrived}


def timeline(*, overlap: bool = True) -> Timeline:
    joined = join(notes(), AHEAD, wanted=[1], owner="edge", overlap=overlap)
    return Timeline(
        model="LeNet5",
        overlap=overlap,
        tiers=("device", "edge"),
        links=(("device", "edge"),),
        schedule=Schedule(
            owner="edge",
            shares={
                "device": Share(num_layers=2, num_samples=3),
                "edge": Share(num_layers=4, num_samples=5),
            },
        ),
        clock_uncertainty_seconds={"device": 0.0, "edge": 0.001},
        steps=joined.steps,
        spans=joined.spans,
        transfers=joined.transfers,
    )
