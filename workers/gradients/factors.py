"""Per-example gradients of one parameter in factored form.

The per-example gradients of a layer are functions of its input activation ``a`` and its output gradient ``g``. Each
class of `ExampleGradients` is one such function, with cheap norms and weighted sums. B is the number of examples; sums
and norms are computed in float32 or wider.

Cheap norms may be inaccurate for examples whose terms cancel. Such norms are set to NaN (`mark_inaccurate`) and
computed again after the whole pass; a check after every layer would leave the device idle.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from typing import NamedTuple

import torch
from torch import Tensor

from dpsweep.workers.gradients.planners import Alternative, Planner
from dpsweep.workers.machine.triton_support import has_triton

HALF_PRECISION = (torch.float16, torch.bfloat16)

CANCELLATION = 0.05
"""Smallest accurate ratio of a squared norm from Gram matrices to the sum of the squared norms of its terms."""

COHERENT_CANCELLATION = 0.01
"""Smallest accurate ratio of a squared norm from Gram matrices to the sum of its absolute terms."""

LARGE_SQUARE = 1e10
"""Largest square of one factor for which underflow in the square of the other factor is negligible.

Above it, the error of the product of both squares may exceed 1e-26 = (1e-5 * 1e-8)^2, which is the accepted relative
error of a norm times the smallest clipping bound, squared.
"""

LOST_SHARE = 1e-30
"""Largest share of a large square that can be lost by underflow in its factors."""

_INSTANTIATED_AT_ONCE = 16
"""Number of examples whose gradients are instantiated at once to compute precise norms."""

_BLOCK = 4096
"""Largest number of squares that one float32 sum adds accurately."""


class ExampleGradients(ABC):
    """The gradients g_1 .. g_B of one parameter of shape S."""

    @abstractmethod
    def norm_sq(self, planner: Planner) -> Tensor:
        """Return [B]: squared L2 norm of every g_i, in the cheapest way; NaN where the result is inaccurate."""

    def prepare(self, planner: Planner) -> tuple[Tensor, ExampleGradients]:
        """Return norm_sq, and the form of the gradients that makes it and a later `weighted_sum` cheapest."""
        return self.norm_sq(planner), self

    @abstractmethod
    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return [*S]: sum_i weights[i] g_i; weights [B] and all g_i must be finite."""

    @abstractmethod
    def instantiate(self) -> Tensor:
        """Return [B, *S]: every g_i."""

    @abstractmethod
    def select(self, rows: Tensor) -> ExampleGradients:
        """Return the gradients of the examples at the index tensor ``rows``."""

    def precise_norm_sq(self, rows: Tensor) -> Tensor:
        """Return [b]: squared L2 norms of the examples at ``rows``, accurate for every finite gradient."""
        parts = torch.split(rows, _INSTANTIATED_AT_ONCE)
        return torch.cat([sum_of_squares(self.select(part).instantiate()) for part in parts])


def widen(tensor: Tensor) -> Tensor:
    """Convert half precision to float32, in which norms and sums are accumulated."""
    return tensor.float() if tensor.dtype in HALF_PRECISION else tensor


def wide(tensor: Tensor) -> torch.dtype:
    """Return the dtype of `widen` of the tensor."""
    return torch.float32 if tensor.dtype in HALF_PRECISION else tensor.dtype


def in_matrix_units(factor: Tensor) -> bool:
    """Return whether the device multiplies by ``factor`` as it is, and adds the exact products in float32.

    The matrix units of CUDA do so for bfloat16, at many times the speed of float32.
    """
    return factor.dtype == torch.bfloat16 and factor.device.type == "cuda"


def as_multiplied(activation: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the input of a layer and the gradient of its output in the dtype in which `product` takes them.

    A layer whose output is bfloat16 has rounded its input to bfloat16 as well, by autocast.
    """
    return (activation.to(grad.dtype), grad) if in_matrix_units(grad) else (widen(activation), widen(grad))


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right of two matrices, or of two stacks of matrices [B, ...], in float32 or wider.

    If only one of them is multiplied in matrix units, the other is split into two bfloat16 matrices. They keep 16 bits
    of each value, so the relative error of every term is at most 2^-17.
    """
    if in_matrix_units(left) and in_matrix_units(right):
        multiply = torch.mm if left.dim() == 2 else torch.bmm
        result: Tensor = multiply(left, right, out_dtype=torch.float32)
        return result
    if in_matrix_units(left):
        return sum_of(product(left, part) for part in _halves(right, right.new_ones(1)))
    if in_matrix_units(right):
        return sum_of(product(part, right) for part in _halves(left, left.new_ones(1)))
    return widen(left) @ widen(right)


def sum_of(products: Iterable[Tensor]) -> Tensor:
    """Return the sum of tensors that are used nowhere else; the first one is overwritten."""
    return reduce(Tensor.add_, products)


def scaled_parts(values: Tensor, weights: Tensor, partner: Tensor) -> Sequence[Tensor]:
    """Return tensors whose sum is values [B, ...] times weights [B], each as `product` takes it with ``partner``."""
    return _halves(values, weights) if in_matrix_units(partner) else (_scaled(values, weights),)


def _scaled(values: Tensor, weights: Tensor) -> Tensor:
    return values * weights.view(-1, *[1] * (values.dim() - 1))


def _halves(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return two bfloat16 tensors whose sum is values [B, ...] times weights, [B] or [1], up to rounding."""
    if has_triton(values.device):
        from dpsweep.workers.gradients.fused_norms import scaled_halves

        return scaled_halves(values, weights)
    upper, lower = in_bfloat16(_scaled(values, weights), 2)
    return upper, lower


def in_bfloat16(values: Tensor, count: int) -> Iterator[Tensor]:
    """Yield bfloat16 parts of ``values``, which err by 2^-9 of each value for one, 2^-17 for two, 0 for three."""
    yield (part := values.to(torch.bfloat16))
    for _ in range(count - 1):
        values = values - part
        yield (part := values.to(torch.bfloat16))


def sum_of_squares(gradients: Tensor) -> Tensor:
    """Return sums [B] of squares of [B, ...], in blocks: one float32 sum of n squares may err by n / 2^24 of it."""
    flat = gradients if gradients.dim() == 2 else gradients.reshape(len(gradients), -1)
    whole = flat.shape[1] - flat.shape[1] % _BLOCK
    if whole <= _BLOCK:
        return _squared_norms(flat)
    blocks = torch.unflatten(flat[:, :whole], 1, (-1, _BLOCK))
    return _squared_norms(blocks).sum(1).add_(_squared_norms(flat[:, whole:]))


def summed_rows(per_row: Tensor, examples: int) -> Tensor:
    """Return [B, ...]: sums of [B K, ...] over the K rows of every example; the same tensor if K is 1."""
    if len(per_row) == examples:
        return per_row
    return per_row.view(examples, -1, *per_row.shape[1:]).sum(1)


def _squared_norms(vectors: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(vectors, dim=-1)
    return norms.mul_(norms)


def gram_norm_sq(activations: Tensor, grads: Tensor) -> Tensor:
    """Return ghost norms: squared norms [B] of sum_t g_t (x) a_t from two Gram matrices, NaN for inaccurate ones.

    The squared norm is sum_{t,s} <a_t, a_s> <g_t, g_s> (Goodfellow 2015; Li et al. 2022, Sec. 4.1). activations, grads:
    Gram matrices [B, T, T] of a_t and of g_t; ``activations`` is overwritten.

    Each of the T^2 terms has a rounding error of about eps |a_t| |a_s| |g_t| |g_s|. If these errors are independent,
    the total error is about eps sum_t |a_t|^2 |g_t|^2, which is eps times the squared norm when the T products are
    orthogonal. If positions repeat, their errors are equal and add up to at most eps times the sum of absolute terms. A
    result is inaccurate if it is far below either sum, because terms cancelled, or as small as what underflow in the
    factors may lose.
    """
    if grads.dtype == torch.float32 and has_triton(grads.device):
        from dpsweep.workers.gradients.fused_norms import ghost_norms

        limits = CANCELLATION, COHERENT_CANCELLATION, LOST_SHARE, LARGE_SQUARE
        return ghost_norms(activations.contiguous(), grads.contiguous(), *limits)
    widths = activations.diagonal(dim1=1, dim2=2), grads.diagonal(dim1=1, dim2=2)
    squares = torch.linalg.vecdot(*widths)
    underflow = torch.threshold(torch.maximum(*widths).amax(1), LARGE_SQUARE, 0.0).mul_(LOST_SHARE)
    terms = activations.mul_(grads).flatten(1)
    norm_sq = terms.sum(1).clamp_min_(0.0)
    absolute = terms.abs_().sum(1)
    lost = torch.maximum(squares.mul_(CANCELLATION), absolute.mul_(COHERENT_CANCELLATION)).add_(underflow)
    return mark_inaccurate(norm_sq, norm_sq < lost)


def mark_inaccurate(norm_sq: Tensor, inaccurate: Tensor) -> Tensor:
    """Return norm_sq [B] with NaN where the mask ``inaccurate`` [B] says that it is to be computed again."""
    return norm_sq.masked_fill_(inaccurate, math.nan)


@dataclass(frozen=True)
class Instantiated(ExampleGradients):
    """Gradients stored as one tensor [B, *S]."""

    gradients: Tensor

    @cached_property
    def squared_norms(self) -> Tensor:
        return sum_of_squares(self.gradients)

    def norm_sq(self, planner: Planner) -> Tensor:
        return self.squared_norms

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self.gradients.dim() == 2:
            return torch.mv(self.gradients.mT, weights)
        flat = self.gradients.reshape(len(weights), -1)
        return (weights @ flat).view(self.gradients.shape[1:])

    def instantiate(self) -> Tensor:
        return self.gradients

    def select(self, rows: Tensor) -> Instantiated:
        return Instantiated(self.gradients[rows])

    @property
    def is_small(self) -> bool:
        """Return whether gradients are vectors so short that starting an operation takes longer than computing."""
        return self.gradients.dim() == 2 and self.gradients.shape[1] <= _BLOCK


def square_together(gradients: Iterable[ExampleGradients]) -> None:
    """Compute and cache the squared norms of small instantiated gradients, in one operation for each size."""
    by_form = dict[Hashable, list[Instantiated]]()
    for each in gradients:
        if isinstance(each, Instantiated) and each.is_small:
            by_form.setdefault((each.gradients.shape, each.gradients.dtype), []).append(each)
    for alike in by_form.values():
        if len(alike) > 1:
            together = _squared_norms(torch.stack([each.gradients for each in alike]))
            for each, squared_norms in zip(alike, together, strict=True):
                vars(each)["squared_norms"] = squared_norms  # sets the cached property


def sum_together(gradients: Mapping[str, ExampleGradients], weights: Tensor) -> Mapping[str, Tensor]:
    """Return `ExampleGradients.weighted_sum` by name, in one operation for all small instantiated gradients."""
    small = {
        name: each.gradients for name, each in gradients.items() if isinstance(each, Instantiated) and each.is_small
    }
    if len(small) < 2:
        return {name: each.weighted_sum(weights) for name, each in gradients.items()}
    together = torch.mv(torch.cat(list(small.values()), 1).mT, weights)
    done = dict(zip(small, together.split([each.shape[1] for each in small.values()]), strict=True))
    return {name: done[name] if name in done else each.weighted_sum(weights) for name, each in gradients.items()}


@dataclass(frozen=True)
class Summed(ExampleGradients):
    """Sum of the gradients of a parameter that is used several times: shared, or in a module that is called twice."""

    parts: Sequence[ExampleGradients]

    def norm_sq(self, planner: Planner) -> Tensor:
        return sum_of_squares(self.instantiate())

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return reduce(torch.add, (part.weighted_sum(weights) for part in self.parts))

    def instantiate(self) -> Tensor:
        return reduce(torch.add, (part.instantiate() for part in self.parts))

    def select(self, rows: Tensor) -> ExampleGradients:
        return Summed([part.select(rows) for part in self.parts])


Prepared = tuple[Tensor, ExampleGradients]
"""norm_sq [B], and the gradients in the form that was computed for it."""


class NormMethod(NamedTuple):
    """One way to compute norms, with estimated seconds for the norms and for a later weighted sum.

    kept: number of values that it holds until then.
    """

    norm_seconds: float
    sum_seconds: float
    prepare: Callable[[], Prepared]
    kept: int = 0


class Planned(ExampleGradients):
    """Gradients whose norms can be computed in several ways, among which the planner chooses."""

    @abstractmethod
    def key(self) -> tuple[Hashable, ...]:
        """Return everything that determines the methods and their costs, except the number of examples."""

    @abstractmethod
    def methods(self) -> Mapping[str, NormMethod]:
        """Return the ways to compute norms, by name."""

    def norm_sq(self, planner: Planner) -> Tensor:
        alternatives = {
            name: Alternative(method.norm_seconds, method.prepare) for name, method in self.methods().items()
        }
        return planner.choose(("norm", *self.key()), alternatives)[0]

    def prepare(self, planner: Planner) -> Prepared:
        alternatives = {
            name: Alternative(
                method.norm_seconds + method.sum_seconds, method.prepare, partial(_both, method), method.kept
            )
            for name, method in self.methods().items()
        }
        return planner.choose(("prepare", *self.key()), alternatives)


def _both(method: NormMethod) -> Tensor:
    norm_sq, gradients = method.prepare()
    return gradients.weighted_sum(norm_sq)


def keep(gradients: Tensor) -> Prepared:
    """Return squared norms of instantiated gradients [B, *S], and these gradients for a later weighted sum."""
    kept = Instantiated(gradients)
    return kept.squared_norms, kept
