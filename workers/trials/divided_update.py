"""The update of parameters that ranks have divided: each rank changes its part, and has the optimizer's state of it.

Rank 0 takes one parameter after the other. It adds the clipped sums of the ranks in their order, adds the noise, whose
key it alone has, and sends each rank its part of the result. So it holds one whole parameter at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpsweep.workers.gradients.divided import part_of
from dpsweep.workers.training.optimizers import Optimizer, Parameters
from dpsweep.workers.trials.ranks import Lending


class DividedOptimizer:
    """`dpsweep.workers.training.optimizers.Optimizer` of this rank's parts of the parameters.

    Its state is that of whole parameters, so that a trial may go on in either way. To take it, rank 0 borrows the parts
    of the others, parameter by parameter.
    """

    def __init__(self, make: Callable[[Parameters], Optimizer], parameters: Parameters, lending: Lending) -> None:
        parts = {name: part for name, each in parameters.items() if (part := part_of(each)) is not None}
        self.parts, self._optimizer = parts, make({name: part.own for name, part in parts.items()})
        self._shapes, self._lending = {name: each.shape for name, each in parameters.items()}, lending
        self._places = {name: lending.add(partial(self._lent, name)) for name in parts}

    def step(self, gradients: Mapping[str, Tensor], factor: float, noise_std: float) -> None:
        """Update this rank's parts. gradients: of them, flat."""
        self._optimizer.step(gradients, factor, noise_std)

    def state(self) -> dict[str, Any]:
        state = self._optimizer.state()
        whole = {name: self._whole(name, _of(state, name)) for name in self._places}
        return _mapped(state, lambda name, value: next(whole[name]))

    def restore(self, state: Mapping[str, Any]) -> None:
        self._optimizer.restore(_mapped(state, lambda name, value: self.parts[name].of(value).clone()))

    def _lent(self, name: str) -> Tensor:
        """Return the bytes of this rank's tensors for a parameter, each padded to the longest of any rank."""
        most = max(self.parts[name].sizes)
        kept = [_padded(each, most).view(torch.uint8) for each in _of(self._optimizer.state(), name)]
        return torch.cat(kept) if kept else torch.zeros(0, dtype=torch.uint8)

    def _whole(self, name: str, kept: list[Tensor]) -> Iterator[Tensor]:
        """Yield the tensors of all ranks for a parameter, joined, on the CPU."""
        if not kept:
            return
        own, sizes = self._lent(name), self.parts[name].sizes
        received = own.new_empty(len(sizes) * len(own))
        self._lending.borrow(self._places[name], received)
        table, start = received.view(len(sizes), -1), 0
        for each in kept:
            length = max(sizes) * each.itemsize
            values = table[:, start : start + length].flatten().view(each.dtype)[: sum(sizes)]
            yield values.view(self._shapes[name]).cpu()
            start += length


def _of(state: Mapping[str, Any], name: str) -> list[Tensor]:
    """Return the tensors that an optimizer keeps of a parameter, in the order of `_mapped`."""
    by_name = [value for value in state.values() if isinstance(value, Mapping) and name in value]
    return [each for value in by_name for each in pytree.tree_leaves(value[name])]


def _mapped(state: Mapping[str, Any], change: Callable[[str, Tensor], Tensor]) -> dict[str, Any]:
    """Return the state of an optimizer with each tensor changed that it keeps of a parameter, by its name."""
    return {
        key: {name: pytree.tree_map(partial(change, name), each) for name, each in value.items()}
        if isinstance(value, Mapping)
        else value
        for key, value in state.items()
    }


def _padded(values: Tensor, size: int) -> Tensor:
    return torch.cat([values, values.new_zeros(size - len(values))])
