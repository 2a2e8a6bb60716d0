"""The generic fallback: runs any module once per row of a batch, with a separate copy of the parameters per row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor
from torch.func import functional_call, vmap
from torch.utils import _pytree as pytree

from dpsweep.accounting.errors import InvalidInput, count_of, public_text
from dpsweep.workers.gradients.layers import Layer
from dpsweep.workers.machine.devices import lacks_memory


class WithoutBatch(InvalidInput):
    """A layer that runs once per example sees other rows than the batch has. layer: its name."""

    def __init__(self, message: str, layer: str) -> None:
        super().__init__(message, layer)
        self.layer = layer

    def __str__(self) -> str:
        return str(self.args[0])


class _Forward(nn.Module):
    """The forward of a module without its hooks; hooks run once for all rows, outside."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.forward(*args, **kwargs)


def run_per_row(
    layer: Layer, parameters: Mapping[str, Tensor], rows: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Return the output of ``layer.module.forward(*args, **kwargs)`` with row r computed from ``parameters[name][r]``.

    Tensors that hold the batch are split into batches of 1; other arguments are passed unchanged.

    Raises: WithoutBatch when no argument or not every output holds the batch, InvalidInput when the module does not run
    on a batch of 1.
    """
    leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
    batched = _batched(layer, leaves, structure, rows)
    forward, constants = _Forward(layer.module), dict[int, Any]()
    output_structure = structure

    def one(parameters_of_row: Mapping[str, Tensor], *tensors: Tensor) -> dict[int, Tensor]:
        nonlocal output_structure
        inputs = list(leaves)
        for index, tensor in zip(batched, tensors, strict=True):
            inputs[index] = tensor.unsqueeze(_batch_axis(layer, index))
        row_args, row_kwargs = pytree.tree_unflatten(inputs, structure)
        named = {f"module.{name}": value for name, value in parameters_of_row.items()}
        outputs, output_structure = pytree.tree_flatten(functional_call(forward, named, row_args, row_kwargs))
        constants.update({i: leaf for i, leaf in enumerate(outputs) if not isinstance(leaf, Tensor)})
        return {i: leaf for i, leaf in enumerate(outputs) if isinstance(leaf, Tensor)}

    tensors = [leaves[index].movedim(_batch_axis(layer, index), 0) for index in batched]
    try:
        with _without_inference_kernels(), _without_leftovers(layer):
            by_row = vmap(one, randomness="different")(dict(parameters), *tensors)
    except RuntimeError as error:  # an operator has no vmap rule: run row by row, where genuine errors occur again
        if lacks_memory(error):
            raise
        by_row = _run_row_by_row(layer, one, parameters, tensors)
    joined = {index: _joined(layer, index, output) for index, output in by_row.items()} | constants
    return pytree.tree_unflatten([joined[index] for index in range(len(joined))], output_structure)


@contextmanager
def _without_inference_kernels() -> Iterator[None]:
    """Disable the fused inference kernels of attention and transformer layers, which cannot be differentiated.

    Under vmap torch may choose them although gradients are needed.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def _without_leftovers(layer: Layer) -> Iterator[None]:
    """Restore attributes of the module in which a forward pass stored tensors of vmap, which are invalid outside it.

    Raises: InvalidInput when such an attribute is a buffer, which would carry values from row to row.
    """
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in layer.module.modules()]
    buffers: list[str] = []
    try:
        yield
    finally:
        for module, attributes, registered in before:
            _restore(vars(module), attributes)
            buffers += _restore(module._buffers, registered)
        if buffers:
            raise InvalidInput(
                f"{layer.described} writes its buffers {', '.join(buffers)} from the rows of a batch: no noise would "
                "cover what they keep of them. Compute such values within an example, or fix them"
            )


def _restore(present: dict[str, Any], before: Mapping[str, Any]) -> list[str]:
    """Restore entries that hold tensors of a vmap, and return their names."""
    names = [name for name, value in present.items() if isinstance(value, Tensor) and is_batchedtensor(value)]
    for name in names:
        if name in before:
            present[name] = before[name]
        else:
            del present[name]
    return names


def _batched(layer: Layer, leaves: list[Any], structure: pytree.TreeSpec, rows: int) -> list[int]:
    """Return the indices of the arguments whose batch axis had the batch's length in this and all earlier calls."""
    found = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            axis, position = _batch_axis(layer, index), (str(structure), index)
            length = leaf.shape[axis] if leaf.dim() > axis else -1
            if layer.entries(position, length, rows, stacks=False):
                found.append(index)
    if not found:
        raise WithoutBatch(
            f"{layer.described} was given no tensor with the batch of {count_of(rows, 'row')} "
            "on its first axis; every layer must see the batch there",
            layer.name,
        )
    return found


def _batch_axis(layer: Layer, index: int) -> int:
    """Batch axis of the tensor at ``index`` among inputs or outputs.

    It is the first axis, except for states of recurrent layers, which are [layers, batch, width].
    """
    return 1 if index and isinstance(layer.module, nn.RNNBase) else 0


def _run_row_by_row(
    layer: Layer, one: Any, parameters: Mapping[str, Tensor], tensors: list[Tensor]
) -> dict[int, Tensor]:
    try:
        outputs = [
            one({name: value[row] for name, value in parameters.items()}, *(tensor[row] for tensor in tensors))
            for row in range(len(tensors[0]))
        ]
    except RuntimeError as error:
        if lacks_memory(error):
            raise
        raise InvalidInput(
            f"{layer.described} does not run on one row of the batch at a time: {public_text(error)}"
        ) from error
    return {index: torch.stack([output[index] for output in outputs]) for index in outputs[0]}


def _joined(layer: Layer, index: int, by_row: Tensor) -> Tensor:
    """Outputs [rows, ...] of batches of 1 -> the output of the whole batch."""
    axis = _batch_axis(layer, index)
    if by_row.dim() <= axis + 1:
        raise WithoutBatch(
            f"{layer.described} returned a tensor of shape {list(by_row.shape[1:])} for one row; "
            "every output must have the batch on its first axis",
            layer.name,
        )
    return by_row.movedim(0, axis).flatten(axis, axis + 1)
