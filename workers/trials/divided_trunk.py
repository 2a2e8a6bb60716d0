"""The frozen parameters of a model's layers, divided among the ranks of a trial by FSDP2 (`fully_shard`).

Each rank keeps a part of every frozen parameter. FSDP gathers a layer's parameters before it runs, forward or backward,
and frees them afterwards. Values are gathered and never computed, so that results have the bits of whole parameters.

FSDP expects that all ranks gather the same layers in the same order. Ranks of a trial do not: they verify other rows
and have other numbers of micro-batches, and rank 0 makes some passes alone. Each gathering is therefore a round of
`dpsweep.workers.trials.ranks.Lending`, in which a rank may need another layer, or none.

Loading this module loads FSDP, which takes a second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils import _pytree as pytree

from dpsweep.workers.gradients.divided import is_divided
from dpsweep.workers.trials.divisible import layers_to_divide
from dpsweep.workers.trials.ranks import Lending


def divide(model: nn.Module, lending: Lending, device: torch.device) -> nn.Module:
    """Leave this rank a part of each frozen parameter of ``model``, on the device; all ranks call it alike.

    Trained parameters and buffers stay whole. A layer is a group that is gathered together; the other frozen
    parameters, such as embeddings, are one more, gathered for the whole pass.
    Raises: InvalidInput for a model that cannot be divided.
    """
    mesh = init_device_mesh(device.type, (lending.size,))
    whole = {each for each in model.parameters() if each.requires_grad or not each.dim()}
    layers = layers_to_divide(model)
    for layer in layers:
        layer.register_forward_hook(_without_views)  # before FSDP's own
    for part in (*layers, model):
        divided = fully_shard(part, mesh=mesh, ignored_params=whole, reshard_after_forward=True)
        divided.set_custom_all_gather(cast(Any, _Gathering(lending, divided)))
    return model


def _without_views(layer: nn.Module, given: object, output: object) -> object:
    """Copy views among a layer's outputs: a change in place would take away the hook that gathers it for backward."""
    return pytree.tree_map(lambda each: each.clone() if isinstance(each, Tensor) and each._is_view() else each, output)


def whole_values(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a divided model on the CPU, gathered layer by layer; the other ranks lend meanwhile."""
    found = {name: None if is_divided(each) else each.cpu() for name, each in model.state_dict().items()}
    for place, part in model.named_modules():
        if isinstance(part, FSDPModule):
            gathered: Any = part
            gathered.unshard()
            for name, value in gathered.named_parameters(place, remove_duplicate=False):
                if not is_divided(value) and found.get(name, value) is None:
                    found[name] = value.detach().cpu().clone()
            gathered.reshard()
    return {name: value for name, value in found.items() if value is not None}


class _Gathering:
    """How FSDP gathers one group: torch's interface `AllGather`, which it does not export."""

    def __init__(self, lending: Lending, module: FSDPModule) -> None:
        self._lending, self._module = lending, module
        self._place = lending.add(self._own_part)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for the parts of all ranks."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: object, async_op: bool = False) -> None:
        """Fill the output with the parts of all ranks; the input is this rank's. Names are FSDP's."""
        self._lending.borrow(self._place, output_tensor.view(torch.uint8))

    def _own_part(self) -> Tensor:
        """Return this rank's part, padded as FSDP expects, as bytes; also while the group is gathered."""
        return torch.cat([each.view(torch.uint8).flatten() for each in self._padded()])

    def _padded(self) -> Iterator[Tensor]:
        state: Any = self._module._get_fsdp_state()
        return (each._sharded_param_data for each in state._fsdp_param_group.fsdp_params)
