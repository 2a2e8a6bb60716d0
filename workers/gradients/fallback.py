"""Running any module once per row of a batch, each time with parameters of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vmap
from torch.utils import _pytree as pytree

from accounting.errors import InvalidInput
from workers.gradients.layers import Layer


def run_per_row(
    layer: Layer, parameters: Mapping[str, Tensor], rows: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """The output of ``layer.module(*args, **kwargs)`` where row r is computed with ``parameters[name][r]``.

    Tensors whose first axis has one entry per row are cut into rows of a batch of 1; all else is passed as it is.
    """
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
    except RuntimeError:  # an operator without a batching rule: one row after the other; real errors come back
        outputs = [
            one({name: value[row] for name, value in parameters.items()}, *(tensor[row] for tensor in tensors))
            for row in range(rows)
        ]
        return pytree.tree_map(lambda *parts: torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0], *outputs)
