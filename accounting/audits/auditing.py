"""Lower bounds on epsilon from guesses about who was in one training run.

T. Steinke, M. Nasr and M. Jagielski, "Privacy Auditing with One (1) Training Run", 2023.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from dpsweep.accounting.errors import require_finite, require_whole

GRID = 0.01
"""Spacing of the epsilons that are tested."""
LARGEST_TESTED = 40.0
"""Largest epsilon that is tested: beyond it, wrong guesses of randomised response no longer occur."""


@dataclass(frozen=True)
class Guesses:
    """Guesses whether each of ``canaries`` examples was in the training data: ``made`` guesses, ``correct`` right ones.

    Each canary was included independently with probability 1/2, by a coin that affects the guesses only through the
    mechanism. The number of guesses must not depend on the coins.
    """

    canaries: int
    made: int
    correct: int

    def __post_init__(self) -> None:
        require_whole("canaries", self.canaries, at_least=1)
        require_whole("guesses", self.made, at_least=0, at_most=self.canaries)
        require_whole("correct guesses", self.correct, at_least=0, at_most=self.made)


def p_value(guesses: Guesses, epsilon: float, delta: float) -> float:
    """Return the bound on the probability of at least ``guesses.correct`` right guesses, if the mechanism is (epsilon,
    delta)-DP.

    Guarantee: P[right guesses >= v] <= beta + 2 m delta alpha with beta = P[W >= v] and alpha = max over i of P[v - i
    <= W < v] / i. Here W ~ Binomial(guesses, e^epsilon / (1 + e^epsilon)). Here m is the number of canaries (Steinke,
    Nasr and Jagielski 2023, Theorem 5.2 with the notation of the code in Appendix D). Adjacency: including a canary or
    not, as in add/remove and zero-out.

    >>> p_value(Guesses(canaries=10, made=10, correct=10), epsilon=0.0, delta=0.0) == 2.0**-10
    True
    """
    from scipy import stats  # late: importing it takes half a second

    epsilon = require_finite("epsilon", epsilon, at_least=0.0)
    delta = require_finite("delta", delta, at_least=0.0, at_most=1.0)
    made, correct = guesses.made, guesses.correct
    right = float(special.expit(epsilon))
    beta = float(stats.binom.sf(correct - 1, made, right))
    below = np.cumsum(stats.binom.pmf(np.arange(correct - 1, -1, -1), made, right))
    alpha = float(np.max(below / np.arange(1, correct + 1), initial=0.0))
    return min(1.0, beta + 2.0 * guesses.canaries * delta * alpha)


@functools.cache
def audited_epsilon(guesses: Guesses, delta: float, confidence: float) -> float:
    """Return a lower bound on the epsilon of the mechanism at ``delta``, or 0 if the guesses prove none.

    Guarantee: if the mechanism is (epsilon, delta)-DP, the result exceeds epsilon with probability at most
    1 - confidence over coins and mechanism. Proof: the result exceeds epsilon only if every multiple of `GRID` up to
    the result was rejected at level 1 - confidence. One of these, e, is the smallest that is at least epsilon; the
    mechanism is (e, delta)-DP too, and so e is rejected with probability at most 1 - confidence.
    """
    confidence = require_finite("confidence", confidence, above=0.0, below=1.0)
    rejected = 0
    while rejected * GRID <= LARGEST_TESTED and p_value(guesses, rejected * GRID, delta) < 1.0 - confidence:
        rejected += 1
    return max(0, rejected - 1) * GRID


def provable(canaries: int, confidence: float) -> bool:
    """Return whether guesses about ``canaries`` examples can prove anything: all right ones would reject epsilon 0."""
    return canaries >= 1 and 0.5**canaries < 1.0 - confidence


def best_audited_epsilon(ways: Sequence[Guesses], delta: float, confidence: float) -> tuple[float, Guesses]:
    """Return the largest `audited_epsilon` of several ways to guess, and its guesses; the first way if none proves
    anything.

    Guarantee: as for `audited_epsilon`, by the union bound: each way is audited at its share of 1 - confidence.
    """
    share = 1.0 - (1.0 - confidence) / len(ways)
    return max(((audited_epsilon(guesses, delta, share), guesses) for guesses in ways), key=lambda found: found[0])
