"""Buffered linear Toeplitz matrices (BLTs) of correlated noise: as wide as the run, made from a few buffers.

Row and column distance j >= 1 has the entry c_j = sum_k w_k l_k^(j-1) of C, with c_0 = 1 and d pairs of weight w_k > 0
and decay 0 < l_k < 1. C^-1 is of the same kind (Dvijotham et al., arXiv 2404.16706, Lemma 5.2; McMahan, Xu and Zhang,
arXiv 2408.08868). It comes from the eigenvalues of the symmetric matrix diag(l) - sqrt(w) sqrt(w)^T.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from dpsweep.accounting.errors import Unreachable, count_of
from dpsweep.accounting.mechanism.toeplitz import Array, square_root_column

_FLAT: Final = 1e-6
"""Largest derivative of the log of the error by the coordinates of `_pairs_at`, of what counts as the best."""
_ITERATIONS: Final = 5_000
_FITTED: Final = 200
"""Number of entries of the square root of prefix sums that the first guess fits."""


@dataclass(frozen=True)
class Pairs:
    """decays, weights: [d] each, of C or, with weights of either sign, of C^-1.

    A trainer makes z = C^-1 w from a buffer s_k for each pair of C: z_t = w_t - sum_k weights[k] s_k, then s_k becomes
    decays[k] s_k + z_t. Buffers begin at 0.
    """

    decays: Array
    weights: Array

    @property
    def kept(self) -> int:
        """Number of buffers of every weight that a trainer keeps, as doubles."""
        return len(self.decays)

    def column(self, steps: int) -> Array:
        """Return the first column [steps] of the matrix."""
        rest = self.weights @ self.decays[:, None] ** np.arange(steps - 1)
        return np.concatenate(([1.0], rest))[:steps]

    def inverse(self) -> Pairs:
        """Return the pairs of C^-1, whose weights are negative."""
        root = np.sqrt(self.weights)
        decays, turns = np.linalg.eigh(np.diag(self.decays) - np.outer(root, root))
        return Pairs(decays, -((root @ turns) ** 2))

    def applied(self, right: Array) -> Array:
        """Return the matrix times ``right`` [steps]."""
        moved = (weight * _moved(decay, right) for decay, weight in zip(self.decays, self.weights, strict=True))
        return np.asarray(right + sum(moved), dtype=np.float64)


def _moved(decay: float, right: Array) -> Array:
    """Return what a buffer holds before each step: y_t = sum_(s < t) decay^(t-1-s) right_s."""
    from scipy import signal  # late: importing it takes a third of a second

    return np.asarray(signal.lfilter([0.0, 1.0], [1.0, -decay], right), dtype=np.float64)


@functools.lru_cache(maxsize=64)
def best_buffered(buffers: int, steps: int, apart: int) -> Pairs:
    """Return the C of ``buffers`` pairs with the least mean squared error of the prefix sums of ``steps`` steps.

    apart: steps between two participations of an example; at least ``steps`` for one participation. The objective is
    the mean error times the squared sensitivity (McMahan, Xu and Zhang, Section 4). A run with fewer than 2 ``buffers``
    + 2 steps has as many pairs as it can tell apart.

    Raises: Unreachable if no stationary point is found.
    """
    from scipy import optimize  # late: importing it takes a third of a second

    objective = _BufferedError(steps, apart)
    found = optimize.minimize(
        objective,
        _first_guess(max(1, min(buffers, (steps - 1) // 2)), steps),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": _ITERATIONS, "maxfun": 2 * _ITERATIONS, "ftol": 0.0, "gtol": 1e-9, "maxcor": 50},
    )
    if not np.abs(found.jac).max() <= _FLAT:
        raise Unreachable(
            f"no best strategy of {count_of(buffers, 'buffer')} for {count_of(steps, 'step')} was found; take fewer"
        )
    pairs = _pairs_at(found.x)
    order = np.argsort(-pairs.decays)
    return Pairs(pairs.decays[order], pairs.weights[order])


def _pairs_at(point: Array) -> Pairs:
    """Return the pairs at ``point`` [2 d]: logs of weights over what they leave of 1, and logits of decays.

    The weights add up to less than 1, so that all decays of C^-1 lie between -1 and 1.
    """
    from scipy import special  # late: importing it takes a third of a second

    logs, logits = np.split(point, 2)
    weights = special.softmax(np.append(logs, 0.0))[:-1]
    return Pairs(np.asarray(special.expit(logits), dtype=np.float64), np.asarray(weights, dtype=np.float64))


def _first_guess(buffers: int, steps: int) -> Array:
    """Return a point of `_pairs_at` [2 d]: decays that forget at rates between 0.7 and 1 / steps.

    Weights are fitted to the square root of the matrix of prefix sums.
    """
    from scipy import optimize  # late: importing it takes a third of a second

    edges = np.geomspace(0.7, min(0.4, 1.0 / steps), buffers + 1)
    rates = np.sqrt(edges[1:] * edges[:-1])
    at = np.unique(np.geomspace(1, max(1, steps - 1), _FITTED).astype(int))
    powers = (1.0 - rates) ** (at[:, None] - 1)
    root = square_root_column(steps + 1)[at]
    weights, _ = optimize.nnls(powers / root[:, None], np.ones(len(at)))
    weights = np.maximum(weights, 1e-3 * rates)
    weights *= min(1.0, 0.5 / weights.sum())
    return np.concatenate((np.log(weights / (1.0 - weights.sum())), np.log((1.0 - rates) / rates)))


@dataclass(frozen=True)
class _BufferedError:
    """Log of the mean squared error ||C e||^2 sum_t (1 - t/T) b_t^2 with C b = 1, and its derivatives.

    e is 1 at steps 0, apart, 2 apart, ..., so that ||C e|| is the sensitivity of a fixed order. The derivative of b
    by a parameter p is -C^-1 (dC/dp) b, so that of the error is -2 u (dC/dp) b, where C^T u = the weighted b.
    """

    steps: int
    apart: int

    def __call__(self, point: Array) -> tuple[float, Array]:
        pairs, late = _pairs_at(point), 1.0 - np.arange(self.steps) / self.steps
        inverse = pairs.inverse()
        b = inverse.applied(np.ones(self.steps))
        u = inverse.applied((late * b)[::-1])[::-1]
        turns = np.where(np.arange(self.steps) % self.apart == 0, 1.0, 0.0)
        by_weights = [_moved(decay, turns) for decay in pairs.decays]
        moved = turns + sum(weight * each for weight, each in zip(pairs.weights, by_weights, strict=True))
        square, error = float(moved @ moved), float(b @ (late * b))
        slopes = np.empty((2, len(pairs.decays)))
        for k, (decay, weight, by_weight) in enumerate(zip(pairs.decays, pairs.weights, by_weights, strict=True)):
            of_b = _moved(decay, b)
            by_decay, of_b_twice = weight * _moved(decay, by_weight), weight * _moved(decay, of_b)
            slopes[0, k] = 2.0 * moved @ by_weight / square - 2.0 * u @ of_b / error
            slopes[1, k] = 2.0 * moved @ by_decay / square - 2.0 * u @ of_b_twice / error
        slopes[0] = pairs.weights * (slopes[0] - slopes[0] @ pairs.weights)
        slopes[1] *= pairs.decays * (1.0 - pairs.decays)
        return math.log(square * error), slopes.ravel()
