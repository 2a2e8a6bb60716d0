"""The initial clipping bound: a number, or a multiple of the privately released median gradient norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpsweep.accounting.errors import InvalidInput, keep_whole, require_finite
from dpsweep.accounting.mechanism.trace import GaussianRelease
from dpsweep.accounting.registry import nearest

SMALLEST_BOUND, LARGEST_BOUND = 1e-8, 1e8
"""Accepted clipping bounds: float32 norms are accurate in this range (`dpsweep.workers.gradients`: from 1e-12 on)."""


@dataclass(frozen=True)
class PrivateMedian:
    """Clipping bound ``median_multiple`` times the median norm at initialisation (paper A, Sec. 4), released privately.

    The median is found by bisection on a logarithmic scale in ``rounds`` rounds. Each round releases
    sum (1[norm <= c] - 1/2) with Gaussian noise; one example changes this sum by at most 1/2, under add/remove and
    zero-out adjacency.

    Guarantee: under these adjacencies all rounds together are one Gaussian release with ``noise_multiplier`` (noise std
    over sensitivity). The precisions of adaptively composed Gaussians add up (Dong et al., Cor. 3.3), so each round has
    noise std noise_multiplier * sqrt(rounds) / 2. Norms that are not finite count as above every c.

    `smallest`, `largest`: ends of the interval that is searched.

    >>> norms, without_noise = torch.tensor([1.0, 2.0, 3.0]), lambda std: 0.0
    >>> round(PrivateMedian(median_multiple=1.0, rounds=40).find(norms, without_noise), 6)
    2.0
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
        """All rounds together as the one release that the accountant counts."""
        return GaussianRelease("median norm at initialisation", self.noise_multiplier)

    @property
    def round_noise_std(self) -> float:
        """Noise std of one round."""
        return 0.5 * self.noise_multiplier * math.sqrt(self.rounds)

    def find(self, norms: Tensor, draw: Callable[[float], float]) -> float:
        """Return the released bound from norms [n]; ``draw(std)`` returns one draw from N(0, std^2)."""
        low, high = math.log(self.smallest), math.log(self.largest)
        for _ in range(int(self.rounds)):
            middle = 0.5 * (low + high)
            below = (norms <= math.exp(middle)).double()
            surplus = float((below - 0.5).sum()) + draw(self.round_noise_std)
            low, high = (low, middle) if surplus > 0.0 else (middle, high)
        return min(max(self.median_multiple * math.exp(0.5 * (low + high)), SMALLEST_BOUND), LARGEST_BOUND)


Bound = float | PrivateMedian | Mapping[str, Any]


def initial_bound(bound: Bound) -> float | PrivateMedian:
    """Return the checked bound that the user gave, as a number or as the fields of a `PrivateMedian`.

    Raises: InvalidInput for unknown keys and numbers out of range.
    """
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
    """Return the initial bound as a number; a private median is released here.

    `norms`: returns gradient norms [n] on any device; called only for a median, and used only through noisy answers.
    `draw`: ``draw(std)`` returns one draw from N(0, std^2).
    """
    checked = initial_bound(bound)
    if isinstance(checked, PrivateMedian):
        return checked.find(torch.as_tensor(norms()), draw)
    return checked
