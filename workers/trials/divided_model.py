"""The parameters of a model's layers, divided among the ranks of a trial, and their update.

Each rank keeps a part of every parameter. A layer's parameters are gathered before it runs, forward or backward, and
freed afterwards. Values are gathered and never computed, so that results have the bits of whole parameters.

Ranks do not gather the same layers in the same order: they verify other rows and have other numbers of micro-batches,
and rank 0 makes some passes alone. Each gathering is therefore a round of `dpsweep.workers.trials.ranks.Lending`, in
which a rank may need another layer, or none. This is why FSDP does not divide them: it expects equal passes at all
ranks, sums gradients itself, and gives the engine other parameters while they are gathered.

To update them, rank 0 takes one parameter after the other. It adds the clipped sums of the ranks in their order, adds
the noise, whose key it alone has, and sends each rank its part of the result. So it holds one whole parameter at a
time. Each rank changes its part, and has the optimizer's state of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpsweep.workers.gradients.divided import Part, note_part, part_of, part_sizes
from dpsweep.workers.gradients.micro_batches import with_padding
from dpsweep.workers.training.optimizers import Optimizer, Parameters
from dpsweep.workers.trials.divisible import is_shared_out, layers_to_divide
from dpsweep.workers.trials.ranks import Lending

_ALIGNED: Final = 16
"""Bytes to whose multiples the part of each parameter is padded; the widest number has as many."""


def divide(model: nn.Module, lending: Lending, rank: int, device: torch.device) -> nn.Module:
    """Leave this rank a part of each parameter of ``model`` that ranks divide, on the device; all ranks call it alike.

    Buffers stay whole. A layer is a group that is gathered together. The other parameters, such as embeddings, are one
    more, gathered for the whole pass. Raises: InvalidInput for a model that cannot be divided.
    """
    passes, taken = _Passes(), set[nn.Parameter]()
    for module in (*layers_to_divide(model, lending.shard), model):
        own = [each for each in module.parameters() if is_shared_out(each, lending.shard) and each not in taken]
        taken.update(own)
        group = _Group(own, lending, rank, device, passes)
        module.register_forward_pre_hook(group.before_forward)
        module.register_forward_hook(group.after_forward, with_kwargs=True, always_call=True)
        passes.outermost = group  # that of the model comes last
    return model


class _Passes:
    """The groups that a backward pass has gathered. outermost: gathered for all of it."""

    def __init__(self) -> None:
        self.outermost: _Group | None = None
        self._backward = set[_Group]()

    def are_backward_in(self, group: _Group) -> bool:
        """Return whether a group is gathered for a backward pass, which may call its layer again (checkpointing)."""
        return group in self._backward

    def begin_backward(self, group: _Group) -> None:
        """Gather a group, and free that of the layer behind it, which autograd has ended by then.

        The output of the model may be that of its last layer, which is then gathered already.
        """
        if not self._backward:
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self.end_backward)
        before = set() if group is self.outermost else self._backward - {group, self.outermost}
        for each in before:
            self._backward.remove(each)
            each.free()
        self._backward.add(group)
        group.gather()

    def end_backward(self) -> None:
        """Free all groups."""
        while self._backward:
            self._backward.pop().free()


@dataclass(frozen=True)
class _Member:
    """A parameter of a group. whole: its gathered values. at, length: place of a rank's part in bytes of the group."""

    parameter: nn.Parameter
    whole: Tensor
    away: Tensor
    part: Part
    at: int
    length: int


class _Group:
    """`dpsweep.workers.gradients.divided.Group`: the parameters of a layer, or those outside all layers."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], lending: Lending, rank: int, device: torch.device, passes: _Passes
    ) -> None:
        self._lending, self._passes, self._device = lending, passes, device
        self._parameters = tuple(parameters)
        lengths = [each.itemsize * max(part_sizes(each.numel(), lending.size)) for each in parameters]
        ends = [0]
        for length in lengths:
            ends.append(ends[-1] + -(-length // _ALIGNED) * _ALIGNED)
        self._bytes = torch.zeros(ends[-1], dtype=torch.uint8, device=device)
        self._members = [
            self._member(each, at, length, rank)
            for each, at, length in zip(parameters, ends[:-1], lengths, strict=True)
        ]
        self._place = lending.add(lambda: self._bytes)
        self._is_gathered = True
        self.free()

    @torch.no_grad()
    def _member(self, parameter: nn.Parameter, at: int, length: int, rank: int) -> _Member:
        """Return a member whose parameter has its values still, and copy this rank's part of them."""
        sizes = part_sizes(parameter.numel(), self._lending.size)
        own = self._bytes[at : at + sizes[rank] * parameter.itemsize].view(parameter.dtype)
        part = Part(nn.Parameter(own, requires_grad=False), rank, sizes, self)
        own.copy_(part.of(parameter.detach()))
        note_part(parameter, part)
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=self._device)
        away = torch.full((), math.nan if parameter.is_floating_point() else 0).to(whole)
        return _Member(parameter, whole, away.expand(parameter.shape), part, at, length)

    @property
    def is_gathered(self) -> bool:
        return self._is_gathered

    @torch.no_grad()
    def gather(self) -> None:
        if self._is_gathered or not self._members:
            return
        torch._C._autograd._unsafe_set_version_counter(self._parameters, self._versions)
        received = torch.empty(self._lending.size * len(self._bytes), dtype=torch.uint8, device=self._device)
        self._lending.borrow(self._place, received)
        parts = received.view(self._lending.size, -1)
        for each in self._members:
            # Autograd saves views of a parameter as well. As the memory is that of the parameter, they get it back.
            each.whole.untyped_storage().resize_(each.whole.nbytes)
            values = parts[:, each.at : each.at + each.length].flatten()[: each.whole.nbytes]
            each.whole.view(-1).view(torch.uint8).copy_(values)
            if each.part.change is not None:
                each.part.change(each.whole)
            each.parameter.data = each.whole
        self._is_gathered = True

    def free(self) -> None:
        if not self._is_gathered:
            return
        for each in self._members:
            each.parameter.data = each.away
            each.whole.untyped_storage().resize_(0)
        # Autograd then refuses a backward pass around the hooks, which would read freed memory.
        self._versions = tuple(each._version for each in self._parameters)
        torch.autograd.graph.increment_version(self._parameters)
        self._is_gathered = False

    def before_forward(self, module: nn.Module, given: object) -> None:
        if self._passes.outermost is self:
            self._passes.end_backward()  # of a pass that failed
        self.gather()

    def after_forward(self, module: nn.Module, given: object, named: object, output: object) -> object:
        if not self._passes.are_backward_in(self):
            self.free()
        inputs = {id(each) for each in pytree.tree_leaves((given, named))}
        output = pytree.tree_map_only(Tensor, partial(_own, inputs), output)
        for each in pytree.tree_leaves(output):
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(self._before_backward)
        return output

    def _before_backward(self, gradient: Tensor) -> None:
        self._passes.begin_backward(self)


def _own(inputs: Collection[int], output: Tensor) -> Tensor:
    """Return an output of a layer, on which a hook gathers it for backward: a copy of a view, and of an input.

    A change in place would take the hook off a view. On an input there is that of the layer before, which must be
    gathered last.
    """
    return output.clone() if output._is_view() or id(output) in inputs else output


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
        kept = [with_padding(each, most).view(torch.uint8) for each in _of(self._optimizer.state(), name)]
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
