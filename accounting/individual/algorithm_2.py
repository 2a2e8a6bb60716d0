"""Algorithm 2 of paper A as published: a reference for comparison, never a bound.

It rounds each contribution to the *nearest* multiple of r, which can under-state a cost, and converts by Mironov's
bound. For claims use `dpsweep.accounting.individual.epsilons`, which is certified and tighter.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from dpsweep.accounting.errors import InvalidInput, UnsupportedMechanism, require_finite
from dpsweep.accounting.individual.contributions import Array
from dpsweep.accounting.mechanism.reductions import as_accounted
from dpsweep.accounting.mechanism.samplings import PoissonSampling
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.accounting.numerics.renyi import ORDERS, classic_terms, sampled_gaussian_rdp
from dpsweep.accounting.records.recorded_contributions import checked_snapshots


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
    return np.asarray(np.min(rdp + classic_terms(ORDERS, delta), axis=1))
