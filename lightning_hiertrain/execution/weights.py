"""New weights on their way to a prefix worker, each applied when it is first used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_hiertrain.partition.calls import Function, tensors_in
from lightning_hiertrain.partition.chain import LayerChain
from lightning_hiertrain.transport.network import Network


class AwaitedWeights:
    """The weights that a prefix worker has not received yet.

    Args:
        network: The links of this tier.
        chain: The model's chain of layers.
        parameters: The module's parameters by name.
    """

    def __init__(
        self, network: Network, chain: LayerChain, parameters: Mapping[str, nn.Parameter]
    ) -> None:
        self._network = network
        self._chain = chain
        self._parameters = parameters
        self._awaited: dict[int, tuple[str, str]] = {}
        """Owner and tag by layer."""
        self.received: dict[str, Tensor] = {}
        """The weights of the last update that have arrived."""
        self._layer_of: dict[int, int] = {}
        """The awaited layer of a parameter, by the parameter's identity."""

    def __bool__(self) -> bool:
        return bool(self._awaited)

    def expect(self, index: int, owner: str, num_layers: int) -> None:
        """Notes that the owner will send the weights of the first layers after its update.

        Args:
            index: The mini-batch whose update it is.
            owner: The owner.
            num_layers: How many layers.
        """
        self.settle()
        self.received.clear()
        for layer in layers_with_parameters(self._chain, num_layers):
            self._awaited[layer] = (owner, weights_tag(index, layer))
            for name in self._chain[layer - 1].parameters:
                self._layer_of[id(self._parameters[name])] = layer

    def settle(self) -> None:
        """Waits for all of them."""
        for layer in list(self._awaited):
            self._receive(layer)

    def arriving(self) -> TorchFunctionMode:
        """Returns a context in which a weight that is used arrives first."""
        return _Arriving(self._await_used)

    def _await_used(self, arguments: Any) -> None:
        if self._awaited:
            for tensor in tensors_in(arguments):
                layer = self._layer_of.get(id(tensor))
                if layer is not None:
                    self._receive(layer)

    def _receive(self, layer: int) -> None:
        if layer not in self._awaited:
            return
        owner, tag = self._awaited.pop(layer)
        weights = self._network.receive(
            owner, tag, operation=f"receive new weights of layer {layer}"
        )
        with torch.no_grad():
            for name, weight in weights.items():
                self._parameters[name].copy_(weight)
        self.received.update(weights)
        if not self._awaited:
            self._layer_of.clear()


class _Arriving(TorchFunctionMode):
    def __init__(self, before: Callable[[Any], None]) -> None:
        super().__init__()
        self._before = before

    def __torch_function__(
        self,
        func: Function,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        self._before((args, kwargs))
        return func(*args, **kwargs)


def layers_with_parameters(chain: LayerChain, num_layers: int) -> list[int]:
    """Returns those of the first layers that are the first to use a parameter, from 1."""
    return [n for n in range(1, num_layers + 1) if chain[n - 1].parameters]


def weights_tag(index: int, layer: int) -> str:
    """Returns the tag of a layer's weights after the update of a mini-batch."""
    return f"{index}/weights/{layer}"


def buffers_tag(index: int) -> str:
    """Returns the tag of the buffers that a prefix worker has changed."""
    return f"{index}/buffers"


def new_buffers_tag(index: int) -> str:
    """Returns the tag of the buffers that the owner returns."""
    return f"{index}/buffers/new"


def gradients_tag(index: int, layer: int) -> str:
    """Returns the tag of a layer's gradients of a mini-batch."""
    return f"{index}/gradients/{layer}"
