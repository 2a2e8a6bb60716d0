"""Upper bounds on a run's epsilon and delta without a lattice, for runs where a lattice certifies little or nothing.

All hold for both directions. Where sensitivities or cases are left out (`RoundLaw.truncated`), the missing probability
M of all rounds adds to delta in one direction and -log(1 - M) to epsilon in the other. The reason is that the true law
is at least 1 - M times the law that is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

import numpy as np
from scipy import special

from dpsweep.accounting.numerics.gaussian import gaussian_delta, gaussian_epsilon
from dpsweep.accounting.numerics.renyi import (
    ORDERS,
    Array,
    epsilon_improved,
    gaussian_rdp,
    mixed_rdp,
    pure_rdp,
    sampled_gaussian_rdp,
)
from dpsweep.accounting.numerics.rounding import ROUND_UP
from dpsweep.accounting.pld.group_rounds import GroupRounds
from dpsweep.accounting.pld.sensitivity import SensitivityMixture

CeilingMethod = Literal["pld", "gdp", "rdp"]
"""The method behind an upper bound: the law of the loss, one dominating Gaussian, or Renyi divergences."""

_STRONGEST = 1e6  # mean shift above which the Gaussian's closed form is too inaccurate
_CUTS = (0.0, 1e-8, 0.5)  # shares of delta spent on cutting off sensitivities
_WEAKEST = 1e-100  # sensitivity as which smaller ones count in Renyi DP, whose squares would underflow


def total_variation(rounds: GroupRounds) -> float:
    """Return an upper bound on delta at epsilon 0: the sum of the rounds' total variation distances.

    For a round it is at most the mean over its sensitivities a of TV(N(a, 1), N(0, 1)) = 2 Phi(a/2) - 1. The same holds
    for a block of random allocation, a mixture over the step that is drawn.
    """
    parts = [special.erf(rounds.gaussian / math.sqrt(8)), *np.tanh(np.asarray(rounds.pure) / 2)]
    parts.extend(count * float(special.erf(block.shift / math.sqrt(8))) for block, count in rounds.allocated)
    for law, count in rounds.laws:
        parts.append(count * law.missing)
        for probability, mixture in law.cases:
            shifted = special.erf(np.asarray(mixture.sensitivities) / math.sqrt(8))
            parts.append(count * probability * float(shifted @ np.asarray(mixture.probabilities)))
    return math.fsum(parts) * ROUND_UP


def gaussian_ceiling(rounds: GroupRounds, delta: float) -> float:
    """Return the epsilon of one Gaussian that dominates all rounds.

    A round is post-processing of the Gaussian with its largest sensitivity: draw case and sensitivity, shrink
    the output by the ratio, and add the noise that this removed. So is a block of random allocation: draw the step, and
    add noise for the others. Pure releases add to epsilon.
    """
    return _least(rounds, delta, _of_one_gaussian)


def gaussian_delta_ceiling(rounds: GroupRounds, epsilon: float) -> float:
    """Return the delta at ``epsilon`` of one Gaussian that dominates all rounds; the missing probabilities add to
    it.
    """
    missing = math.fsum(count * law.missing for law, count in rounds.laws)
    left = epsilon * (1 - 1e-12) - math.fsum(rounds.pure) * (1 + 1e-12)
    return min(1.0, gaussian_delta(dominating_mean(rounds), left)[0] + missing) if left >= 0.0 else 1.0


def delta_ceilings(rounds: GroupRounds, epsilons: Array) -> Array:
    """Return the upper bounds on delta at ``epsilons`` [points] >= 0: the least of total variation, one Gaussian and
    Renyi.

    The Renyi bound is Canonne, Kamath and Steinke 2020, Proposition 12, solved for delta. A bound for all epsilons is
    that at epsilon 0 by the inequalities of Pinsker and of Bretagnolle and Huber. They need the Kullback-Leibler
    divergence, which is at most the Renyi divergence of any order above 1.
    """
    missing = math.fsum(count * law.missing for law, count in rounds.laws) * ROUND_UP
    if not missing < 1.0:
        return np.ones_like(epsilons)
    rdp = _total_renyi(rounds) * ROUND_UP
    divergence = float(np.min(rdp))
    apart = math.sqrt(min(divergence / 2, -math.expm1(-divergence)))
    left = epsilons * (1 - 1e-12) + math.log1p(-missing)
    exponents = (ORDERS - 1.0) * (rdp - left[:, None] + np.log1p(-1.0 / ORDERS)) - np.log(ORDERS)
    renyi = np.exp(np.minimum(exponents.min(axis=1), 0.0)) * ROUND_UP + missing
    gaussian = np.array([gaussian_delta_ceiling(rounds, float(epsilon)) for epsilon in epsilons])
    everywhere = min(1.0, total_variation(rounds), apart * ROUND_UP + missing)
    return np.asarray(np.minimum(np.minimum(renyi, gaussian), everywhere))


def renyi_ceiling(rounds: GroupRounds, delta: float) -> float:
    """Return the epsilon of Renyi DP, each mixture as the sampled Gaussian mechanism that dominates it.

    The mixture is dominated by the Gaussian with its largest sensitivity, sampled with the probability that the
    sensitivity is positive: this replaces every positive sensitivity by the largest (docs/group-proof.md, "Vector to
    scalar").
    """
    return _least(rounds, delta, _of_renyi)


def _least(rounds: GroupRounds, delta: float, bound: Callable[[GroupRounds, float], float]) -> float:
    return min(bound(kept, left) + more for kept, left, more in _cut(rounds, delta))


def _cut(rounds: GroupRounds, delta: float) -> Iterator[tuple[GroupRounds, float, float]]:
    """(rounds without their largest, rarest sensitivities, remaining delta, addition to epsilon), one per share."""
    total = sum(count for _, count in rounds.laws)
    for share in _CUTS:
        kept = tuple((law.truncated(share * delta / total), count) for law, count in rounds.laws)
        missing = math.fsum(count * law.missing for law, count in kept) * ROUND_UP
        if missing < delta:
            yield replace(rounds, laws=kept), delta - missing, -math.log1p(-missing)
        if all(law.atoms <= 2 and len(law.cases) == 1 for law, _ in rounds.laws):
            return


def _of_one_gaussian(rounds: GroupRounds, delta: float) -> float:
    mean = dominating_mean(rounds)
    exact = gaussian_epsilon(mean, delta)[0] if mean < _STRONGEST else math.inf
    chernoff = mean * (mean / 2 + math.sqrt(-2 * math.log(delta))) * ROUND_UP  # Pr[N > z] <= exp(-z^2 / 2)
    return min(exact, chernoff) + math.fsum(rounds.pure)


def dominating_mean(rounds: GroupRounds) -> float:
    """Return the mean shift, in standard deviations, of one Gaussian that dominates all rounds but pure releases."""
    shifts = [law.largest * math.sqrt(count) for law, count in rounds.laws]
    shifts += [block.shift * math.sqrt(count) for block, count in rounds.allocated]
    return math.hypot(rounds.gaussian, *shifts) * (1 + 1e-12)


def _of_renyi(rounds: GroupRounds, delta: float) -> float:
    return float(epsilon_improved(_total_renyi(rounds), delta)) * ROUND_UP


def _total_renyi(rounds: GroupRounds) -> Array:
    """RDP at `ORDERS`, valid in both directions, of the rounds given that no missing sensitivity occurs.

    A block of random allocation costs at most what it would if the step drawn were known: one Gaussian.
    """
    total = gaussian_rdp(1 / max(rounds.gaussian, _WEAKEST)) if rounds.gaussian else np.zeros_like(ORDERS)
    for law, count in rounds.laws:
        shares = [p * (1.0 - mixture.missing) / (1.0 - law.missing) for p, mixture in law.cases]
        total = total + count * mixed_rdp(shares, [_renyi_of(mixture) for _, mixture in law.cases])
    for block, count in rounds.allocated:
        total = total + count * gaussian_rdp(1 / block.shift)
    for epsilon in rounds.pure:
        total = total + pure_rdp(epsilon)
    return np.asarray(total)


def _renyi_of(mixture: SensitivityMixture) -> Array:
    """RDP at `ORDERS` of a mixture given that no missing sensitivity occurs."""
    if mixture.sensitivities[-1] == 0.0:
        return np.zeros_like(ORDERS)
    first = int(mixture.sensitivities[0] == 0.0)
    rate = math.fsum(mixture.probabilities[first:]) / (1 - mixture.missing) if first else 1.0
    return sampled_gaussian_rdp(min(rate, 1.0), 1 / max(mixture.sensitivities[-1], _WEAKEST))
