"""The epsilon of a run with thousands of noise levels, computed as that of one example whose steps all differ.

On a lattice every distinct round is discretised and transformed, in some milliseconds each.
`dpsweep.accounting.individual.exact_composition` spreads the steps over a few hundred nodes of effective precision
instead, with a certified error, at a cost that hardly grows with their number. Its bounds hold for every list of
sampled Gaussian mechanisms. Where batches may be cut, few of the levels are put on a lattice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from dpsweep.accounting.individual.contributions import StepLaw, StepsLaw, StepWeights, Stretch
from dpsweep.accounting.pld import (
    MIN_DELTA,
    TOLERANCE,
    GroupRounds,
    PairBounds,
    epsilon_of_rounds,
    upper_of_many_levels,
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
_FEW_DRAWN = 100
"""The same where batches may be cut: bounds from above by few levels are as close, in a tenth of the time."""

Steps = Mapping[StepsLaw, tuple[Stretch, ...]]


def epsilon_of_many_rounds(rounds: GroupRounds, delta: float, tolerance: float = TOLERANCE) -> PairBounds:
    """Return `dpsweep.accounting.pld.epsilon_of_rounds`, in seconds also where thousands of rounds differ.

    Both bounds are certified either way, and hold for any ``tolerance``, the target for their gap on a lattice. Other
    rounds than sampled Gaussian mechanisms, such as those of groups in sampled batches, are composed on a lattice,
    however many differ. Where batches may be cut, the lower bound of many is 0: no run is known to be their pairs.
    """
    from_above = rounds.has_draws and not rounds.allocated
    many = len(rounds.laws) > (_FEW_DRAWN if from_above else _FEW)
    if not many or not rounds.is_private or not delta >= MIN_DELTA:
        return epsilon_of_rounds(rounds, delta, tolerance)
    if from_above:
        return upper_of_many_levels(rounds, delta, tolerance)
    steps = _as_steps(rounds)
    if steps is None or len(rounds.laws) <= _FEW * len(steps):
        return epsilon_of_rounds(rounds, delta, tolerance)
    found = _on_nodes(rounds, steps, delta)
    if found.upper > found.lower * (1.0 + max(_CLOSE, tolerance)):
        composed = epsilon_of_rounds(rounds, delta, tolerance)
        lower = max(found.lower, composed.lower)
        found = min(found, composed, key=lambda bounds: bounds.upper)._replace(lower=lower)
    return found


def _as_steps(rounds: GroupRounds) -> Steps | None:
    """Return the steps of sampled Gaussian mechanisms that the sampled rounds are; None where one is none."""
    if rounds.allocated or rounds.has_draws:
        return None
    counts: dict[StepsLaw, list[Stretch]] = defaultdict(list)
    for law, count in rounds.laws:
        ((_, mixture),) = law.cases
        if law.missing or len(mixture.sensitivities) != 2 or mixture.sensitivities[0] > 0.0:
            return None
        _, rate = mixture.probabilities
        counts[StepLaw(rate, 1.0)].append(_stretch(mixture.sensitivities[1], count))
    return {law: tuple(stretches) for law, stretches in counts.items()}


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
