"""What the cheapest part of a run costs, in closed form and apart from the code under test: no epsilon is below it."""

from __future__ import annotations

import math

import numpy as np
from scipy.stats import norm

from dpsweep.accounting.mechanism.samplings import PoissonSampling, ShuffledSampling
from dpsweep.accounting.mechanism.trace import GaussianRelease, Trace

_ROUNDING = 1e-9


def assert_pays_for_a_step(trace: Trace, epsilon: float, delta: float) -> None:
    """No single step and no single release of ``trace`` alone may exceed ``delta`` at ``epsilon``.

    Steps under a filter are left out: it limits what an example contributes to them.
    """
    assert epsilon >= 0.0, "an epsilon is a number, and not negative"
    for segment in trace.segments if trace.filter is None else ():
        rate = {PoissonSampling: getattr(segment.sampling, "sample_rate", 0.0), ShuffledSampling: 1.0}.get(
            type(segment.sampling), 0.0
        )
        assert delta_of_gaussian(epsilon, segment.noise_multiplier, rate) <= delta * (1.0 + _ROUNDING)
    for release in trace.releases:
        if isinstance(release, GaussianRelease):
            assert delta_of_gaussian(epsilon, release.noise_multiplier, 1.0) <= delta * (1.0 + _ROUNDING)
        elif epsilon < release.epsilon < 700.0:
            excess = (math.exp(release.epsilon) - math.exp(epsilon)) / (1.0 + math.exp(release.epsilon))
            assert excess <= delta * (1.0 + _ROUNDING), "randomised response would need more"


def delta_of_gaussian(epsilon: float, noise_multiplier: float, rate: float) -> float:
    """delta(epsilon) of one Poisson-sampled Gaussian step when the example is removed: E[(p - e^epsilon q)+].

    p is the mixture of N(0, s^2) and, with probability ``rate``, N(1, s^2); q is N(0, s^2).
    """
    if rate <= 0.0 or epsilon > 700.0:
        return 0.0
    if noise_multiplier == 0.0:
        return rate
    growth = math.expm1(epsilon)
    threshold = 0.5 + noise_multiplier**2 * (np.log(growth + rate) - math.log(rate))  # p exceeds e^epsilon q above it
    if not math.isfinite(threshold):
        return 0.0
    with_it, without = norm.sf((threshold - 1.0) / noise_multiplier), norm.sf(threshold / noise_multiplier)
    return float(rate * (with_it - without) - growth * without)
