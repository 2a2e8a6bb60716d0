"""Lower bounds on epsilon from guesses of one run, if the privacy of each canary is that of a Gaussian mechanism.

A mechanism is mu-GDP if no test of one coin is better than one between N(0, 1) and N(mu, 1) (Dong, Roth and Su 2019).
Both tests find a mu that the guesses contradict, and return the epsilon of mu-GDP at delta. It is a lower bound on the
epsilon of a mechanism whose trade-off function is nowhere below that of the Gaussian mechanism with the same epsilon at
delta. `dpsweep.accounting.audits.auditing` needs no such assumption, and proves less.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Final

from scipy import special

from dpsweep.accounting.audits.auditing import LARGEST_TESTED, Guesses
from dpsweep.accounting.errors import InvalidInput, require_finite
from dpsweep.accounting.numerics.gaussian import gaussian_epsilon
from dpsweep.accounting.numerics.roots import beginning

_LARGEST_MEAN: Final = LARGEST_TESTED
"""Largest mu that is tested: beyond it, guesses are never wrong."""
_HALVINGS: Final = 50


def contradicts_f_dp(guesses: Guesses, mean: float, error: float) -> bool:
    """Return whether so many right guesses have a probability below ``error`` if the mechanism is mu-GDP, mu = mean.

    Guarantee: that of `contradicts` with G(x) = Phi(Phi^-1(x) - mu).
    """
    return contradicts(guesses, lambda share: float(special.ndtr(special.ndtri(share) - mean)), error)


def contradicts(guesses: Guesses, least_wrong: Callable[[float], float], error: float) -> bool:
    """Return whether so many right guesses have a probability below ``error`` by the trade-off function f of each coin.

    `least_wrong`: G(x) = f(1 - x), convex.

    Guarantee: for every mechanism that shows each coin at most as f allows, whatever the others are, the result is True
    with probability at most ``error``. It increases in the number of right guesses. Canaries may depend on each other.

    S. Mahloujifar, L. Melis and K. Chaudhuri, "Auditing f-Differential Privacy in One Run" (arXiv 2410.22235), for
    coins. Let r guesses of m canaries be made, N of them right, a_j = E[N 1(N >= j)] / m and b_j = E[(r - N) 1(N >= j)]
    / m. The coin of a right guess in N >= j, if it were the other, would make a wrong one in N >= j - 1. So b_(j-1) >=
    G(a_j) (their Theorem 3.2). The chain of these goes from P[N >= c] = error
    with all of N = c, its least case, down to j = 0. It must not exceed a_0 + b_0 = r / m.
    """
    canaries, made, right = guesses.canaries, guesses.made, guesses.correct
    a, b = error * right / canaries, error * (made - right) / canaries
    for j in range(right, 0, -1):
        higher = least_wrong(a)
        if higher <= b:
            break  # neither changes any more
        a, b = min(1.0, a + (j - 1) / (made - j + 1) * (higher - b)), higher
    return a + b > made / canaries


@functools.cache
def f_dp_epsilon(guesses: Guesses, delta: float, confidence: float) -> float:
    """Return the epsilon at ``delta`` of the largest mu-GDP that `contradicts_f_dp`; 0 if none is contradicted.

    Guarantee: for a mechanism that is mu-GDP in each coin, the result exceeds the epsilon of mu-GDP with probability at
    most 1 - confidence: what contradicts a mu contradicts every smaller one. For what it says of another mechanism, see
    the module.
    """
    error = _error(delta, confidence)
    if not contradicts_f_dp(guesses, 0.0, error):
        return 0.0
    mean, _ = beginning(  # the one returned must be contradicted
        lambda mean: not contradicts_f_dp(guesses, mean, error), 0.0, _LARGEST_MEAN, _HALVINGS
    )
    return gaussian_epsilon(mean, delta)[1]


def gdp_epsilon(guesses: Guesses, delta: float, confidence: float) -> float:
    """Return the epsilon at ``delta`` of the largest mu-GDP that the right guesses contradict, of independent canaries.

    Assumes that every canary is guessed from a separate output by a rule that is fixed beforehand. Assumes that these
    outputs are independent, such as the projections of isotropic Gaussian noise on orthogonal directions. Then each
    guess is right, independently, with probability at most (1 + TV) / 2 = Phi(mu / 2). The number of right ones is at
    most Binomial(m, Phi(mu / 2)): its exact bound (Clopper and Pearson) bounds mu. It is the test of Z. Xiang, T. Wang,
    H. Xiao, Y. Tian and D. Wang, "Tight Privacy Audit in One Run" (arXiv 2509.08704) where nobody abstains. With
    abstention, errors of the most certain guesses are not independent of each other, and this bound would not hold.

    Guarantee: under these assumptions, for a mechanism that is mu-GDP in each coin, the result exceeds the epsilon of
    mu-GDP with probability at most 1 - confidence. For what it says of another mechanism, see the module.

    Raises: InvalidInput unless every canary is guessed.

    >>> gdp_epsilon(Guesses(canaries=2000, made=2000, correct=1000), delta=1e-5, confidence=0.95)
    0.0
    """
    error = _error(delta, confidence)
    if guesses.made != guesses.canaries:
        raise InvalidInput(
            f"{guesses.made} of {guesses.canaries} canaries are guessed, but this test needs a guess about each; "
            "guess all of them"
        )
    wrong = guesses.made - guesses.correct
    rate = float(special.betaincinv(guesses.correct, wrong + 1, error)) if guesses.correct else 0.0
    mean = 2.0 * float(special.ndtri(rate)) if rate > 0.5 else 0.0
    return gaussian_epsilon(min(mean, _LARGEST_MEAN), delta)[1] if math.isfinite(mean) else 0.0


def _error(delta: float, confidence: float) -> float:
    """Return 1 - confidence. Raises: InvalidInput unless both numbers are between 0 and 1."""
    require_finite("delta", delta, above=0.0, below=1.0)
    return 1.0 - require_finite("confidence", confidence, above=0.0, below=1.0)
