"""Poisson batches drawn by the gaps between their rows: about q n random numbers instead of n, for sample rate q."""

from __future__ import annotations

import math
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

FEWEST_ROWS: Final = 1_000_000
"""Smallest data set for which gaps are faster than one random number per row."""
LARGEST_RATE: Final = 1 / 256
"""Largest sample rate for which gaps are faster than one random number per row."""

_BITS: Final = 56
_ONE: Final = 1 << _BITS


class Bits(Protocol):
    """A stream of uniform bits."""

    def words(self, count: int) -> Words:
        """Return ``count`` uniform 64-bit words."""
        ...


def are_worth_it(n: int, expected: int) -> bool:
    """Return whether gaps are faster than one random number per row. n: rows; expected: expected batch size."""
    return n >= FEWEST_ROWS and expected <= LARGEST_RATE * n


def rows_by_gaps(stream: Bits, n: int, expected: int) -> Rows:
    """Return the rows of a Poisson batch: each of 0 .. n - 1 independently, with a probability just below expected / n;
    ascending.

    The probability is exactly 1 - exp(-rate / 2^56) with the integer rate of `rate_below`; rounding it down never
    weakens the guarantee. The gaps between successes of independent trials are independent and geometric, P(gap >= g) =
    exp(-rate g / 2^56), and are drawn from uniform integers without any rounding.
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
    """Return an integer just below -2^56 log(1 - expected / n); the error of its computation is less than 1."""
    return math.floor(-math.log1p(-expected / n) * _ONE) - 1


def geometric(stream: Bits, rate: int, count: int) -> Rows:
    """Return ``count`` independent geometric integers g >= 0 with P(g >= k) = exp(-rate k / 2^56); exact.

    Algorithm 2 of Canonne, Kamath and Steinke, "The Discrete Gaussian for Differential Privacy" (2020): g = x // rate,
    where P(x >= k) = exp(-k / 2^56). x is a multiple of 2^56 plus a remainder below 2^56, drawn by rejection.
    """
    fractions = np.empty(0, np.uint64)
    while len(fractions) < count:
        drawn = stream.words(2 * (count - len(fractions))) >> np.uint64(64 - _BITS)
        fractions = np.concatenate([fractions, drawn[_occur(stream, drawn)]])
    wholes, active = np.zeros(count, np.uint64), np.arange(count)
    while len(active):
        active = active[_occur(stream, np.full(len(active), _ONE, np.uint64))]
        wholes[active] += np.uint64(1)
    numbers = (wholes << np.uint64(_BITS)) + fractions[:count]  # overflows at 256 wholes, with probability e^-256
    return (numbers // np.uint64(rate)).astype(np.int64)


def _occur(stream: Bits, exponents: Words) -> npt.NDArray[np.bool_]:
    """Independent Bernoulli draws with probabilities exp(-exponent / 2^56), for exponents up to 2^56; exact.

    Algorithm 1 of the same paper: draw events with probabilities exponent / (2^56 k) for k = 1, 2, ... until one does
    not occur. The last k is odd with probability exp(-exponent / 2^56).
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
