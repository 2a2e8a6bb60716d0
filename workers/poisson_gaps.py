"""Rows of a Poisson batch by the gaps between them: of n rows, about q n are drawn instead of n."""

from __future__ import annotations

import math
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

FEWEST_ROWS: Final = 1_000_000
"""Fewer rows are faster looked at one by one."""
LARGEST_RATE: Final = 1 / 256
"""At a larger sampling rate the rows are faster looked at one by one."""

_BITS: Final = 56
_ONE: Final = 1 << _BITS


class Bits(Protocol):
    """A stream of uniform bits."""

    def words(self, count: int) -> Words:
        """``count`` uniform 64-bit words."""
        ...


def are_worth_it(n: int, expected: int) -> bool:
    """Whether gaps are faster than a look at each of n rows, of which ``expected`` are expected in a batch."""
    return n >= FEWEST_ROWS and expected <= LARGEST_RATE * n


def rows_by_gaps(stream: Bits, n: int, expected: int) -> Rows:
    """Each of the rows 0 .. n - 1 independently with a probability just below expected / n; ascending.

    The probability is exactly 1 - exp(-rate / 2^56), see `rate_below`: a smaller one never weakens the guarantee. Of
    independent trials the gaps between successes are independent and geometric, P(gap >= g) = exp(-rate g / 2^56), and
    are drawn from uniform integers without any rounding.
    """
    rate = rate_below(expected, n)
    found, last = list[Rows](), -1
    while last < n:
        gaps = geometric(stream, rate, expected + 4 * math.isqrt(expected) + 4)
        found.append(last + np.cumsum(gaps + 1))
        last = int(found[-1][-1])
    rows = np.concatenate(found)
    return rows[: np.searchsorted(rows, n)]


def rate_below(expected: int, n: int) -> int:
    """A whole number just below -2^56 log(1 - expected / n); the error of its computation is less than 1."""
    return math.floor(-math.log1p(-expected / n) * _ONE) - 1


def geometric(stream: Bits, rate: int, count: int) -> Rows:
    """``count`` independent integers g >= 0 with P(g >= k) = exp(-rate k / 2^56); exact.

    By Canonne, Kamath and Steinke, "The Discrete Gaussian for Differential Privacy" (2020), Algorithm 2: x // rate is
    such an integer if P(x >= k) = exp(-k / 2^56), and x is a fraction of 2^56, drawn by rejection, and a number of
    whole 2^56.
    """
    fractions = np.empty(0, np.uint64)
    while len(fractions) < count:
        drawn = stream.words(2 * (count - len(fractions))) >> np.uint64(64 - _BITS)
        fractions = np.concatenate([fractions, drawn[_occur(stream, drawn)]])
    wholes, active = np.zeros(count, np.uint64), np.arange(count)
    while len(active):
        active = active[_occur(stream, np.full(len(active), _ONE, np.uint64))]
        wholes[active] += np.uint64(1)
    numbers = (wholes << np.uint64(_BITS)) + fractions[:count]  # 256 wholes would overflow, with probability e^-256
    return (numbers // np.uint64(rate)).astype(np.int64)


def _occur(stream: Bits, exponents: Words) -> npt.NDArray[np.bool_]:
    """Whether independent events occur, whose probabilities are exp(-exponent / 2^56), exponent at most 2^56; exact.

    By Algorithm 1 of the same: events of probabilities exponent / 2^56 / k, for k = 1, 2, ... until one does not occur,
    end at an odd k with probability exp(-exponent / 2^56).
    """
    occur, active, k = np.zeros(len(exponents), np.bool_), np.arange(len(exponents)), 1
    while len(active):
        goes_on = stream.words(len(active)) >> np.uint64(64 - _BITS) < exponents[active]
        goes_on &= _below(stream, k, len(active)) == 0
        occur[active[~goes_on]] = k % 2 == 1
        active, k = active[goes_on], k + 1
    return occur


def _below(stream: Bits, bound: int, count: int) -> Words:
    """``count`` independent uniform integers below ``bound``; exact."""
    if bound == 1:
        return np.zeros(count, np.uint64)
    words, most = stream.words(count).copy(), (1 << 64) // bound * bound - 1
    while (beyond := np.flatnonzero(words > np.uint64(most))).size:
        words[beyond] = stream.words(len(beyond))
    return words % np.uint64(bound)
