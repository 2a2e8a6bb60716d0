"""One forward pass that remembers, for every layer, its input and where its output gradient will appear."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call, vmap
from torch.utils import _pytree as pytree

from accounting.errors import InvalidInput
from workers.gradients.factors import ExampleGradients, Instantiated, Summed
from workers.gradients.layers import Layer, select_rule_input


@dataclass(frozen=True)
class Use:
    """One call of a layer. edges: what to differentiate by; gradients: from their gradients to those of parameters."""

    layer: Layer
    edges: Sequence[GradientEdge]
    gradients: Callable[..., Mapping[str, ExampleGradients]]


@dataclass
class Capture:
    """rows: leading dimension of every activation; examples: rows / K, where K rows form one example."""

    rows: int
    examples: int
    uses: list[Use] = field(default_factory=list)

    def backward(self, loss: Tensor) -> dict[str, ExampleGradients]:
        """Per-example gradients of ``loss``, a sum over rows, by parameter name; unused parameters have none.

        Only output gradients of layers are differentiated: autograd skips every parameter gradient.
        """
        edges = [edge for use in self.uses for edge in use.edges]
        if not edges or not loss.requires_grad:
            return {}
        remaining = iter(torch.autograd.grad(loss, edges, allow_unused=True))
        found: dict[str, list[ExampleGradients]] = {}
        for use in self.uses:
            grads = [next(remaining) for _ in use.edges]
            if any(grad is None for grad in grads):
                continue
            for local, gradients in use.gradients(*grads).items():
                if local in use.layer.parameters:
                    found.setdefault(use.layer.parameters[local], []).append(gradients)
        return {name: parts[0] if len(parts) == 1 else Summed(parts) for name, parts in found.items()}


@contextmanager
def capturing(layers: Sequence[Layer], rows: int, examples: int) -> Iterator[Capture]:
    """Within this context a forward pass of the model fills the capture; the model is left as it was."""
    capture = Capture(rows, examples)
    with ExitStack() as stack:
        for layer in layers:
            if layer.rule is None:
                stack.enter_context(_expanded(layer, capture))
            else:
                stack.callback(_hook(layer, capture).remove)
        yield capture


def _hook(layer: Layer, capture: Capture) -> Any:
    rule = layer.rule
    assert rule is not None

    def remember(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor) -> None:
        if not output.requires_grad:
            return
        activation = select_rule_input(args, kwargs)
        _require_rows(layer, activation, capture.rows)
        differentiate = rule(module, activation.detach(), output, capture.examples)
        capture.uses.append(Use(layer, [get_gradient_edge(output)], differentiate))

    return layer.module.register_forward_hook(remember, with_kwargs=True)


def _require_rows(layer: Layer, activation: Tensor, rows: int) -> None:
    if activation.dim() == 0 or len(activation) != rows:
        raise InvalidInput(
            f"layer {layer.name!r} ({type(layer.module).__name__}) was given a tensor of shape "
            f"{list(activation.shape)} in a batch of {rows} rows; every layer must see the batch on its first axis"
        )


@contextmanager
def _expanded(layer: Layer, capture: Capture) -> Iterator[None]:
    """Generic fallback: the layer runs once per example (vmap), each with parameters of its own to differentiate by."""
    module = layer.module
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        owned = dict(module.named_parameters())
        leaves = [
            owned[local].detach().expand(capture.examples, *owned[local].shape).requires_grad_()
            for local in layer.parameters
        ]
        repeats = capture.rows // capture.examples
        per_row = {
            local: leaf if repeats == 1 else leaf.repeat_interleave(repeats, 0)
            for local, leaf in zip(layer.parameters, leaves, strict=True)
        }
        with _patched(module, original):
            output = _run_per_row(layer, per_row, capture.rows, args, kwargs)
        capture.uses.append(
            Use(
                layer,
                [get_gradient_edge(leaf) for leaf in leaves],
                lambda *grads: dict(zip(layer.parameters, map(Instantiated, grads), strict=True)),
            )
        )
        return output

    with _patched(module, forward):
        yield


@contextmanager
def _patched(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    missing = object()
    before = module.__dict__.get("forward", missing)
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if before is missing:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before


def _run_per_row(
    layer: Layer, parameters: Mapping[str, Tensor], rows: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
    batched = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == rows]
    if not batched:
        raise InvalidInput(
            f"layer {layer.name!r} ({type(layer.module).__name__}) was given no tensor with the batch of {rows} rows "
            "on its first axis; every layer must see the batch there"
        )

    def one(parameters_of_row: Mapping[str, Tensor], *tensors: Tensor) -> Any:
        inputs = list(leaves)
        for index, tensor in zip(batched, tensors, strict=True):
            inputs[index] = tensor.unsqueeze(0)
        row_args, row_kwargs = pytree.tree_unflatten(inputs, structure)
        return functional_call(layer.module, dict(parameters_of_row), row_args, row_kwargs)

    tensors = [leaves[index] for index in batched]
    try:
        output = vmap(one, randomness="different")(dict(parameters), *tensors)
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.flatten(0, 1), output)
    except RuntimeError:  # an operator without a batching rule: one row after the other
        outputs = [
            one({name: value[row] for name, value in parameters.items()}, *(tensor[row] for tensor in tensors))
            for row in range(rows)
        ]
        return pytree.tree_map(lambda *parts: torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0], *outputs)
