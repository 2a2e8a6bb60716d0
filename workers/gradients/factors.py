"""Per-example gradients of one parameter, kept as the factors they are products of.

A layer whose parameters see the activation ``a`` and whose output receives the gradient ``g`` has per-example
gradients that are cheap functions of the pair (a, g). Each class of `ExampleGradients` is one such function, and
answers what the engine asks. B is the number of examples; sums and norms are taken in float32 or wider.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from workers.gradients.planning import Alternative, Planner

HALF_PRECISION = (torch.float16, torch.bfloat16)

CANCELLATION = 0.05
"""Below this share of the squared norms of its terms, a squared norm from Gram matrices has lost too many digits."""

COHERENT_CANCELLATION = 0.01
"""The same share of the absolute terms of that sum."""

LARGE_SQUARE = 1e10
"""A factor's square above this lifts what underflow took from the square of the other factor above 1e-26: the squared
error that norms may have, 1e-5, at the smallest clipping bound, 1e-8."""

LOST_SHARE = 1e-30
"""At most this share of a large square is lost by underflow of its factors."""

_REPAIRED_AT_ONCE = 16
"""Examples whose instantiated gradients are in memory together."""

_BLOCK = 4096
"""So many squares are summed without loss in one go."""


class ExampleGradients(Protocol):
    """The gradients g_1 .. g_B of one parameter of shape S."""

    def norm_sq(self, planner: Planner) -> Tensor:
        """[B]: squared L2 norm of every g_i, in the cheapest way."""
        ...

    def prepare(self, planner: Planner) -> tuple[Tensor, ExampleGradients]:
        """norm_sq, and these gradients in a form that makes it and a later `weighted_sum` cheapest together."""
        ...

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """S: sum_i weights[i] g_i; weights [B] must be finite, and so must every g_i."""
        ...

    def instantiate(self) -> Tensor:
        """[B, *S]: every g_i."""
        ...

    def select(self, rows: Tensor) -> ExampleGradients:
        """Only the examples named by the index tensor ``rows``."""
        ...


def widen(tensor: Tensor) -> Tensor:
    """At least float32: norms of half-precision gradients are accumulated in single precision."""
    return tensor.float() if tensor.dtype in HALF_PRECISION else tensor


def sum_of_squares(gradients: Tensor) -> Tensor:
    """[B, ...] -> [B], in blocks: one running float32 sum of n squares understates it by up to n / 2^24, relatively."""
    flat = gradients if gradients.dim() == 2 else gradients.flatten(1)
    whole = flat.shape[1] - flat.shape[1] % _BLOCK
    if whole <= _BLOCK:
        return _squared_norms(flat)
    blocks = torch.unflatten(flat[:, :whole], 1, (-1, _BLOCK))
    return _squared_norms(blocks).sum(1).add_(_squared_norms(flat[:, whole:]))


def _squared_norms(vectors: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(vectors, dim=-1)
    return norms.mul_(norms)


def gram_norm_sq(activations: Tensor, grads: Tensor) -> tuple[Tensor, Tensor]:
    """sum_{t,s} <a_t, a_s> <g_t, g_s> from both Gram matrices [B, T, T], and which examples lost digits [B].

    It is the squared norm of sum_t g_t (x) a_t (Goodfellow 2015; Li et al. 2022, Sec. 4.1). Its T^2 terms are rounded
    by eps |a_t| |a_s| |g_t| |g_s| each, in quadrature by eps sum_t |a_t|^2 |g_t|^2: the squared norm itself, eps apart,
    where the T products are orthogonal. Terms of equal positions are rounded alike, so their errors add up, to at most
    eps times the sum of the absolute terms, which then are as large as their factors. Where the squared norm is far
    below either, terms cancelled; where it is as small as what underflow takes from the factors, they are lost, too.
    ``activations`` is overwritten.
    """
    widths = activations.diagonal(dim1=1, dim2=2), grads.diagonal(dim1=1, dim2=2)
    squares = (widths[0] * widths[1]).clamp_min(0.0).sum(1)
    underflow = LOST_SHARE * functional.threshold(torch.maximum(*widths).amax(1), LARGE_SQUARE, 0.0)
    terms = activations.mul_(grads).flatten(1)
    norm_sq = terms.sum(1).clamp_min_(0.0)
    absolute = torch.linalg.vector_norm(terms, 1, dim=1)
    lost = torch.maximum(CANCELLATION * squares, COHERENT_CANCELLATION * absolute).add_(underflow)
    return norm_sq, norm_sq < lost


def repaired(norm_sq: Tensor, cancelled: Tensor, gradients: ExampleGradients) -> Tensor:
    """norm_sq with the cancelled examples (a mask) recomputed from instantiated gradients."""
    if bool(cancelled.any()):
        for rows in torch.split(cancelled.nonzero().squeeze(1), _REPAIRED_AT_ONCE):
            norm_sq[rows] = sum_of_squares(gradients.select(rows).instantiate())
    return norm_sq


@dataclass(frozen=True)
class Instantiated:
    """Gradients already at hand as one tensor [B, *S]."""

    gradients: Tensor

    @cached_property
    def squared_norms(self) -> Tensor:
        return sum_of_squares(self.gradients)

    def norm_sq(self, planner: Planner) -> Tensor:
        return self.squared_norms

    def prepare(self, planner: Planner) -> tuple[Tensor, ExampleGradients]:
        return self.squared_norms, self

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self.gradients.dim() == 2:
            return torch.mv(self.gradients.mT, weights)
        return (weights @ self.gradients.flatten(1)).view(self.gradients.shape[1:])

    def instantiate(self) -> Tensor:
        return self.gradients

    def select(self, rows: Tensor) -> Instantiated:
        return Instantiated(self.gradients[rows])


@dataclass(frozen=True)
class Summed:
    """One parameter used several times (shared between modules, or a module called twice): the gradients add."""

    parts: Sequence[ExampleGradients]

    def norm_sq(self, planner: Planner) -> Tensor:
        return sum_of_squares(self.instantiate())

    def prepare(self, planner: Planner) -> tuple[Tensor, ExampleGradients]:
        return self.norm_sq(planner), self

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return reduce(torch.add, (part.weighted_sum(weights) for part in self.parts))

    def instantiate(self) -> Tensor:
        return reduce(torch.add, (part.instantiate() for part in self.parts))

    def select(self, rows: Tensor) -> ExampleGradients:
        return Summed([part.select(rows) for part in self.parts])


Prepared = tuple[Tensor, ExampleGradients]
"""norm_sq [B], and the gradients in the form it left them in."""


@dataclass(frozen=True)
class Method:
    """One way to norms. Estimated seconds for them, and for a weighted sum of what ``prepare`` leaves."""

    norm_seconds: float
    sum_seconds: float
    prepare: Callable[[], Prepared]


class Planned(ABC):
    """Gradients with several ways to their norms, among which the planner chooses."""

    @abstractmethod
    def key(self) -> tuple[Hashable, ...]:
        """Everything that the methods and their costs depend on."""

    @abstractmethod
    def methods(self) -> Mapping[str, Method]: ...

    def norm_sq(self, planner: Planner) -> Tensor:
        alternatives = {
            name: Alternative(method.norm_seconds, method.prepare) for name, method in self.methods().items()
        }
        return planner.choose(("norm", *self.key()), alternatives)[0]

    def prepare(self, planner: Planner) -> Prepared:
        alternatives = {
            name: Alternative(method.norm_seconds + method.sum_seconds, method.prepare, partial(_both, method))
            for name, method in self.methods().items()
        }
        return planner.choose(("prepare", *self.key()), alternatives)


def _both(method: Method) -> Tensor:
    norm_sq, gradients = method.prepare()
    return gradients.weighted_sum(norm_sq)


def keep(gradients: Tensor) -> Prepared:
    """Norms of instantiated gradients [B, *S], which are kept for the weighted sum."""
    kept = Instantiated(gradients)
    return kept.squared_norms, kept
