"""Parameters that a module reads in its own forward, such as class tokens and scales.

During a forward pass such a parameter is replaced by a `PerRow`, which has the parameter's shape but a separate value
for every row of the batch. An operation on `PerRow` tensors alone runs per row and returns another `PerRow`; an
operation with a tensor of the batch returns an ordinary tensor of the batch. The module's children run on the whole
batch as usual, each by its own rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from dpsweep.workers.gradients.embedding import lookups
from dpsweep.workers.gradients.layers import Layer, Unverified
from dpsweep.workers.gradients.linear import affine
from dpsweep.workers.gradients.rules import Differentiate, Recorder


@contextmanager
def reading_as_verified() -> Iterator[None]:
    """Raise Unverified for `NotCovered` within this context, in which a model runs that has been verified."""
    try:
        yield
    except NotCovered as error:
        raise Unverified(
            f"the model reads its parameters in another way than in the batch that was verified: {error}"
        ) from error


class NotCovered(Exception):
    """An operation on a parameter cannot be computed per row; the module runs per example instead."""


@dataclass
class Reading:
    """One call of a layer that reads its parameters per row.

    An argument of an operation holds the batch if its first axis has the length of the batch, and never had another
    length at the same position. A later batch may happen to have as many rows as the argument has entries. It also does
    if it stacks the rows of the batch with other axes (`Axes`).
    """

    layer: Layer
    rows: int
    recorder: Recorder
    operations: int = 0

    def per_row(self, argument: int, length: int) -> int:
        """Return the entries of each row on the first axis of an argument of the current operation; 0 for another axis.

        `length`: of the axis.
        """
        return self.layer.entries((f"operation {self.operations}", argument), length, self.rows)


class PerRow(Tensor):
    """A tensor of ``shape`` with a separate value for every row of the batch: ``by_row`` [rows, *shape].

    `parameter`: the parameter that it stands for, with its local name; None if it was computed from parameters.

    Raises: NotCovered where an operation mixes rows, needs a value, or leaves no batch on the first axis.
    """

    by_row: Tensor
    reading: Reading
    parameter: tuple[str, nn.Parameter] | None

    @staticmethod
    def of(values: Tensor, reading: Reading, parameter: tuple[str, nn.Parameter] | None = None) -> PerRow:
        """Return the tensor with ``values`` [rows, *shape]."""
        made: PerRow = Tensor._make_wrapper_subclass(
            PerRow, values.shape[1:], dtype=values.dtype, device=values.device, requires_grad=values.requires_grad
        )
        made.by_row, made.reading, made.parameter = values, reading, parameter
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in _SIZED:
            return _sized(func, args, kwargs or {})
        return _applied(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as a function, not as a class method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotCovered(f"{func} was called on the parameter itself")


_PROPERTIES = ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "layout", "is_cuda", "is_cpu", "is_meta")

_METADATA: Final = frozenset(
    {getattr(Tensor, name).__get__ for name in (*_PROPERTIES, "is_sparse", "is_quantized")}
    | {Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.__len__, Tensor.stride}
    | {Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex, torch.numel}
    | {Tensor.is_contiguous, Tensor.get_device, Tensor.element_size}
)
"""Properties and functions of a tensor that are equal for all rows."""

_SIZED: Final = frozenset({Tensor.expand, Tensor.repeat, Tensor.tile, torch.broadcast_to, Tensor.broadcast_to})
"""Operations whose size arguments may be the length of the batch."""

_BROADCAST: Final = frozenset(
    {torch.add, torch.mul, torch.sub, torch.div, Tensor.add, Tensor.mul, Tensor.sub, Tensor.div}
    | {Tensor.__add__, Tensor.__radd__, Tensor.__mul__, Tensor.__rmul__, Tensor.__sub__, Tensor.__rsub__}
    | {Tensor.__truediv__, Tensor.__iadd__, Tensor.__imul__, Tensor.add_, Tensor.mul_}
)
"""Elementwise operations on two tensors, which need no vmap."""


def as_batch(value: Any) -> Any:
    """Return a `PerRow` with a first axis of length 1 as a tensor of the batch, and other values unchanged.

    Raises: NotCovered for a `PerRow` of another shape.
    """
    if not isinstance(value, PerRow):
        return value
    if value.dim() == 0 or value.shape[0] != 1:
        raise NotCovered(f"a layer was given a parameter of shape {list(value.shape)} without the batch")
    return value.by_row.flatten(0, 1)


@contextmanager
def reading_per_row(reading: Reading, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Within this context the parameters of the layer are ``values`` [rows, *shape], by local name."""
    layer = reading.layer
    replaced = []
    try:
        for local, value in values.items():
            path, _, name = local.rpartition(".")
            owner = layer.module.get_submodule(path)._parameters
            replaced.append((owner, name, owner[name]))
            owner[name] = PerRow.of(value, reading, (local, layer.module.get_parameter(local)))  # type: ignore[assignment]  # no nn.Parameter, but read as one
        yield
    finally:
        for owner, name, parameter in replaced:
            owner[name] = parameter


def _sized(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Expand or repeat a parameter. A first size equal to the batch length is replaced by 1, as each row runs alone."""
    tensor, *rest = args
    if kwargs or not isinstance(tensor, PerRow):
        raise NotCovered(f"{func.__name__} was called with {sorted(kwargs) or 'another tensor'}")
    sizes = list(rest[0]) if len(rest) == 1 and isinstance(rest[0], Sequence) else rest
    reading = tensor.reading
    reading.operations += 1
    entries = reading.per_row(0, sizes[0]) if len(sizes) >= max(1, tensor.dim()) else 0
    if entries:
        sizes = [entries, *sizes[1:]]
    values = _each_row(lambda value: func(value, sizes), [tensor.by_row])
    return values.flatten(0, 1) if entries else PerRow.of(values, reading)


def _applied(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Apply an operation to every row."""
    leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
    reading: Reading = next(leaf.reading for leaf in leaves if isinstance(leaf, PerRow))
    reading.operations += 1
    of_rows: dict[int, Tensor] = {}
    entries = 0
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, PerRow):
            of_rows[index] = leaf.by_row
        elif isinstance(leaf, Tensor) and leaf.dim():
            found = reading.per_row(index, leaf.shape[0])
            if found:
                of_rows[index], entries = leaf.unflatten(0, (reading.rows, found)), found
    if func in _WITH_RULES and args and entries and not isinstance(args[0], PerRow) and 0 in of_rows:
        output = _WITH_RULES[func](reading, *args, **kwargs)
        if output is not None:
            return output
    if entries == 1 and func in _BROADCAST and len(leaves) == len(of_rows) == 2:
        return _broadcast(func, leaves, structure)

    def one(*values: Tensor) -> Any:
        row = list(leaves)
        for index, value in zip(of_rows, values, strict=True):
            row[index] = value
        row_args, row_kwargs = pytree.tree_unflatten(row, structure)
        return func(*row_args, **row_kwargs)

    joined = _each_row(one, list(of_rows.values()))
    if entries:
        return pytree.tree_map(lambda values: _of_batch(values, entries, reading), joined)
    return pytree.tree_map(lambda values: PerRow.of(values, reading), joined)


def _embedding(
    reading: Reading,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    """``functional.embedding``; None if the weight is not a parameter as it is, or gradients depend on other rows."""
    found = _as_it_is(weight)
    if found is None or max_norm is not None or scale_grad_by_freq:
        return None
    name, table = found
    differentiate = lookups(input, reading.recorder.examples, name, len(table), padding_idx)
    return _recorded(reading, functional.embedding(input, table, padding_idx), differentiate, input)


def _linear(reading: Reading, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """``functional.linear``; None if weight or bias were computed from parameters."""
    of_weight, of_bias = _as_it_is(weight), ("", bias) if bias is None else _as_it_is(bias)
    if of_weight is None or of_bias is None:
        return None
    differentiate = affine(input, reading.recorder.examples, of_weight[0], of_bias[0])
    return _recorded(reading, functional.linear(input, of_weight[1], of_bias[1]), differentiate, input)


def _as_it_is(value: Tensor) -> tuple[str, Tensor] | None:
    """Return a parameter with its local name, or a constant with none; None if computed from parameters."""
    return value.parameter if isinstance(value, PerRow) else ("", value)


_WITH_RULES: Final[Mapping[Callable[..., Any], Callable[..., Any]]] = {
    functional.embedding: _embedding,
    functional.linear: _linear,
}
"""Operations whose per-example gradients need no separate values: how they run on the batch, or None if not covered."""


def _recorded(reading: Reading, output: Tensor, differentiate: Differentiate, activation: Tensor) -> Tensor:
    output = output.clone() if output._is_view() else output  # an in-place change of a view removes its edge
    reading.recorder.record([output], differentiate, activation)
    return output


def _broadcast(func: Callable[..., Any], leaves: list[Any], structure: pytree.TreeSpec) -> Any:
    """Apply an elementwise operation to a tensor of the batch and a parameter, aligned at the last axis."""
    (axes,) = (leaf.dim() for leaf in leaves if not isinstance(leaf, PerRow))
    aligned = [_aligned(leaf, axes) if isinstance(leaf, PerRow) else leaf for leaf in leaves]
    broadcast_args, broadcast_kwargs = pytree.tree_unflatten(aligned, structure)
    return func(*broadcast_args, **broadcast_kwargs)


def _aligned(parameter: PerRow, axes: int) -> Tensor:
    """Return the values of a parameter as a tensor of the batch with ``axes`` axes."""
    values = parameter.by_row
    if parameter.dim() == axes and parameter.shape[0] == 1:
        return values.flatten(0, 1)
    if parameter.dim() >= axes:
        raise NotCovered(f"a parameter of shape {list(parameter.shape)} has an axis where the batch is")
    return values.reshape(len(values), *[1] * (axes - 1 - parameter.dim()), *parameter.shape)


def _each_row(one: Callable[..., Any], tensors: list[Tensor]) -> Any:
    try:
        with sdpa_kernel(SDPBackend.MATH):  # under vmap torch would choose a kernel without a gradient of the mask
            return vmap(one, randomness="different")(*tensors)
    except (RuntimeError, ValueError, TypeError) as error:
        raise NotCovered(str(error)) from error


def _of_batch(values: Any, entries: int, reading: Reading) -> Any:
    """[rows, entries, ...] -> [rows entries, ...]. Raises: NotCovered for another shape."""
    if not isinstance(values, Tensor) or values.dim() < 2 or values.shape[1] != entries:
        raise NotCovered(f"an operation in {reading.layer.described} leaves no batch on the first axis")
    return values.flatten(0, 1)
