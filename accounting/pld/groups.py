"""Certified privacy of a whole trace, for one example, groups and given examples; and conversions to compare with.

Guarantee: for a group of ``group_size`` examples under the trace's adjacency, the run is (upper, delta)-DP, with every
step's output visible and later steps chosen adaptively. The lower one is a certified lower bound on the exact epsilon
of the rounds' dominating pairs. A group without such pairs has the lower bound of one example. It is given only where
a run that the trace describes is these pairs (`dpsweep.accounting.mechanism.reductions.is_attained`). Proofs:
docs/group-proof.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpsweep.accounting.errors import require_numbers
from dpsweep.accounting.mechanism.correlated import have_common_rounds
from dpsweep.accounting.mechanism.estimates import Claim
from dpsweep.accounting.mechanism.reductions import is_attained, is_attained_by
from dpsweep.accounting.mechanism.rounds import gaussian_rounds, pure_epsilons, require_group_size
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.accounting.numerics.roots import root
from dpsweep.accounting.pld.ceilings import CeilingMethod
from dpsweep.accounting.pld.chains import Chain, delta_of_chain, epsilon_of_chain, rounds_or_chain
from dpsweep.accounting.pld.composition import (
    MIN_DELTA,
    TOLERANCE,
    delta_of_rounds,
    epsilon_of_rounds,
    require_pld_delta,
    upper_epsilon_of_rounds,
)
from dpsweep.accounting.pld.group_rounds import rounds_of_examples, rounds_of_group
from dpsweep.accounting.pld.loss import DIRECTIONS
from dpsweep.accounting.pld.saddlepoint import cumulants, saddle_at_epsilon

_CONFIRMATIONS = 9  # epsilons tried above the saddle point's; steps of 0.05 % that double each time
_GROWTH = 1.25  # ratio of successive epsilons tried if the saddle point is of no use


@dataclass(frozen=True)
class CertifiedEpsilon:
    """lower <= exact epsilon at ``delta`` <= upper; both are infinite for a run without noise.

    lower: None where no lower bound is known for the run that took place: batches may be cut, epochs are shuffled, a
    filter limits examples, or noise or end followed results.
    method: how upper was obtained: ``pld``, or ``gdp`` or ``rdp`` if one dominating Gaussian or Renyi DP is lower.
    kind: strength of upper for the run; ``estimate`` where the pairs bounded here need not dominate its steps.
    """

    upper: float
    lower: float | None
    delta: float
    method: CeilingMethod = "pld"
    kind: Claim = "guarantee"


@dataclass(frozen=True)
class CertifiedDelta:
    """lower <= exact delta at ``epsilon`` <= upper; both are 1 for a run without noise.

    lower, kind: as in `CertifiedEpsilon`.
    """

    upper: float
    lower: float | None
    epsilon: float
    kind: Claim = "guarantee"


def epsilon_pld(trace: Trace, delta: float, group_size: int = 1, tolerance: float = TOLERANCE) -> CertifiedEpsilon:
    """Return the epsilon of a trace at ``delta`` for a group of ``group_size`` examples, certified from both sides.

    The bounds hold for any ``tolerance``, the target for their relative gap. Guarantee: see the module's description.

    Raises: InvalidInput for a delta outside [1e-250, 1).
    """
    match rounds_or_chain(trace, group_size):
        case Chain() as chain:
            found = epsilon_of_chain(chain, delta, tolerance)
        case rounds:
            found = epsilon_of_rounds(rounds, delta, tolerance)
    return CertifiedEpsilon(found.upper, proven_lower(found.lower, trace, group_size), delta, found.method, trace.kind)


def delta_pld(trace: Trace, epsilon: float, group_size: int = 1, tolerance: float = TOLERANCE) -> CertifiedDelta:
    """Return the delta of a trace at ``epsilon`` >= 0 for a group of ``group_size`` examples, certified from both
    sides.

    Guarantee: see the module's description. Raises: InvalidInput for a negative or infinite epsilon.
    """
    match rounds_or_chain(trace, group_size):
        case Chain() as chain:
            found = delta_of_chain(chain, epsilon, tolerance)
        case rounds:
            found = delta_of_rounds(rounds, epsilon, tolerance)
    return CertifiedDelta(found.upper, proven_lower(found.lower, trace, group_size), epsilon, trace.kind)


def proven_lower(of_pairs: float, trace: Trace, group_size: int = 1) -> float | None:
    """Return the lower bound on the pairs' cost, if it is one on the cost of the run; without noise it always is."""
    return of_pairs if is_attained(trace, group_size) or not trace.is_private else None


def group_epsilons(
    trace: Trace, delta: float, sizes: Sequence[int], tolerance: float = TOLERANCE
) -> tuple[CertifiedEpsilon, ...]:
    """Return the epsilon for each group size, certified from both sides, in the order of ``sizes``.

    Guarantee: for groups of each size, (upper, delta)-DP under the trace's adjacency (paper B, Theorems 3.1 and 3.3).
    Reshuffled epochs have Theorem 3 of docs/group-proof.md, turns and random allocation its section Chains.
    """
    return tuple(epsilon_pld(trace, delta, size, tolerance) for size in require_numbers("sizes", sizes, 1))


def epsilon_of_examples(
    trace: Trace, steps: Sequence[int], contributions: npt.ArrayLike, delta: float, tolerance: float = TOLERANCE
) -> CertifiedEpsilon:
    """Return the epsilon of one group of given examples (a user's records, a household) with their own contributions.

    `steps`: first step of each snapshot, ascending from 0, shape [snapshots]. `contributions`: contribution over
    sensitivity (c / S), in [0, 1], shape [members, snapshots]; a snapshot holds until the next.

    Claim: (upper, delta)-DP of the group under the trace's adjacency. It is a guarantee if the contributions bound the
    members' true ones at every step and the noise did not follow results (`Trace.individual_kind`), else an estimate.
    lower is None for several members and in random allocation (`is_attained_by`). Proofs: docs/group-proof.md.
    """
    delta = require_pld_delta(delta)
    known = is_attained_by(trace, len(require_numbers("contributions", contributions, 2)))
    bounded = epsilon_of_rounds if known else upper_epsilon_of_rounds
    found = bounded(rounds_of_examples(trace, steps, contributions), delta, tolerance)
    lower = found.lower if known or math.isinf(found.lower) else None
    return CertifiedEpsilon(found.upper, lower, delta, found.method, trace.individual_kind)


def linear_growth(trace: Trace, delta: float, group_size: int) -> float:
    """Return k times the epsilon of one example: the "lower bound" in the figures of paper B, Section 4.

    It bounds the epsilon of a group from below only if `grows_at_least_linearly`; else it is a reference. With sampled
    batches and few steps a group may cost less, because its members are rarely in the same batch.
    """
    group_size = require_group_size(group_size)
    of_one = epsilon_pld(trace, delta)
    return group_size * (of_one.upper if of_one.lower is None else of_one.lower)


def grows_at_least_linearly(trace: Trace) -> bool:
    """Return whether `linear_growth` is a proven lower bound: the run is Gaussian, and nothing is sampled or shuffled.

    Such a run is one Gaussian with mean shift mu, or k mu for a group of k. With b = t mu/2 + eps/mu, the derivative of
    delta(t eps, t mu) by t is e^(t eps) (mu phi(b) - eps Phi(-b)). This is not negative, because Phi(-b) <= phi(b) / b
    and b >= eps / mu. So delta(k eps, k mu) >= delta(eps, mu).
    """
    if not is_attained(trace) or pure_epsilons(trace) or not have_common_rounds(trace, 2):
        return False
    return not any(part.is_sampled for part in gaussian_rounds(trace))


@np.errstate(all="ignore")
def vadhan_epsilon(trace: Trace, delta: float, group_size: int) -> float:
    """Return the group epsilon by the generic conversion, for comparison; infinite where it needs a delta below 1e-250.
    It says that (eps, d)-DP for one example is (k eps, d (e^{k eps} - 1) / (e^eps - 1))-DP for k (Vadhan 2017, Lemma
    2.2; paper B, Theorem 1.1). The smallest such eps is estimated by saddle point and then certified.
    """
    group_size = require_group_size(group_size)
    delta = require_pld_delta(delta)
    rounds = rounds_of_group(trace)
    if not rounds.is_private:
        return math.inf
    if group_size == 1:
        return epsilon_pld(trace, delta).upper
    curves = [cumulants(rounds, direction, 1e-280) for direction in DIRECTIONS]

    def log_excess(epsilon: float) -> float:
        worst = max(saddle_at_epsilon(curve, epsilon).log_delta for curve in curves)
        return worst + _log_growth(epsilon, group_size) - math.log(delta)

    def holds(epsilon: float) -> bool:
        wanted = math.log(delta) - _log_growth(epsilon, group_size)
        return wanted > math.log(MIN_DELTA) and delta_pld(trace, epsilon, tolerance=1e-3).upper <= math.exp(wanted)

    low, high = 1e-9, math.log(delta / MIN_DELTA) / max(group_size - 1, 1) + 1e-9
    if log_excess(low) > 0.0 >= log_excess(high):
        epsilon = root(log_excess, low, high, absolute=1e-9)
        for attempt in range(_CONFIRMATIONS):
            if holds(epsilon):
                return group_size * epsilon
            epsilon *= 1 + 0.0005 * 2**attempt
    return group_size * _least(holds, epsilon_pld(trace, delta).upper, high)  # few steps: the saddle point is far off


def _least(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Return the least value from ``low`` to ``high`` that holds, to 0.1 %; infinity if none is found."""
    if low == 0.0 or holds(low):
        return low
    steps = (float(low * _GROWTH**power) for power in range(1, 100))
    found = next((value for value in itertools.takewhile(high.__ge__, steps) if holds(value)), math.inf)
    low = found / _GROWTH
    while found > 1.001 * low and math.isfinite(found):
        middle = (low + found) / 2.0
        low, found = (low, middle) if holds(middle) else (middle, found)
    return found


def _log_growth(epsilon: float, group_size: int) -> float:
    """log((exp(k eps) - 1) / (exp(eps) - 1)) without overflow."""
    grown = group_size * epsilon
    return grown - epsilon + math.log(-math.expm1(-grown)) - math.log(-math.expm1(-epsilon))
