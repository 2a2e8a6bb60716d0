"""The forward and backward pass to the layers' outputs through torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from accounting.errors import InvalidInput
from workers.gradients.capture import Capture, Input, Use, require_rows
from workers.gradients.layers import Layer
from workers.gradients.randomness import RandomState

Losses = Callable[[Tensor, Tensor], Tensor]


class CompiledForward:
    """Losses [rows] and a capture, like a forward pass within `capture.capturing`, but compiled.

    Compiled code has no place where a hook could look, so zeros are added to every layer's output, and the gradient
    with respect to those zeros is the output's; inductor fuses the addition. Parameters do not require gradients
    meanwhile, which keeps their gradients out of the compiled backward pass.
    """

    def __init__(self, model: nn.Module, losses: Losses, layers: Sequence[Layer]) -> None:
        without = [layer.name for layer in layers if layer.rule is None]
        if without:
            raise InvalidInput(
                f"layers {', '.join(without)} run per example, which torch.compile cannot see through; "
                "set compile=False, or build them of layers that have a rule (docs/performance.md)"
            )
        self._model = model
        self._layers = layers
        self._losses = losses
        self._outputs: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
        self._called: list[int] = []
        self._inputs: list[Tensor] = []
        self._zeros: list[Tensor] = []
        self._compiled = torch.compile(self._trace)
        self._hooks = [self._hook(index) for index in range(len(layers))]

    def __call__(self, x: Tensor, y: Tensor, examples: int) -> tuple[Tensor, Capture]:
        capture = Capture(len(x), examples)
        with self._hooked(), _frozen(self._model):
            kind = (x.shape[1:], x.dtype)
            if kind not in self._outputs:
                self._outputs[kind] = self._find_outputs(x, y)
            zeros = [
                torch.zeros(len(x), *o.shape[1:], dtype=o.dtype, device=x.device, requires_grad=True)
                for o in self._outputs[kind]
            ]
            losses, inputs, called = self._compiled(x, y, zeros)
        self._zeros, self._inputs, self._called = [], [], []
        for index, activation, zero in zip(called, inputs, zeros, strict=True):
            layer = self._layers[index]
            require_rows(layer, activation, len(x))
            assert layer.rule is not None
            differentiate = layer.rule(layer.module, activation, None, examples)
            capture.uses.append(Use(layer, [get_gradient_edge(zero)], differentiate))
        return losses, capture

    def _trace(self, x: Tensor, y: Tensor, zeros: list[Tensor]) -> tuple[Tensor, list[Tensor], list[int]]:
        self._zeros, self._inputs, self._called = zeros, [], []
        losses = self._losses(x, y)
        return losses, self._inputs, self._called

    def _find_outputs(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """Outputs (without memory) in the order of calls, from one pass that is not compiled and keeps no state.

        Raises: InvalidInput where an input was changed in place after its layer read it; compiled code does not tell.
        """
        outputs: list[Tensor] = []
        inputs: list[Input] = []

        def note(layer: Layer, module: nn.Module, args: Any, kwargs: Mapping[str, Tensor], output: Tensor) -> None:
            outputs.append(output.to("meta"))
            inputs.append(Input.now(layer, args[0] if args else kwargs["input"]))

        handles = [layer.module.register_forward_hook(partial(note, layer), with_kwargs=True) for layer in self._layers]
        with torch.no_grad(), RandomState.preserved(x.device):
            self._trace(x, y, [])
        for handle in handles:
            handle.remove()
        for one in inputs:
            one.require_unchanged()
        return outputs

    def _hook(self, index: int) -> Callable[..., Tensor]:
        def tap(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor) -> Tensor:
            position = len(self._called)
            self._called.append(index)
            self._inputs.append(args[0] if args else kwargs["input"])
            return output + self._zeros[position] if self._zeros else output

        return tap

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        handles = [
            layer.module.register_forward_hook(hook, with_kwargs=True)
            for layer, hook in zip(self._layers, self._hooks, strict=True)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
