"""Trace -> (epsilon, delta) of one run: the registry of methods by name, and the choice among them.

See docs/accounting.md for the choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from dpsweep.accounting import pld
from dpsweep.accounting.accountants.methods import Bounds, bounds_pld, epsilon_gdp, epsilon_rdp, epsilon_zcdp
from dpsweep.accounting.accountants.paper_only import (
    epsilon_dp_accounting_pld,
    epsilon_dp_accounting_rdp,
    epsilon_rdp_classic,
    epsilon_strong,
    epsilon_zcdp_sampled,
)
from dpsweep.accounting.errors import UnsupportedMechanism
from dpsweep.accounting.mechanism.estimates import Kind, PrivacyEstimate
from dpsweep.accounting.mechanism.reasons import weakened
from dpsweep.accounting.mechanism.reductions import is_attained
from dpsweep.accounting.mechanism.rounds import enforced_epsilon, pure_epsilons
from dpsweep.accounting.mechanism.trace import GaussianRelease, Trace
from dpsweep.accounting.mechanism.units import EXAMPLE
from dpsweep.accounting.registry import lookup

_TIGHT = 1.001
"""`auto` tries no further accountant once an epsilon is within this factor of a proven lower bound."""


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
        lower = best.lower if is_attained(trace, group_size) or not trace.is_private else None
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
