"""Private selection (docs/accounting.md): a random number of candidates, or the exponential mechanism.

The latter chooses among runs on disjoint parts of the data (paper C, Sec. IV-A3).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from dpsweep.accounting.errors import InvalidInput, keep_finite, keep_whole, require_finite, require_whole
from dpsweep.accounting.numerics.roots import root
from dpsweep.accounting.numerics.rounding import ROUND_UP

LARGEST_CHOICE = 1_000
"""Maximum number of candidates."""


@dataclass(frozen=True)
class ExponentialChoice:
    """One of ``candidates`` runs, chosen by its errors on a part of the data that no run was trained on.

    The data are split into ``candidates`` + 1 disjoint parts, whatever the examples are. Candidate i is trained on part
    i, and z_i is the number of wrong predictions of its model on the last part. It is chosen with probability
    proportional to exp(-epsilon z_i / 2). One example of the last part changes every z_i by at most 1, so that the
    choice is (epsilon, 0)-DP (McSherry and Talwar 2007), under every adjacency of this package.
    """

    candidates: int
    epsilon: float

    def __post_init__(self) -> None:
        keep_whole(self, "candidates", "the number of candidates", at_least=1, at_most=LARGEST_CHOICE)
        keep_finite(self, "epsilon", "epsilon of the choice", above=0.0, at_most=100.0)

    @property
    def words(self) -> str:
        """Return what the released run is, for messages."""
        return f"one of {self.candidates} runs on disjoint parts of the data"

    @property
    def parts(self) -> int:
        """The number of disjoint parts of the data."""
        return self.candidates + 1

    def draw(self, errors: Sequence[int | None]) -> int:
        """Draw the index of the chosen candidate.

        errors: number of wrong predictions of each candidate; None for one that failed, which is never chosen. The law
        is exact, without rounding. A candidate proposed uniformly is accepted with probability exp(-epsilon (z_i - min
        z) / 2), by fair coins and rational numbers alone (Canonne, Kamath and Steinke 2020, Algorithm 1). The
        randomness is the operating system's. Raises: InvalidInput unless there is one entry per candidate, and where
        every candidate failed.
        """
        counts = {
            place: require_whole("a number of wrong predictions", count, at_least=0)
            for place, count in enumerate(errors)
            if count is not None
        }
        if len(errors) != self.candidates or not counts:
            raise InvalidInput(
                f"{len(counts)} of {len(errors)} candidates have a number of wrong predictions, but {self.candidates} "
                "are chosen among, of which at least one must have been trained"
            )
        least, places, half = min(counts.values()), list(counts), Fraction(self.epsilon) / 2
        while True:
            place = places[secrets.randbelow(len(places))]
            if _accept(half * (counts[place] - least)):
                return place


def _accept(exponent: Fraction) -> bool:
    """True with probability exp(-exponent), exactly; exponent >= 0."""
    while exponent > 1:
        if not _accept_small(Fraction(1)):
            return False
        exponent -= 1
    return _accept_small(exponent)


def _accept_small(exponent: Fraction) -> bool:
    """`_accept` for exponents up to 1.

    The first k at which a coin of chance exponent / k fails is odd with probability exp(-exponent).
    """
    count = 1
    while secrets.randbelow(count * exponent.denominator) < exponent.numerator:
        count += 1
    return count % 2 == 1


MOST_TRIALS = 10_000.0
"""Largest expected number of trials of a selection."""

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
        return _mean(-math.log(self.gamma), self.shape) * ROUND_UP

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
