"""Trace -> (epsilon, delta): one small function per method, and a registry of their names.

Every function takes a private trace, delta and a group size, and returns an upper bound on epsilon under the trace's
adjacency, or an estimate if so stated. Each raises `UnsupportedMechanism` outside its theorem; none treats shuffled
batches as Poisson samples. See docs/accounting.md for the choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import scipy
from scipy.special import log_expit, logsumexp, ndtri_exp

from dpsweep.accounting import pld
from dpsweep.accounting.errors import InvalidInput, UnsupportedMechanism, require_finite, require_numbers
from dpsweep.accounting.individual import epsilon_of_many_rounds
from dpsweep.accounting.mechanism.estimates import Kind, PrivacyEstimate
from dpsweep.accounting.mechanism.reasons import weakened
from dpsweep.accounting.mechanism.reductions import is_attained, rarest_apart
from dpsweep.accounting.mechanism.rounds import (
    Round,
    SampledGaussian,
    enforced_epsilon,
    gaussian_rounds,
    pure_epsilons,
)
from dpsweep.accounting.mechanism.trace import GaussianRelease, Trace
from dpsweep.accounting.mechanism.units import EXAMPLE
from dpsweep.accounting.numerics.gaussian import gaussian_delta, gaussian_epsilon
from dpsweep.accounting.numerics.renyi import (
    ORDERS,
    Array,
    epsilon_classic,
    epsilon_improved,
    improved_terms,
    mixed_rdp,
    pure_rdp,
    sampled_gaussian_rdp,
)
from dpsweep.accounting.registry import lookup

_ROUND_UP = 1.0 + 1e-9
"""Inflation of closed forms, far above their floating-point error."""
_ROUND_DOWN = 1.0 - 1e-12
_HALVINGS = 60  # steps of bisection
_TIGHT = 1.001
"""`auto` tries no further accountant once an epsilon is within this factor of a proven lower bound."""


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
    return float(ORDERS[np.argmin(total_rdp(trace) + improved_terms(ORDERS, delta))])


def epsilon_rdp_classic(trace: Trace, delta: float, group_size: int = 1) -> Bounds:
    """Return Renyi DP with Mironov's conversion: the moments accountant of papers A and C."""
    apart, left = rarest_apart(trace, delta, group_size)
    return Bounds(epsilon_classic(total_rdp(apart, group_size), left))


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


def epsilon_zcdp_sampled(trace: Trace, delta: float, group_size: int = 1) -> Bounds:
    """Account by concentrated DP of sampled batches, an estimate: paper C, Theorem 3.

    P = q^2 / sigma^2 up to order U = sigma^2 ln(1/(q sigma)) + 1. The authors checked the bound on the divergence
    numerically for q <= 1/(16 sigma), but did not prove it. U of a round with several cases is the least of theirs; the
    bound on the divergence at U, over U, holds at all lower orders.
    """
    rounds = gaussian_rounds(trace, group_size)
    highest_order = min((_order(case) for part in rounds for case in part.cases), default=math.inf)
    rho = math.fsum(part.count * _sampled_rho(part, highest_order) for part in rounds)
    rho += sum(0.5 * epsilon**2 for epsilon in pure_epsilons(trace, group_size))
    if math.isinf(highest_order) or math.log(delta) >= -rho * (highest_order - 1.0) ** 2:
        return Bounds(rho_to_epsilon(rho, delta))
    return Bounds(rho * highest_order - math.log(delta) / (highest_order - 1.0))


def _order(case: SampledGaussian) -> float:
    """Return the highest order of paper C's Theorem 3; infinite where nothing is sampled."""
    _, q, sigma = case
    if q == 1.0:
        return math.inf
    if not q <= 1.0 / (16.0 * sigma):
        raise UnsupportedMechanism(
            f"zcdp-sampled needs a sample rate of at most 1/(16 sigma) = {1.0 / (16.0 * sigma):.4g} at noise "
            f"multiplier {sigma:.6g}, but it is {q:.6g}; use the accountant 'pld' or 'rdp'"
        )
    return sigma**2 * math.log(1.0 / (q * sigma)) + 1.0


def _sampled_rho(part: Round, highest_order: float) -> float:
    """P of one round: the mean of exp((U - 1) U P) over its cases, as log over (U - 1) U."""
    costs = np.array([(q if q < 1.0 else math.sqrt(0.5)) ** 2 / sigma**2 for _, q, sigma in part.cases])
    if len(costs) == 1:
        return float(costs[0])
    scale = highest_order * (highest_order - 1.0)
    return float(logsumexp(costs * scale, b=[case.probability for case in part.cases])) / scale


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
    squares += [(2.0 * float(ndtri_exp(log_expit(-epsilon)))) ** 2 * _ROUND_UP for epsilon in pure]
    return Bounds(gaussian_epsilon(math.sqrt(math.fsum(squares)), delta)[0], exact[1])


def epsilon_strong(trace: Trace, delta: float, group_size: int = 1) -> Bounds:
    """Account by strong composition, for comparison, with the best split of delta between rounds and composition.

    A round is (e, d)-DP by the exact Gaussian trade-off, amplified by sampling to (ln(1 + q (e^e - 1)), q d)
    (Balle, Barthe and Gaboardi 2018, Theorem 8). All rounds have the same d; epsilons of pure releases are added.
    """
    rounds = gaussian_rounds(trace, group_size)
    counts = [part.count for part in rounds]
    pure = sum(pure_epsilons(trace, group_size))
    if not rounds:
        return Bounds(pure)

    def epsilon_at(log_share: float) -> float:
        spent = math.exp(log_share) * delta
        epsilons = [_amplified_epsilon(part, spent / sum(counts)) for part in rounds]
        return strong_composition(epsilons, counts, delta - spent)

    best = scipy.optimize.minimize_scalar(epsilon_at, bounds=(math.log(1e-6), math.log(1.0 - 1e-6)), method="bounded")
    return Bounds(float(best.fun) * _ROUND_UP + pure)


def strong_composition(epsilons: Sequence[float], counts: Sequence[int], delta: float) -> float:
    """Return the epsilon of composing counts[i] mechanisms of epsilon epsilons[i], at the sum of their deltas plus
    ``delta``.

    sqrt(2 ln(1/delta) sum e^2) + sum e (exp(e) - 1)  (Dwork, Rothblum and Vadhan 2010, Theorem III.3), or the plain sum
    where that is smaller.
    """
    each, times = require_numbers("epsilons", epsilons, 1), require_numbers("counts", counts, 1)
    if len(each) != len(times) or not ((each >= 0.0).all() and (times >= 0).all()):
        raise InvalidInput("epsilons and counts must have the same length and be at least 0")
    delta = require_finite("delta", delta, above=0.0, below=1.0)
    with np.errstate(over="ignore", invalid="ignore"):
        composed = math.sqrt(-2.0 * math.log(delta) * (times @ each**2)) + float(times @ (each * np.expm1(each)))
    return min(float(times @ each), composed)  # the plain sum if the other overflows to NaN


def epsilon_dp_accounting_pld(trace: Trace, delta: float, group_size: int = 1) -> Bounds:
    """Return an estimate for cross-checks: privacy loss distributions of Google's dp-accounting
    (`dpsweep.accounting.accountants.events`).
    """
    from dpsweep.accounting.accountants.events import dp_accounting_pld  # late: importing dp_accounting takes seconds

    return Bounds(dp_accounting_pld(trace, delta, group_size))


def epsilon_dp_accounting_rdp(trace: Trace, delta: float, group_size: int = 1) -> Bounds:
    """Return an estimate for cross-checks: Renyi DP of Google's dp-accounting
    (`dpsweep.accounting.accountants.events`)."""
    from dpsweep.accounting.accountants.events import dp_accounting_rdp  # late: importing dp_accounting takes seconds

    return Bounds(dp_accounting_rdp(trace, delta, group_size))


def _amplified_epsilon(part: Round, delta: float) -> float:
    """Return the epsilon of one sampled round that spends ``delta`` on average over its cases."""
    high = max(_amplified(case.sample_rate, case.noise_multiplier, delta) for case in part.cases)
    if len(part.cases) == 1:
        return high
    low = 0.0
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        spent = math.fsum(case.probability * _amplified_delta(case, middle) for case in part.cases)
        low, high = (low, middle) if spent <= delta else (middle, high)
    return high


def _amplified_delta(case: SampledGaussian, epsilon: float) -> float:
    """Delta of the sampled Gaussian mechanism at ``epsilon``, by the same theorem."""
    _, q, sigma = case
    grown = math.log1p(math.expm1(epsilon) / q) if epsilon < 30.0 else epsilon - math.log(q)
    return q * gaussian_delta(1.0 / sigma, grown * _ROUND_DOWN)[0] * _ROUND_UP


def _amplified(sample_rate: float, noise_multiplier: float, delta: float) -> float:
    unsampled_delta = delta / sample_rate
    epsilon = gaussian_epsilon(1.0 / noise_multiplier, unsampled_delta)[0] if unsampled_delta < 1.0 else 0.0
    if epsilon < 1.0:  # where a sum of logarithms would cancel, and could fall below 0
        return math.log1p(sample_rate * math.expm1(epsilon))
    with np.errstate(divide="ignore"):
        return float(np.logaddexp(np.log1p(-sample_rate), math.log(sample_rate) + epsilon))


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


@dataclass(frozen=True)
class Accountant:
    """A named method: its bounds on epsilon, and whether the upper one is proven."""

    name: str
    bounds: Callable[[Trace, float, int], Bounds]
    is_proven: bool = True

    def __call__(self, trace: Trace, delta: float, group_size: int = 1) -> PrivacyEstimate:
        return self.estimate(trace, delta, group_size)[0]

    def estimate(self, trace: Trace, delta: float, group_size: int) -> tuple[PrivacyEstimate, float]:
        """Return the claim, and a lower bound on the epsilon of the rounds' pairs, or 0.

        The claim has that bound only where some run that the trace describes is these pairs (`is_attained`).
        """
        unit = EXAMPLE.of(group_size)
        best = self._best(trace, delta, group_size) if trace.is_private else Bounds(math.inf, math.inf)
        name, kind = best.method or self.name, _kind(best.upper)
        lower = best.lower if is_attained(trace) or not trace.is_private else None
        claim = PrivacyEstimate(best.upper, delta, trace.adjacency, name, kind, unit, group_size, lower)
        return weakened(claim, () if self.is_proven else ("accountant_not_proven",)), best.lower or 0.0

    def _best(self, trace: Trace, delta: float, group_size: int) -> Bounds:
        """Return the method's bounds, or, if lower, the bounds of the run without pure releases plus the sum of their
        epsilons.
        """
        composed = self.bounds(trace, delta, group_size)
        pure = pure_epsilons(trace, group_size)
        if not pure:
            return composed
        gaussian = tuple(release for release in trace.releases if isinstance(release, GaussianRelease))
        rest = self.bounds(replace(trace, releases=gaussian), delta, group_size)
        added = Bounds(rest.upper + sum(pure), composed.lower, rest.method)
        return min(composed, added, key=lambda bounds: bounds.upper)


def _kind(epsilon: float) -> Kind:
    return "guarantee" if epsilon < math.inf else "none"


_TIGHTEST = (Accountant("gdp", epsilon_gdp), Accountant("pld", bounds_pld), Accountant("rdp", epsilon_rdp))
"""The methods among which `auto` chooses, in the order in which they are tried."""

_METHODS = (
    *_TIGHTEST,
    Accountant("rdp-classic", epsilon_rdp_classic),
    Accountant("zcdp", epsilon_zcdp),
    Accountant("zcdp-sampled", epsilon_zcdp_sampled, is_proven=False),
    Accountant("strong", epsilon_strong),
    Accountant("dp-accounting-pld", epsilon_dp_accounting_pld, is_proven=False),
    Accountant("dp-accounting-rdp", epsilon_dp_accounting_rdp, is_proven=False),
)


def auto(trace: Trace, delta: float, group_size: int = 1) -> PrivacyEstimate:
    """Return the tightest guarantee for the trace: the lowest epsilon of gdp, pld and rdp.

    They are tried in this order, up to the first that is within 0.1 % of a proven lower bound, pld only at deltas from
    1e-250 on. The result names the method that gave it.

    Raises: UnsupportedMechanism when none of them covers the trace.
    """
    accepted: list[PrivacyEstimate] = []
    refusals: list[str] = []
    proven = 0.0
    for method in _TIGHTEST:
        if method.bounds is bounds_pld and delta < pld.MIN_DELTA:
            continue
        if any(found.epsilon <= _TIGHT * proven for found in accepted):
            break
        try:
            found, lower = method.estimate(trace, delta, group_size)
        except UnsupportedMechanism as refusal:
            refusals.append(str(refusal))
        else:
            accepted.append(found)
            proven = max(proven, lower)
    if not accepted and delta < pld.MIN_DELTA:
        refusals.append(
            f"delta is {delta:g}, and pld computes epsilons from {pld.MIN_DELTA:g} on; choose a larger delta"
        )
    if not accepted:
        raise UnsupportedMechanism(f"no accountant covers this trace: {'; '.join(dict.fromkeys(refusals))}")
    return min(accepted, key=lambda estimate: estimate.epsilon)


ACCOUNTANTS: Mapping[str, Callable[[Trace, float, int], PrivacyEstimate]] = {
    **{method.name: method for method in _METHODS},
    "auto": auto,
}


def account_one(trace: Trace, delta: float, accountant: str, group_size: int) -> PrivacyEstimate:
    """Return (epsilon, delta) of a run of rows that is released whatever it found; see `dpsweep.accounting.account`.

    Raises: UnsupportedMechanism when the accountant does not cover the trace, InvalidInput for an unknown accountant.
    """
    found = lookup(ACCOUNTANTS, accountant, "accountant")(trace, delta, group_size)
    found = weakened(found, trace.reasons)
    if trace.filter is None or group_size > 1:
        return found
    enforced = PrivacyEstimate(enforced_epsilon(trace.filter, trace, delta), delta, trace.adjacency, "filter")
    return enforced if found.kind != "guarantee" or enforced.epsilon < found.epsilon else found
