"""Algorithm 2 of paper A as published: a reference for comparison, never a bound.

It rounds each contribution to the *nearest* multiple of r, which can under-state a cost, and converts by Mironov's
bound. `accounting.individual` is what to use: it is certified, and tighter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accounting.contributions import Array
from accounting.errors import InvalidInput, UnsupportedMechanism, require_finite
from accounting.mechanism import PoissonSampling, Trace
from accounting.renyi import ORDERS, sampled_gaussian_rdp


def algorithm_2(
    steps: Sequence[int],
    contributions: NDArray[np.floating[Any]],
    trace: Trace,
    delta: float,
    rounding: float = 0.01,
) -> Array:
    """epsilon_i [examples] as paper A publishes it, from contributions [examples, snapshots] in units of C.

    An estimate under add/remove. Each contribution is rounded to the nearest of r, 2r, ..., 1 (``rounding`` is r); 0
    rounds to r. epsilon = min over alpha of rho + log(1/delta) / (alpha - 1) (paper A, Lemma A.2).

    Raises: UnsupportedMechanism unless the run is plain Poisson-sampled DP-SGD without side queries and releases.
    """
    require_finite("rounding", rounding, above=0.0, at_most=1.0)
    if len(steps) != contributions.shape[1]:
        raise InvalidInput(f"{contributions.shape[1]} columns of contributions, but {len(steps)} snapshots")
    levels = np.clip(np.rint(np.asarray(contributions, np.float64) / rounding), 1, round(1.0 / rounding)).astype(int)
    rdp = np.zeros((len(levels), len(ORDERS)))
    ends = [*steps[1:], trace.steps]
    for segment in trace.segments:
        if not isinstance(segment.sampling, PoissonSampling) or segment.side_queries or trace.releases:
            raise UnsupportedMechanism("Algorithm 2 covers Poisson-sampled DP-SGD without side queries and releases")
        spent = [
            max(0, min(stop, segment.stop_step) - max(start, segment.start_step))
            for start, stop in zip(steps, ends, strict=True)
        ]
        for level in np.unique(levels):
            cost = sampled_gaussian_rdp(segment.sampling.sample_rate, segment.noise_multiplier / (level * rounding))
            rdp += ((levels == level) @ np.array(spent, np.float64))[:, None] * cost
    return np.asarray(np.min(rdp + np.log(1.0 / delta) / (ORDERS - 1.0), axis=1))
