"""Trace -> (epsilon, delta): one small function per method, and a registry of their names.

Every function takes a private trace, delta and a group size, and returns an upper bound on epsilon under the trace's
adjacency, or an estimate where it says so. Each raises `UnsupportedMechanism` for what its theorem does not cover; none
treats shuffled batches as Poisson samples. docs/accounting.md says which to use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import scipy
from scipy.special import log_expit, ndtri_exp

from accounting import pld
from accounting.errors import InvalidInput, UnsupportedMechanism, require_finite, require_numbers
from accounting.estimates import Kind, PrivacyEstimate
from accounting.filters import IndividualFilter
from accounting.gaussian import gaussian_epsilon
from accounting.mechanism import GaussianRelease, Trace
from accounting.reasons import weakened
from accounting.reductions import rare_cuts_apart
from accounting.registry import lookup
from accounting.renyi import (
    ORDERS,
    Array,
    epsilon_classic,
    epsilon_improved,
    improved_terms,
    pure_rdp,
    sampled_gaussian_rdp,
)
from accounting.rounds import Round, gaussian_rounds, pure_epsilons, require_group_size

_ROUND_UP = 1.0 + 1e-9
"""Inflation of closed forms, far above their floating-point error."""
_TIGHT = 1.001
"""`auto` tries no further accountant once an epsilon is within this factor of a proven lower bound."""


class Bounds(NamedTuple):
    """An upper bound on epsilon, or an estimate of it, and a certified lower bound if the method gives one."""

    upper: float
    lower: float | None = None
    method: str | None = None
    """The method that gave the upper bound, if not the accountant asked for."""


def total_rdp(trace: Trace, group_size: int = 1) -> Array:
    """RDP of the whole run at every order of `accounting.renyi.ORDERS`: additive over adaptive composition."""
    total = np.zeros_like(ORDERS)
    for part in gaussian_rounds(trace, group_size):
        total += part.count * sampled_gaussian_rdp(part.sample_rate, part.noise_multiplier)
    for epsilon in pure_epsilons(trace, group_size):
        total += pure_rdp(epsilon)
    return total


def total_rho(trace: Trace, group_size: int = 1) -> float:
    """rho of the whole run in zero-concentrated DP: 1/(2 sigma^2) per round, epsilon^2/2 per pure release.

    An epoch of shuffled batches is one round (paper C, Theorem 2). A trace without noise costs infinity.

    Raises: UnsupportedMechanism when a round is sampled, because sampling does not reduce rho (paper C, App. C).
    """
    if not trace.is_private:
        return math.inf
    rounds = _unsampled_rounds(trace, "zcdp", group_size)
    pure = [0.5 * epsilon**2 for epsilon in pure_epsilons(trace, group_size)]
    return math.fsum([part.count * 0.5 / part.noise_multiplier**2 for part in rounds] + pure)


def epsilon_rdp(trace: Trace, delta: float, group_size: int = 1) -> Bounds:
    """Renyi DP with the improved conversion."""
    return Bounds(float(epsilon_improved(total_rdp(trace, group_size), delta)))


def optimal_order(trace: Trace, delta: float) -> float:
    """The order of `accounting.renyi.ORDERS` at which `epsilon_rdp` is attained."""
    return float(ORDERS[np.argmin(total_rdp(trace) + improved_terms(ORDERS, delta))])


def epsilon_rdp_classic(trace: Trace, delta: float, group_size: int = 1) -> Bounds:
    """Renyi DP with Mironov's conversion: the moments accountant of papers A and C."""
    return Bounds(epsilon_classic(total_rdp(trace, group_size), delta))


def bounds_pld(trace: Trace, delta: float, group_size: int = 1) -> Bounds:
    """Privacy loss distributions, composed with certified error, for every trace and group size.

    Where Renyi DP or one dominating Gaussian gives a lower upper bound, that bound is returned under its own name.
    """
    certified = pld.epsilon_pld(trace, delta, group_size)
    return Bounds(certified.upper, certified.lower, certified.method)


def epsilon_zcdp(trace: Trace, delta: float, group_size: int = 1) -> Bounds:
    """Concentrated DP: rho + 2 sqrt(rho ln(1/delta))  (paper C, Proposition 1)."""
    return Bounds(rho_to_epsilon(total_rho(trace, group_size), delta))


def rho_to_epsilon(rho: float, delta: float) -> float:
    """rho-zCDP as (epsilon, delta)-DP (paper C, Proposition 1)."""
    rho, delta = require_finite("rho", rho, at_least=0.0), require_finite("delta", delta, above=0.0, below=1.0)
    return rho + 2.0 * math.sqrt(rho * -math.log(delta))


def epsilon_zcdp_sampled(trace: Trace, delta: float, group_size: int = 1) -> Bounds:
    """Concentrated DP of sampled batches, an estimate: paper C, Theorem 3.

    P = q^2 / sigma^2 up to order U = sigma^2 ln(1/(q sigma)) + 1. The authors checked the bound on the divergence
    numerically for q <= 1/(16 sigma), but did not prove it.
    """
    rho, highest_order = 0.0, math.inf
    for part in gaussian_rounds(trace, group_size):
        q, sigma = part.sample_rate, part.noise_multiplier
        if q == 1.0:
            rho += part.count * 0.5 / sigma**2
            continue
        if not q <= 1.0 / (16.0 * sigma):
            raise UnsupportedMechanism(
                f"zcdp-sampled needs a sample rate of at most 1/(16 sigma) = {1.0 / (16.0 * sigma):.4g} at noise "
                f"multiplier {sigma:.6g}, but it is {q:.6g}; use the accountant 'pld' or 'rdp'"
            )
        rho += part.count * q**2 / sigma**2
        highest_order = min(highest_order, sigma**2 * math.log(1.0 / (q * sigma)) + 1.0)
    rho += sum(0.5 * epsilon**2 for epsilon in pure_epsilons(trace, group_size))
    if math.isinf(highest_order) or math.log(delta) >= -rho * (highest_order - 1.0) ** 2:
        return Bounds(rho_to_epsilon(rho, delta))
    return Bounds(rho * highest_order - math.log(delta) / (highest_order - 1.0))


def epsilon_gdp(trace: Trace, delta: float, group_size: int = 1) -> Bounds:
    """Gaussian DP: unsampled Gaussians compose to one with mu^2 = sum 1/sigma^2, converted without loss.

    Exact for Gaussian rounds (Dong, Roth and Su 2019, Corollaries 3.3 and 2.13). A pure release of epsilon enters as
    mu = -2 ndtri(1/(1 + e^epsilon)): its trade-off function consists of two chords of that convex curve.
    """
    rounds = _unsampled_rounds(trace, "gdp", group_size)
    squares = [part.count / part.noise_multiplier**2 for part in rounds]
    exact = gaussian_epsilon(math.sqrt(math.fsum(squares)), delta)
    pure = pure_epsilons(trace, group_size)
    if not pure:
        return Bounds(*exact)
    squares += [(2.0 * float(ndtri_exp(log_expit(-epsilon)))) ** 2 * _ROUND_UP for epsilon in pure]
    return Bounds(gaussian_epsilon(math.sqrt(math.fsum(squares)), delta)[0], exact[1])


def epsilon_strong(trace: Trace, delta: float, group_size: int = 1) -> Bounds:
    """Strong composition, for comparison, with the best split of delta between rounds and composition.

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
    """Epsilon of composing counts[i] mechanisms of epsilon epsilons[i], at the sum of their deltas plus ``delta``.

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
    """An estimate for cross-checks: privacy loss distributions of Google's dp-accounting (`accounting.events`)."""
    from accounting.events import dp_accounting_pld  # late: importing dp_accounting takes seconds

    return Bounds(dp_accounting_pld(trace, delta, group_size))


def epsilon_dp_accounting_rdp(trace: Trace, delta: float, group_size: int = 1) -> Bounds:
    """An estimate for cross-checks: Renyi DP of Google's dp-accounting (`accounting.events`)."""
    from accounting.events import dp_accounting_rdp  # late: importing dp_accounting takes seconds

    return Bounds(dp_accounting_rdp(trace, delta, group_size))


def _amplified_epsilon(part: Round, delta: float) -> float:
    """Epsilon of one sampled round that spends ``delta``."""
    unsampled_delta = delta / part.sample_rate
    epsilon = gaussian_epsilon(1.0 / part.noise_multiplier, unsampled_delta)[0] if unsampled_delta < 1.0 else 0.0
    if epsilon < 1.0:  # where a sum of logarithms would cancel, and could fall below 0
        return math.log1p(part.sample_rate * math.expm1(epsilon))
    with np.errstate(divide="ignore"):
        return float(np.logaddexp(np.log1p(-part.sample_rate), math.log(part.sample_rate) + epsilon))


def _unsampled_rounds(trace: Trace, accountant: str, group_size: int) -> tuple[Round, ...]:
    rounds = gaussian_rounds(trace, group_size)
    sampled = [part.sample_rate for part in rounds if part.sample_rate < 1.0]
    if sampled:
        raise UnsupportedMechanism(
            f"{accountant} covers shuffled epochs and full batches, not batches sampled with rate {sampled[0]:.6g}; "
            "use the accountant 'pld' or 'rdp'"
        )
    return rounds


@dataclass(frozen=True)
class Accountant:
    """A named method: its bounds on epsilon, and whether the upper one is proven."""

    name: str
    bounds: Callable[[Trace, float, int], Bounds]
    is_proven: bool = True

    def __call__(self, trace: Trace, delta: float, group_size: int = 1) -> PrivacyEstimate:
        unit = "example" if group_size == 1 else f"group of {group_size}"
        best = self._best(trace, delta, group_size) if trace.is_private else Bounds(math.inf, math.inf)
        name, kind = best.method or self.name, _kind(best.upper)
        found = PrivacyEstimate(best.upper, delta, trace.adjacency, name, kind, unit, group_size, best.lower)
        return weakened(found, () if self.is_proven else ("accountant_not_proven",))

    def _best(self, trace: Trace, delta: float, group_size: int) -> Bounds:
        """The method's bounds, or, if lower, those of the run without pure releases plus the sum of their epsilons."""
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


_METHODS = (
    Accountant("rdp", epsilon_rdp),
    Accountant("rdp-classic", epsilon_rdp_classic),
    Accountant("pld", bounds_pld),
    Accountant("gdp", epsilon_gdp),
    Accountant("zcdp", epsilon_zcdp),
    Accountant("zcdp-sampled", epsilon_zcdp_sampled, is_proven=False),
    Accountant("strong", epsilon_strong),
    Accountant("dp-accounting-pld", epsilon_dp_accounting_pld, is_proven=False),
    Accountant("dp-accounting-rdp", epsilon_dp_accounting_rdp, is_proven=False),
)


def auto(trace: Trace, delta: float, group_size: int = 1) -> PrivacyEstimate:
    """The tightest guarantee for the trace: the lowest epsilon of gdp, pld and rdp.

    They are tried in this order, up to the first that is within 0.1 % of a proven lower bound, pld only at deltas from
    1e-250 on. The result names the method that gave it.

    Raises: UnsupportedMechanism when none of them covers the trace.
    """
    accepted: list[PrivacyEstimate] = []
    refusals: list[str] = []
    for name in ("gdp", "pld", "rdp") if delta >= pld.MIN_DELTA else ("gdp", "rdp"):
        if any(found.epsilon <= _TIGHT * (found.lower_epsilon or 0.0) for found in accepted):
            break
        try:
            accepted.append(ACCOUNTANTS[name](trace, delta, group_size))
        except UnsupportedMechanism as refusal:
            refusals.append(str(refusal))
    if not accepted:
        raise UnsupportedMechanism(f"no accountant covers this trace: {'; '.join(dict.fromkeys(refusals))}")
    return min(accepted, key=lambda estimate: estimate.epsilon)


ACCOUNTANTS: Mapping[str, Callable[[Trace, float, int], PrivacyEstimate]] = {
    **{method.name: method for method in _METHODS},
    "auto": auto,
}


def account(trace: Trace, delta: float, accountant: str = "auto", group_size: int = 1) -> PrivacyEstimate:
    """(epsilon, delta) of ``trace`` under its own adjacency, for groups of ``group_size`` examples.

    The result's ``kind`` says whether this is a guarantee. A trace without noise has epsilon infinity and the kind
    ``none``; if the noise followed earlier results, kind is at best ``estimate``. The epsilon that a filter enforced
    for every example is returned instead, as accountant ``filter``, if it is lower or if only it is a guarantee. For a
    private selection the result is the epsilon after the selection (`accounting.selection`).

    Raises: UnsupportedMechanism when the accountant does not cover the trace, InvalidInput for an unknown accountant or
    a delta outside (0, 1).
    """
    delta, group_size = require_finite("delta", delta, above=0.0, below=1.0), require_group_size(group_size)
    if trace.selection is not None:
        from accounting.selection import account_selected  # late: it rests on this module

        return account_selected(replace(trace, selection=None), trace.selection, delta, accountant, group_size)
    parts = rare_cuts_apart(trace, delta, group_size)
    method = lookup(ACCOUNTANTS, accountant, "accountant")
    found = max((method(part, left, group_size) for part, left in parts), key=lambda estimate: estimate.epsilon)
    if parts != ((trace, delta),):  # what bounds the dominating runs from below does not bound the run itself
        found = replace(found, delta=delta, lower_epsilon=None if found.is_private else found.lower_epsilon)
    found = weakened(found, trace.reasons)
    if trace.filter is None:
        return found
    found = replace(found, lower_epsilon=None)  # of runs in which every example contributes in full
    if group_size > 1:
        return found
    enforced = PrivacyEstimate(enforced_epsilon(trace.filter, trace, delta), delta, trace.adjacency, "filter")
    return enforced if found.kind != "guarantee" or enforced.epsilon < found.epsilon else found


def enforced_epsilon(individual: IndividualFilter, trace: Trace, delta: float) -> float:
    """Epsilon of every example at ``delta`` by the budget of the filter ``individual`` and the releases of ``trace``.

    A guarantee under adding, removing or blanking the example, whatever the run did.
    """
    precision = math.fsum(r.noise_multiplier**-2 for r in trace.releases if isinstance(r, GaussianRelease))
    return individual.epsilon(delta, precision, pure_epsilons(trace))
