"""Telling an observer which part of the owner's step is at hand; used only while somebody looks on.

The step is the user's code, so where the layers end and the loss begins is found by counting its
torch calls against those of the chain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_hiertrain.partition.calls import (
    Function,
    function_name,
    is_aside,
    returns_tensor,
    unrolled,
)
from lightning_hiertrain.partition.chain import LayerChain
from lightning_hiertrain.transport.observing import Observer


class ChainEnd(TorchFunctionMode):
    """A context that notices when a step leaves its last layer and changes nothing.

    Args:
        chain: The step's chain.
        reached: Called once with the last layer's output; not at all if the step goes another way.
    """

    def __init__(self, chain: LayerChain, reached: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._calls = chain.calls
        self._reached = reached
        self._next = 0

    def __torch_function__(
        self,
        func: Function,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._next < len(self._calls) and not is_aside():
            called, iterated = unrolled(func)
            name = function_name(called)
            if iterated or returns_tensor(name, result):
                is_expected = name == self._calls[self._next].name
                self._next = self._next + 1 if is_expected else len(self._calls) + 1
                if self._next == len(self._calls) and isinstance(result, Tensor):
                    self._reached(result)
        return result


class OwnerWatch:
    """Names what the owner computes in one mini-batch.

    Args:
        observer: Who is told.
        chain: The model's chain of layers.
        cuts: After how many layers prefix workers' samples join, shallowest first.
        own_rows: The owner's samples; without any it begins at the first cut.
    """

    def __init__(
        self, observer: Observer, chain: LayerChain, cuts: list[int], own_rows: int
    ) -> None:
        self._observer = observer
        self._bounds = sorted({0, *cuts, len(chain)})
        if not own_rows and cuts:
            self._bounds.remove(0)
        self.saw_end = False
        """Whether the step was seen to leave its last layer."""
        self.mode = ChainEnd(chain, self._leave_chain)

    def forward_from(self, cut: int) -> None:
        """The forward pass goes on with the layers after a cut."""
        self._observer.begin(("forward", self._layers_after(cut)))

    def backward_from(self, cut: int) -> None:
        """The backward pass goes on with the layers before a cut."""
        self._observer.begin(("backward", self._layers_before(cut)))

    def _leave_chain(self, output: Tensor) -> None:
        self.saw_end = True
        self._observer.begin(("loss", "forward"))
        if output.requires_grad:
            last = self._bounds[-1]
            output.register_hook(lambda gradient: self.backward_from(last))

    def _layers_after(self, cut: int) -> str:
        end = next((bound for bound in self._bounds if bound > cut), None)
        return "" if end is None else f"layers {max(cut, self._bounds[0]) + 1}-{end}"

    def _layers_before(self, cut: int) -> str:
        start = next((bound for bound in reversed(self._bounds) if bound < cut), None)
        return "" if start is None else f"layers {cut}-{start + 1}"
