"""The initial clipping bound: a number, or a multiple of the median gradient norm, found privately."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accounting.errors import InvalidInput, keep_whole, require_finite
from accounting.mechanism import GaussianRelease
from accounting.registry import nearest

SMALLEST_BOUND, LARGEST_BOUND = 1e-8, 1e8
"""Bounds for which float32 arithmetic is safe: `workers.gradients` states its error of norms from 1e-12 on."""


@dataclass(frozen=True)
class PrivateMedian:
    """``median_multiple`` times the median norm at initialisation (paper A, Sec. 4), released privately.

    Bisection on a logarithmic scale: each of ``rounds`` answers "how many norms are at most c, less half of them"
    with Gaussian noise. One example moves that sum by 1/2, under add/remove and zero-out adjacency alike.

    Guarantee: the rounds together are one Gaussian release with ``noise_multiplier`` (noise std over sensitivity;
    adaptive Gaussians compose to a Gaussian of summed precision, Dong et al., Cor. 3.3), so every round has
    noise std noise_multiplier * sqrt(rounds) / 2. Norms that are not finite count as above every c.
    """

    median_multiple: float
    noise_multiplier: float = 20.0
    smallest: float = 1e-4
    largest: float = 1e4
    rounds: int = 12

    def __post_init__(self) -> None:
        require_finite("median_multiple of a clipping bound", self.median_multiple, above=0.0)
        require_finite("noise_multiplier of a private median", self.noise_multiplier, above=0.0)
        require_finite("smallest bound", self.smallest, at_least=SMALLEST_BOUND)
        require_finite("largest bound", self.largest, above=self.smallest, at_most=LARGEST_BOUND)
        keep_whole(self, "rounds", "rounds of a private median", at_least=1)

    @property
    def release(self) -> GaussianRelease:
        return GaussianRelease("median norm at initialisation", self.noise_multiplier)

    @property
    def round_noise_std(self) -> float:
        return 0.5 * self.noise_multiplier * math.sqrt(self.rounds)

    def find(self, norms: Tensor, draw: Callable[[float], float]) -> float:
        """The released bound; ``draw(std)`` returns one Gaussian draw."""
        low, high = math.log(self.smallest), math.log(self.largest)
        for _ in range(int(self.rounds)):
            middle = 0.5 * (low + high)
            below = (norms <= math.exp(middle)).double()
            surplus = float((below - 0.5).sum()) + draw(self.round_noise_std)
            low, high = (low, middle) if surplus > 0.0 else (middle, high)
        return min(max(self.median_multiple * math.exp(0.5 * (low + high)), SMALLEST_BOUND), LARGEST_BOUND)


Bound = float | PrivateMedian | Mapping[str, Any]


def initial_bound(bound: Bound) -> float | PrivateMedian:
    """A checked bound from what the user wrote: a number, or the keys of `PrivateMedian`."""
    if isinstance(bound, PrivateMedian):
        return bound
    if not isinstance(bound, Mapping):
        return require_finite("clipping bound", bound, at_least=SMALLEST_BOUND, at_most=LARGEST_BOUND)
    valid = PrivateMedian.__dataclass_fields__
    for key in bound:
        if key not in valid:
            raise InvalidInput(f"unknown key {key!r} of a clipping bound; {nearest(key, valid)}")
    if "median_multiple" not in bound:
        raise InvalidInput("a clipping bound is a number, or needs median_multiple (and may take noise_multiplier)")
    return PrivateMedian(**bound)


def released_bound(bound: Bound, norms: Callable[[], Tensor], draw: Callable[[float], float]) -> float:
    """The number to start with; ``norms()`` is asked only when the bound is a median.

    Norms are taken on whatever device they lie and never leave this function except through the noisy answers.
    """
    checked = initial_bound(bound)
    if isinstance(checked, PrivateMedian):
        return checked.find(torch.as_tensor(norms()), draw)
    return checked
