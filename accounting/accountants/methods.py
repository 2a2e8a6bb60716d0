"""Proven methods to account one run: a function of trace, delta and group size each.

Every function takes a private trace, and returns an upper bound on epsilon under the trace's adjacency. Each raises
`UnsupportedMechanism` outside its theorem; none treats shuffled batches as Poisson samples.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy.special import log_expit, ndtri_exp

from dpsweep.accounting import pld
from dpsweep.accounting.errors import UnsupportedMechanism, require_finite
from dpsweep.accounting.individual import epsilon_of_many_rounds
from dpsweep.accounting.mechanism.reductions import rarest_apart
from dpsweep.accounting.mechanism.rounds import gaussian_rounds, pure_epsilons
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.accounting.numerics.gaussian import gaussian_epsilon
from dpsweep.accounting.numerics.renyi import (
    ORDERS,
    Array,
    epsilon_improved,
    improved_terms,
    mixed_rdp,
    pure_rdp,
    sampled_gaussian_rdp,
)
from dpsweep.accounting.numerics.rounding import ROUND_UP


class Bounds(NamedTuple):
    """An upper bound on epsilon, or an estimate of it, and a certified lower bound if the method gives one."""

    upper: float
    lower: float | None = None
    method: str | None = None
    """The method that gave the upper bound, if not the accountant asked for."""


def total_rdp(trace: Trace, group_size: int = 1) -> Array:
    """Return RDP of the whole run at every order of `dpsweep.accounting.numerics.renyi.ORDERS`: additive over adaptive
    composition."""
    total = np.zeros_like(ORDERS)
    for part in gaussian_rounds(trace, group_size):
        costs = [sampled_gaussian_rdp(case.sample_rate, case.noise_multiplier) for case in part.cases]
        total += part.count * mixed_rdp([case.probability for case in part.cases], costs)
    for epsilon in pure_epsilons(trace, group_size):
        total += pure_rdp(epsilon)
    return total


def total_rho(trace: Trace, group_size: int = 1) -> float:
    """Return rho of the whole run in zero-concentrated DP: 1/(2 sigma^2) per round, epsilon^2/2 per pure release.

    An epoch of shuffled batches is one round (paper C, Theorem 2). A trace without noise costs infinity.

    Raises: UnsupportedMechanism when a round is sampled, because sampling does not reduce rho (paper C, App. C).
    """
    if not trace.is_private:
        return math.inf
    rounds = _unsampled_rounds(trace, "zcdp", group_size)
    pure = [0.5 * epsilon**2 for epsilon in pure_epsilons(trace, group_size)]
    return math.fsum([count * 0.5 / sigma**2 for sigma, count in rounds] + pure)


def epsilon_rdp(trace: Trace, delta: float, group_size: int = 1) -> Bounds:
    """Return Renyi DP with the improved conversion."""
    apart, left = rarest_apart(trace, delta, group_size)
    return Bounds(float(epsilon_improved(total_rdp(apart, group_size), left)))


def optimal_order(trace: Trace, delta: float) -> float:
    """Return the order of `dpsweep.accounting.numerics.renyi.ORDERS` at which `epsilon_rdp` is attained."""
    return float(ORDERS[np.argmin(total_rdp(trace) + improved_terms(delta))])


def bounds_pld(trace: Trace, delta: float, group_size: int = 1, tolerance: float = pld.TOLERANCE) -> Bounds:
    """Account by privacy loss distributions, composed with certified error, for every trace and group size.

    The bounds hold for any ``tolerance``, the target for their relative gap.

    Where Renyi DP or one dominating Gaussian gives a lower upper bound, that bound is returned under its own name.
    """
    match pld.rounds_or_chain(trace, group_size):
        case pld.Chain() as chain:
            certified = pld.epsilon_of_chain(chain, delta, tolerance)
        case rounds:
            certified = epsilon_of_many_rounds(rounds, delta, tolerance)
    return Bounds(certified.upper, certified.lower, certified.method)


def epsilon_zcdp(trace: Trace, delta: float, group_size: int = 1) -> Bounds:
    """Account by concentrated DP: rho + 2 sqrt(rho ln(1/delta))  (paper C, Proposition 1)."""
    return Bounds(rho_to_epsilon(total_rho(trace, group_size), delta))


def rho_to_epsilon(rho: float, delta: float) -> float:
    """Return rho-zCDP as (epsilon, delta)-DP (paper C, Proposition 1)."""
    rho, delta = require_finite("rho", rho, at_least=0.0), require_finite("delta", delta, above=0.0, below=1.0)
    return rho + 2.0 * math.sqrt(rho * -math.log(delta))


def epsilon_gdp(trace: Trace, delta: float, group_size: int = 1) -> Bounds:
    """Return Gaussian DP: unsampled Gaussians compose to one with mu^2 = sum 1/sigma^2, converted without loss.

    Exact for Gaussian rounds (Dong, Roth and Su 2019, Corollaries 3.3 and 2.13). A pure release of epsilon enters as
    mu = -2 ndtri(1/(1 + e^epsilon)): its trade-off function consists of two chords of that convex curve.
    """
    rounds = _unsampled_rounds(trace, "gdp", group_size)
    squares = [count / sigma**2 for sigma, count in rounds]
    exact = gaussian_epsilon(math.sqrt(math.fsum(squares)), delta)
    pure = pure_epsilons(trace, group_size)
    if not pure:
        return Bounds(*exact)
    squares += [(2.0 * float(ndtri_exp(log_expit(-epsilon)))) ** 2 * ROUND_UP for epsilon in pure]
    return Bounds(gaussian_epsilon(math.sqrt(math.fsum(squares)), delta)[0], exact[1])


def _unsampled_rounds(trace: Trace, accountant: str, group_size: int) -> list[tuple[float, int]]:
    """(noise multiplier, count) of all rounds. Raises: UnsupportedMechanism if one is sampled."""
    rounds = gaussian_rounds(trace, group_size)
    sampled = [part.cases[0].sample_rate for part in rounds if part.is_sampled]
    if sampled:
        raise UnsupportedMechanism(
            f"{accountant} covers shuffled epochs and full batches, not batches sampled with rate {sampled[0]:.6g}; "
            "use the accountant 'pld' or 'rdp', which bound their epsilon"
        )
    return [(part.cases[0].noise_multiplier, part.count) for part in rounds]
