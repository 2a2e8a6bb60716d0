"""Accountants that only reproductions of the papers and cross-checks need, reachable by name.

Each is looser than a method of `dpsweep.accounting.accountants.methods` where both apply, or an estimate. For claims
use those. Algorithm 2 of paper A is never a bound: it rounds contributions to the *nearest* level, which can
under-state a cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import scipy
from numpy.typing import ArrayLike
from scipy.special import logsumexp

from dpsweep.accounting.accountants.methods import Bounds, rho_to_epsilon, total_rdp
from dpsweep.accounting.errors import InvalidInput, UnsupportedMechanism, require_finite, require_numbers
from dpsweep.accounting.mechanism.reductions import as_accounted, rarest_apart
from dpsweep.accounting.mechanism.rounds import (
    Round,
    SampledGaussian,
    gaussian_rounds,
    pure_epsilons,
)
from dpsweep.accounting.mechanism.samplings import PoissonSampling
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.accounting.numerics.gaussian import gaussian_delta, gaussian_epsilon
from dpsweep.accounting.numerics.renyi import (
    ORDERS,
    Array,
    classic_terms,
    epsilon_classic,
    sampled_gaussian_rdp,
)
from dpsweep.accounting.numerics.roots import beginning
from dpsweep.accounting.numerics.rounding import ROUND_UP
from dpsweep.accounting.records.recorded_contributions import checked_snapshots

_ROUND_DOWN = 1.0 - 1e-12


def epsilon_rdp_classic(trace: Trace, delta: float, group_size: int = 1) -> Bounds:
    """Return Renyi DP with Mironov's conversion: the moments accountant of papers A and C."""
    apart, left = rarest_apart(trace, delta, group_size)
    return Bounds(epsilon_classic(total_rdp(apart, group_size), left))


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
    return Bounds(float(best.fun) * ROUND_UP + pure)


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


def _amplified_epsilon(part: Round, delta: float) -> float:
    """Return the epsilon of one sampled round that spends ``delta`` on average over its cases."""
    high = max(_amplified(case.sample_rate, case.noise_multiplier, delta) for case in part.cases)
    if len(part.cases) == 1:
        return high

    def is_within(epsilon: float) -> bool:
        return math.fsum(case.probability * _amplified_delta(case, epsilon) for case in part.cases) <= delta

    return beginning(is_within, 0.0, high)[1]  # the epsilon returned must hold


def _amplified_delta(case: SampledGaussian, epsilon: float) -> float:
    """Delta of the sampled Gaussian mechanism at ``epsilon``, by the same theorem."""
    _, q, sigma = case
    grown = math.log1p(math.expm1(epsilon) / q) if epsilon < 30.0 else epsilon - math.log(q)
    return q * gaussian_delta(1.0 / sigma, grown * _ROUND_DOWN)[0] * ROUND_UP


def _amplified(sample_rate: float, noise_multiplier: float, delta: float) -> float:
    unsampled_delta = delta / sample_rate
    epsilon = gaussian_epsilon(1.0 / noise_multiplier, unsampled_delta)[0] if unsampled_delta < 1.0 else 0.0
    if epsilon < 1.0:  # where a sum of logarithms would cancel, and could fall below 0
        return math.log1p(sample_rate * math.expm1(epsilon))
    with np.errstate(divide="ignore"):
        return float(np.logaddexp(np.log1p(-sample_rate), math.log(sample_rate) + epsilon))


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


def algorithm_2(
    steps: Sequence[int],
    contributions: ArrayLike,
    trace: Trace,
    delta: float,
    rounding: float = 0.01,
) -> Array:
    """Return per-example epsilons [examples] by Algorithm 2 of paper A: an estimate under add/remove adjacency.

    contributions [examples, snapshots] are in units of the clipping bound C. The snapshot taken at steps[j] holds until
    steps[j + 1]. Each is rounded to the nearest of r, 2r, ..., 1 (``rounding`` is r); 0 rounds to r, and so costs
    infinity without noise. Then epsilon = min over alpha of rho + log(1/delta) / (alpha - 1) (paper A, Lemma A.2).

    Raises: UnsupportedMechanism unless the run is plain Poisson-sampled DP-SGD without side queries and releases.
    InvalidInput for snapshots as `checked_snapshots` does, a delta outside (0, 1), a rounding outside [1e-6, 1] or one
    whose inverse is not whole.
    """
    rounding = require_finite("rounding", rounding, at_least=1e-6, at_most=1.0)
    finest = round(1.0 / rounding)
    if abs(finest * rounding - 1.0) > 1e-9:
        raise InvalidInput(
            f"rounding is {rounding}, but must be 1 over a whole number, or a contribution of 1 would be rounded to "
            f"another value; give {1.0 / finest}"
        )
    delta = require_finite("delta", delta, above=0.0, below=1.0)
    steps, values = checked_snapshots(steps, contributions, trace)
    trace = as_accounted(trace)
    for segment in trace.segments:
        if not isinstance(segment.sampling, PoissonSampling) or segment.side_queries or trace.releases:
            raise UnsupportedMechanism(
                "Algorithm 2 covers Poisson-sampled DP-SGD without side queries and releases, and not replace_one; "
                "use 'rdp' or 'pld'"
            )
    if not trace.is_private:
        return np.full(len(values), np.inf)
    levels = np.clip(np.rint(values * finest), 1, finest).astype(int)
    rdp = np.zeros((len(levels), len(ORDERS)))
    ends = [*steps[1:], trace.steps]
    for segment in trace.segments:
        spent = [
            max(0, min(stop, segment.stop_step) - max(start, segment.start_step))
            for start, stop in zip(steps, ends, strict=True)
        ]
        for level in np.unique(levels):
            cost = sampled_gaussian_rdp(segment.sampling.sample_rate, segment.noise_multiplier * finest / level)
            rdp += ((levels == level) @ np.array(spent, np.float64))[:, None] * cost
    return np.asarray(np.min(rdp + classic_terms(delta), axis=1))
