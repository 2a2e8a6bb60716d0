"""The epsilon of a run with thousands of noise levels, computed as that of one example whose steps all differ.

On a lattice every distinct round is discretised and transformed, in some milliseconds each.
`dpsweep.accounting.individual.exact_composition` spreads the steps over a few hundred nodes of effective precision
instead, with a certified error, at a cost that hardly grows with their number. Its bounds hold for every list of
sampled Gaussian mechanisms.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from dpsweep.accounting.individual.contributions import StepLaw, StepsLaw, StepWeights, Stretch, one_by_one
from dpsweep.accounting.numerics.rounding import ROUND_UP
from dpsweep.accounting.pld import (
    MIN_DELTA,
    TOLERANCE,
    GroupRounds,
    PairBounds,
    RoundLaw,
    SensitivityMixture,
    epsilon_of_rounds,
)

_FEW = 1000
"""Up to this many distinct rounds for each law of steps are composed on a lattice alone, which is tighter."""
_CLOSE = 1e-3
"""Relative gap between the bounds above which a lattice is tried, too."""
_AIM = 3e-4
"""Relative gap at which no more nodes are tried."""
_DENSITIES = (1, 2, 4, 8)
"""Factors on the number of nodes, tried in this order; a factor divides the error between nodes by its square."""
_GAIN = 0.5
"""Ratio of successive gaps above which more nodes would not help enough."""
_RARELY = 1e-3
"""Largest probability of all cases of a round but the likeliest: more would be too costly as steps of their own."""

Steps = Mapping[StepsLaw, tuple[Stretch, ...]]


def epsilon_of_many_rounds(rounds: GroupRounds, delta: float, tolerance: float = TOLERANCE) -> PairBounds:
    """Return `dpsweep.accounting.pld.epsilon_of_rounds`, in seconds also where thousands of rounds differ.

    Both bounds are certified either way, and hold for any ``tolerance``, the target for their gap on a lattice. Rounds
    that are no sampled Gaussian mechanisms, such as rounds of groups in sampled batches, are composed on a lattice,
    however many differ.
    """
    if len(rounds.laws) <= _FEW or not rounds.is_private or not delta >= MIN_DELTA:
        return epsilon_of_rounds(rounds, delta, tolerance)
    steps = _as_steps(rounds)
    if steps is None or len(rounds.laws) <= _FEW * len(steps):
        return epsilon_of_rounds(rounds, delta, tolerance)
    found = _on_nodes(rounds, steps, delta)
    lower = found.lower if not rounds.has_draws else _of_likeliest(rounds, delta)
    if found.upper > found.lower * (1.0 + max(_CLOSE, tolerance)):
        composed = epsilon_of_rounds(rounds, delta, tolerance)
        found, lower = min(found, composed, key=lambda bounds: bounds.upper), max(lower, composed.lower)
    return found._replace(lower=lower)


def _of_likeliest(rounds: GroupRounds, delta: float) -> float:
    """Return a lower bound on epsilon where rounds are one of several cases.

    With probability 1 - r all rounds are their likeliest cases, and which they are is revealed. So delta(epsilon) is
    at least (1 - r) times that of these.
    """
    laws, others = [], 0.0
    for law, count in rounds.laws:
        (_, likeliest), *rest = _by_chance(law)
        laws.append((RoundLaw.certain(likeliest), count))
        others += count * math.fsum(chance for chance, _ in rest)
    sure = replace(rounds, laws=tuple(laws))
    steps = _as_steps(sure)
    if steps is None or not others < 1.0 or not delta < 1.0 - others:
        return 0.0
    return _on_nodes(sure, steps, delta / (1.0 - others) * ROUND_UP).lower


def _as_steps(rounds: GroupRounds) -> Steps | None:
    """Return the steps of sampled Gaussian mechanisms that together dominate the sampled rounds; None if there are none
    such.

    A round that is one of several cases becomes a step of the likeliest case and, with its probability, one of each
    other case (`dpsweep.accounting.individual.contributions._one_by_one`).
    """
    if rounds.allocated:
        return None
    counts: dict[StepsLaw, list[Stretch]] = defaultdict(list)
    for law, count in rounds.laws:
        if law.dropped or not all(map(_is_sampled_gaussian, (mixture for _, mixture in law.cases))):
            return None
        cases = _by_chance(law)
        others = [chance for chance, _ in cases[1:]]
        if math.fsum(others) > _RARELY:
            return None
        for chance, (_, mixture) in zip([1.0, *one_by_one(others)], cases, strict=True):
            _, rate = mixture.probabilities
            counts[StepLaw(rate, chance)].append(_stretch(mixture.sensitivities[1], count))
    return {law: tuple(stretches) for law, stretches in counts.items()}


def _by_chance(law: RoundLaw) -> list[tuple[float, SensitivityMixture]]:
    """Return the cases of a round, the likeliest first."""
    return sorted(law.cases, key=lambda case: -case[0])


def _is_sampled_gaussian(mixture: SensitivityMixture) -> bool:
    return len(mixture.sensitivities) == 2 and mixture.sensitivities[0] == 0.0 and not mixture.missing


def _stretch(sensitivity: float, count: int) -> Stretch:
    """Return ``count`` steps of one precision, whatever the contribution."""
    return Stretch(0, 0, count, 0.0, 0.0, sensitivity**2)


def _on_nodes(rounds: GroupRounds, steps: Steps, delta: float) -> PairBounds:
    """Return the bounds of the steps on more and more nodes, until they are close."""
    from dpsweep.accounting.individual.exact_composition import (
        bounds_of_costs,  # loads numba and compiled code, which takes half a second
    )
    from dpsweep.accounting.individual.rdp import renyi_costs
    from dpsweep.accounting.individual.spreading import NODES, spread_linearly

    def costs(density: int) -> StepWeights:
        nodes, weights = spread_linearly(steps, np.ones((1, 1)), nodes=density * NODES)
        return StepWeights(nodes, weights, np.array([rounds.gaussian**2]), rounds.pure, 1)

    renyi = renyi_costs(costs(1), delta)
    upper, lower = float(renyi.epsilons[0]), 0.0
    for density in _DENSITIES:
        above, below, _ = bounds_of_costs(costs(density), renyi, 0.0)
        gap, upper, lower = upper - lower, min(upper, float(above[0])), max(lower, float(below[0]))
        if upper <= lower * (1.0 + _AIM) or upper - lower > _GAIN * gap:
            break
    return PairBounds(upper, lower, "rdp" if upper == renyi.epsilons[0] else "pld")
