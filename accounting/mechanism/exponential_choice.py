"""The exponential mechanism, which chooses among runs on disjoint parts of the data (paper C, Sec. IV-A3)."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from dpsweep.accounting.errors import InvalidInput, keep_finite, keep_whole, require_whole

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
