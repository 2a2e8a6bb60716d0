"""The random number of candidates of a private selection (docs/accounting.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from dpsweep.accounting.errors import keep_finite, require_finite
from dpsweep.accounting.numerics.roots import root

MOST_TRIALS = 10_000.0
"""Largest expected number of trials of a selection."""

_ROUND_UP = 1.0 + 1e-9  # far above the rounding error of a closed form or of a bisection
_SMALL = 1e-12  # exponents below which e^x - 1 is x
_LEAST_EXCESS = 1e-9  # over one trial; below, there is exactly one


@dataclass(frozen=True)
class RandomTrials:
    """The law of the number K >= 1 of trials: truncated negative binomial, with ``mean`` and ``shape``.

    shape 1 is the geometric law of Liu and Talwar, 0 the logarithmic one. Smaller shapes cost less privacy at the same
    mean, but few trials, even one, are more likely. P(K = k) is proportional to (1 - gamma)^k times the binomial
    coefficient (k + shape - 1 over k).
    """

    mean: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        keep_finite(self, "mean", "the expected number of trials", at_least=1.0, at_most=MOST_TRIALS)
        keep_finite(self, "shape", "the shape of the number of trials", at_least=0.0, at_most=100.0)

    @property
    def words(self) -> str:
        """Return what the released run is, for messages."""
        return "the best of a random number of runs"

    @cached_property
    def gamma(self) -> float:
        """The law's parameter in (0, 1], 1 for exactly one trial. This rounded number defines the law exactly."""
        if self.mean <= 1.0 + _LEAST_EXCESS:
            return 1.0
        return math.exp(-root(lambda log: _mean(log, self.shape) - self.mean, 0.0, 20.0, absolute=1e-15))

    @property
    def largest_mean(self) -> float:
        """The mean of the law, rounded up."""
        return _mean(-math.log(self.gamma), self.shape) * _ROUND_UP

    def number_at(self, uniform: float) -> int:
        """Return the number of trials for a uniformly random number in [0, 1): the inverse of the distribution
        function.
        """
        uniform = require_finite("a uniformly random number", uniform, at_least=0.0, below=1.0)
        log = -math.log(self.gamma)
        if log == 0.0:
            return 1
        number, reached = 1, 0.0
        probability = -math.expm1(-log) / (
            log if self.shape * log < _SMALL else math.expm1(self.shape * log) / self.shape
        )
        while uniform >= reached + probability and (number <= self.mean or probability > 1e-18):
            reached += probability
            probability *= -math.expm1(-log) * (number + self.shape) / (number + 1.0)
            number += 1
        return number


def _mean(log: float, shape: float) -> float:
    """E[K] at gamma = e^-log: shape (1 - gamma) / (gamma (1 - gamma^shape))  (Papernot and Steinke 2022, Definition 1).

    It is 1 at log 0, and (1/gamma - 1) / log at shape 0.
    """
    if log == 0.0:
        return 1.0
    return math.expm1(log) / (log if shape * log < _SMALL else -math.expm1(-shape * log) / shape)
