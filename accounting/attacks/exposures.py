"""Exposure of secrets (Carlini et al. 2019): its mean with an interval, and the largest that epsilon allows."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy import special

from dpsweep.accounting.errors import require_finite, require_whole


def mean_exposure(ranks: NDArray[np.int64], candidates: int, confidence: float = 0.95) -> tuple[float, float, float]:
    """Return the mean of log2 candidates - log2 rank in bits, and an interval of it over the secrets [n].

    ranks: from 1 to ``candidates``, of at least two secrets.

    The interval is Student's, as if two more secrets had been ranked, one first and one last: secrets of equal ranks
    would leave no doubt otherwise (Agresti and Caffo 2000 do so for shares). By simulation, 95% intervals cover the
    mean in 94% or more where any share of the secrets is ranked first and the others are guessed. Student's own cover
    it in 44% if 97% of 20 secrets are.

    >>> [round(value, 2) for value in mean_exposure(np.array([1, 1, 4, 16]), 1024)]
    [8.5, 3.21, 10.0]
    """
    most = math.log2(candidates)
    bits = most - np.log2(ranks)
    seen = np.concatenate([bits, [0.0, most]])
    error = float(seen.std(ddof=1)) / math.sqrt(len(seen))
    half = float(special.stdtrit(len(seen) - 1, 0.5 + confidence / 2.0)) * error
    mean, middle = float(bits.mean()), float(seen.mean())
    return mean, max(min(middle - half, mean), 0.0), min(max(middle + half, mean), most)


def exposure_limit(epsilon: float, delta: float, candidates: int) -> float:
    """Return the largest expected exposure, in bits, of a secret whose examples together pay ``epsilon`` at ``delta``.

    Guarantee: holds for any attack that ranks the secret among ``candidates`` drawn by one law, itself included, under
    the adjacency of the epsilon that takes the secret out of the data, or puts something independent of it in its
    place. Proof: without the secret all candidates are alike to the model, so that its rank is uniform, and at most r
    with probability r / R. With it the probability is at most min(e^epsilon r / R + delta,
    1 - e^-epsilon (1 - delta - r / R), 1). The mean of log2 R - log2 rank is the sum over r below R of
    P(rank <= r) log2((r + 1) / r).

    >>> round(exposure_limit(0.0, 0.0, 1024), 3), round(exposure_limit(1.0, 1e-5, 1024), 3)
    (1.437, 2.626)
    """
    epsilon = require_finite("epsilon", epsilon, at_least=0.0)
    delta = require_finite("delta", delta, at_least=0.0, at_most=1.0)
    r = np.arange(1, require_whole("candidates", candidates, at_least=2))
    share = r / candidates
    with np.errstate(over="ignore"):
        reached = np.minimum(np.exp(epsilon) * share + delta, 1.0 - math.exp(-epsilon) * (1.0 - delta - share))
    return float(np.sum(np.minimum(reached, 1.0) * np.log2((r + 1) / r)))
