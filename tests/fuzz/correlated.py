"""Rounds of runs with correlated noise, by dense matrices: what one example moves, seen through C.

An example that joins steps t moves the release C g + w by the sum of columns t of C, each times its clipped gradient.
Nothing of `accounting` is called but the entries of C that define the strategy.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
from numpy.typing import NDArray
from scipy import linalg, special

from dpsweep.accounting.mechanism.noise_strategies import (
    BandedNoise,
    BufferedNoise,
    IndependentNoise,
    InverseRootNoise,
    LambdaNoise,
)
from dpsweep.accounting.mechanism.samplings import CyclicPoissonSampling, FixedOrderSampling
from dpsweep.accounting.mechanism.trace import Trace
from tests.fuzz import closed_forms
from tests.fuzz.lattice import Bracket
from tests.fuzz.rounds import Mixture, Rounds

Array = NDArray[np.float64]


def matrix_of(trace: Trace) -> Array:
    """Return C [steps, steps], of rows as long as the run."""
    steps = trace.steps
    match trace.strategy:
        case IndependentNoise():
            return np.eye(steps)
        case BandedNoise() | BufferedNoise():
            first = trace.strategy.column()
        case InverseRootNoise(bands=bands):
            inverse = [special.binom(0.5, place) * (-1.0) ** place for place in range(min(bands, steps))]
            return np.asarray(linalg.inv(_toeplitz(np.array(inverse), steps)))
        case LambdaNoise(decay=decay):
            first = np.asarray(decay ** np.arange(steps), dtype=np.float64)
    return _toeplitz(first, steps)


def _toeplitz(first: Array, steps: int) -> Array:
    column = np.zeros(steps)
    column[: min(len(first), steps)] = first[:steps]
    return np.asarray(linalg.toeplitz(column, np.zeros(steps)))


def whole_norm(trace: Trace, matrix: Array) -> float:
    """Return the norm by which the noise multiplier is relative: that of the first column of C, of all planned rows."""
    (segment,) = trace.segments
    planned = getattr(trace.strategy, "steps", segment.steps)
    assert planned == segment.steps, "runs of these cases are not cut"
    return float(np.linalg.norm(matrix[:, 0]))


def of_fixed_order(trace: Trace, delta: float, slack: float) -> Bracket:
    """One Gaussian: at least equal gradients at all visits; at most what all signs and directions give."""
    (segment,) = trace.segments
    assert isinstance(segment.sampling, FixedOrderSampling)
    matrix, apart = matrix_of(trace), segment.sampling.steps_per_epoch
    visits = [matrix[:, start::apart] for start in range(min(apart, segment.steps))]
    scale = segment.noise_multiplier * whole_norm(trace, matrix)
    low = max(float(np.linalg.norm(columns.sum(axis=1))) for columns in visits)
    high = max(math.sqrt(float(np.abs(columns.T @ columns).sum())) for columns in visits)
    return Bracket(
        closed_forms.gaussian(low / scale, delta) * (1.0 - slack),
        closed_forms.gaussian(high / scale, delta) * (1.0 + slack),
    )


def rounds_in_turns(trace: Trace) -> Rounds:
    """Rounds of an example of the first turn: its columns of C are orthogonal, and each is joined by a coin."""
    (segment,) = trace.segments
    sampling = segment.sampling
    assert isinstance(sampling, CyclicPoissonSampling)
    matrix = matrix_of(trace)
    columns = matrix[:, :: sampling.cycle_length]
    products = columns.T @ columns
    assert np.abs(products - np.diag(np.diag(products))).max() < 1e-12
    scale = segment.noise_multiplier * whole_norm(trace, matrix)
    rate = sampling.sample_rate
    shifts = np.sqrt(np.diag(products)) / scale
    if rate == 1.0:
        return Rounds((), float(np.linalg.norm(shifts)), ())
    counts = Counter(Mixture((0.0, float(f"{shift:.12g}")), (1.0 - rate, rate)) for shift in shifts)
    return Rounds(tuple(counts.items()), 0.0, ())
