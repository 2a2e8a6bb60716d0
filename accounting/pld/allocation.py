"""Random allocation: every example joins one of the t steps of an epoch, chosen uniformly and independently of others.

An epoch is dominated by the pair P = (1/t) sum_i N(e_i / sigma, I) and Q = N(0, I) in t dimensions (Chua et al., "Balls
and bins", 2025; Feldman and Shenfeld, arXiv 2502.08202), under adding or removing one example. Its likelihood ratio is
M = mean of t independent Y_i = exp(x_i / sigma - 1 / (2 sigma^2)), x_i ~ N(0, 1) under Q, so that

    delta of removing = E_Q[(M - e^eps)+],    delta of adding = E_Q[(1 - e^eps M)+].

Both are expectations of convex functions of M. So a law above M in convex order gives a pair that dominates, and one
below M in convex order a pair that is dominated; convex order is kept by sums of independent variables:

- upper: mass between two points of a grid is moved onto them, so that its mean stays.
- lower: mass between two points is merged into its mean.

Sums are formed by doubling on grids that are even in log M and follow the law as it narrows. Mass above a grid is moved
to its end, and what that takes off the mean is mass of P at loss infinity; mass below is moved onto 0 and its end.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy import special

from dpsweep.accounting.errors import InvalidInput, require_finite, require_whole
from dpsweep.accounting.pld.composition import MIN_DELTA, TOLERANCE, CertifiedEpsilon, require_pld_delta
from dpsweep.accounting.pld.fourier import LatticePlan, compose_equal
from dpsweep.accounting.pld.lattice import make_plan, spacing_for
from dpsweep.accounting.pld.loss import DIRECTIONS, Bound, Cells, Direction, LatticeLoss, merge, spread
from dpsweep.accounting.pld.saddlepoint import Cumulants, saddle_at_delta, saddle_at_epsilon
from dpsweep.accounting.pld.sensitivity import Array

MOST_STEPS: Final = 1_000_000
"""Most steps of an epoch."""
Places = npt.NDArray[np.int64]
_POINTS: Final = 1280
"""Points of a grid. The width of the bounds falls with its square, the time of a sum grows with it."""
_ROUNDING: Final = 1e-8
"""Relative error of masses, far above that of sums of a million positive terms."""
_LOST: Final = 1e-6
"""Share of delta that all epochs together may lose to the ends of grids."""
_ATTEMPTS: Final = 3


@dataclass(frozen=True)
class _Law:
    """Atoms of M under Q: ``values`` ascending from 0 or above, with ``masses``; both [atoms].

    lost: what grids have taken off the mean, for a bound from above.
    """

    values: Array
    masses: Array
    lost: float


def epsilon_of_allocation(
    noise_multiplier: float,
    steps_per_epoch: int,
    epochs: int,
    delta: float,
    per_epoch: int = 1,
    tolerance: float = TOLERANCE,
) -> CertifiedEpsilon:
    """Return the epsilon of random allocation at ``delta``, certified from both sides.

    noise_multiplier: noise std over the L2 sensitivity of the clipped sum. per_epoch: each example joins one step of
    each of ``per_epoch`` equal blocks of the epoch; it divides steps_per_epoch. tolerance: target for the relative gap.

    Guarantee: (upper, delta)-DP under adding or removing one example, for adaptively chosen steps of equal noise in
    complete epochs, allocated anew and independently in every epoch and for every example.

    Raises: InvalidInput for numbers out of range.
    """
    sigma = require_finite("noise_multiplier", noise_multiplier, at_least=0.3, at_most=1e4)
    steps = require_whole("steps_per_epoch", steps_per_epoch, at_least=1, at_most=MOST_STEPS)
    rounds = require_whole("epochs", epochs, at_least=1, at_most=10**6)
    blocks = require_whole("per_epoch", per_epoch, at_least=1, at_most=steps)
    if steps % blocks:
        raise InvalidInput(f"per_epoch is {blocks}, but must divide the {steps} steps of an epoch, into equal blocks")
    delta = require_pld_delta(delta)
    tolerance = require_finite("tolerance", tolerance, above=0.0)
    return _certified(sigma, steps // blocks, rounds * blocks, delta, tolerance)


def _certified(sigma: float, steps: int, rounds: int, delta: float, tolerance: float) -> CertifiedEpsilon:
    tail = max(delta * _LOST / rounds, MIN_DELTA)
    upper, lower = _mean_law(1.0 / sigma, steps, tail, "upper"), _mean_law(1.0 / sigma, steps, tail, "lower")
    pair = {direction: _cumulants(lower, rounds, direction) for direction in DIRECTIONS}
    above, below = 0.0, 0.0
    for direction in DIRECTIONS:
        other = pair["add" if direction == "remove" else "remove"]
        saddle = saddle_at_delta(pair[direction], math.log(delta))
        spacing = spacing_for(rounds, saddle, tolerance)
        highest, lowest = math.inf, 0.0
        for _ in range(_ATTEMPTS):
            plan = make_plan(pair[direction], other, saddle, spacing, tail, rounds)
            above_it, below_it = _on_lattice(upper, plan, "upper"), _on_lattice(lower, plan, "lower")
            composed = compose_equal(above_it, below_it, rounds, plan)
            found, under = composed.upper.epsilon_at(delta), composed.lower.epsilon_at(delta)
            highest, lowest = min(highest, found.epsilon), max(lowest, under.epsilon)
            if highest <= lowest * (1 + 2 * tolerance) or not math.isfinite(found.epsilon):
                break
            spacing = plan.spacing / 2.0
            saddle = saddle_at_epsilon(pair[direction], max(found.nearest, 0.0))
        above, below = max(above, highest), max(below, lowest)
    return CertifiedEpsilon(above, below, delta)


@functools.lru_cache(maxsize=16)
def _mean_law(shift: float, steps: int, tail: float, bound: Bound) -> _Law:
    """Return the law of the mean of ``steps`` ratios of Gaussians at distance ``shift``, by doubling."""
    power, terms = _one(shift, tail / steps, bound), 1  # of a power of two terms
    whole, counted = None, 0
    while True:
        if steps & terms:
            whole = power if whole is None else _weighted(whole, counted, power, terms, tail / steps, bound)
            counted += terms
        if counted == steps:
            break
        power, terms = _weighted(power, terms, power, terms, tail / steps, bound), 2 * terms
    assert whole is not None
    return whole


def _one(shift: float, tail: float, bound: Bound) -> _Law:
    """Return the law of one ratio Y = exp(shift z - shift^2 / 2), z ~ N(0, 1) under Q and N(shift, 1) under P."""
    reach = -float(special.ndtri(max(tail, 1e-300)))
    edges = np.linspace(-reach, reach + shift, _POINTS + 1)
    masses = _between(np.concatenate(([-np.inf], edges, [np.inf])))
    means = _between(np.concatenate(([-np.inf], edges, [np.inf])) - shift)
    grid = np.asarray(np.exp(shift * edges - shift**2 / 2), dtype=np.float64)
    return _placed(masses, means, grid, bound)


def _between(edges: Array) -> Array:
    """Mass of N(0, 1) between neighbouring edges, from the nearer tail, so that small masses keep their digits."""
    left, right = edges[:-1], edges[1:]
    upper = left > 0.0
    return np.maximum(
        np.where(upper, special.ndtr(-left) - special.ndtr(-right), special.ndtr(right) - special.ndtr(left)), 0.0
    )


def _weighted(one: _Law, of_one: int, other: _Law, of_other: int, tail: float, bound: Bound) -> _Law:
    """Return the law of the mean of the two means, weighted by their numbers of terms."""
    share = of_one / (of_one + of_other)
    if one is other:  # half of the pairs, twice
        left, right = np.triu_indices(len(one.values))
        values = 0.5 * (one.values[left] + one.values[right])
        masses = one.masses[left] * one.masses[right] * np.where(left == right, 1.0, 2.0)
    else:
        values = np.add.outer(share * one.values, (1.0 - share) * other.values).ravel()
        masses = np.multiply.outer(one.masses, other.masses).ravel()
    lost = share * one.lost + (1.0 - share) * other.lost
    grid = _grid(values, masses, tail)
    places = _places(grid, values)
    size = len(grid) + 1
    placed = _placed(_sums(places, masses, size), _sums(places, masses * values, size), grid, bound)
    return _Law(placed.values, placed.masses, placed.lost + lost)


def _grid(values: Array, masses: Array, tail: float) -> Array:
    """Return a grid even in the logarithm that leaves at most ``tail`` of Q below, and of P above."""
    positive = values[values > 0.0]
    low, high = math.log(float(positive.min())), math.log(float(positive.max()))
    if high - low < 1e-12:
        return np.array([math.exp(low - 1e-9), math.exp(low + 1e-9)])
    with np.errstate(divide="ignore"):
        logs = np.log(values)
    cells = np.clip(((logs - low) * (_POINTS / (high - low))), 0, _POINTS - 1).astype(np.int64)
    q, p = _sums(cells, masses, _POINTS), _sums(cells, masses * values, _POINTS)
    edges = np.linspace(low, high, _POINTS + 1)
    bottom = min(int(np.searchsorted(np.cumsum(q), tail)), _POINTS - 1)
    top = _POINTS - int(np.searchsorted(np.cumsum(p[::-1]), tail))
    ends = edges[bottom], edges[max(top, bottom + 1)]
    return np.asarray(np.exp(np.linspace(*ends, _POINTS + 1)), dtype=np.float64)


def _sums(places: Places, weights: Array, size: int) -> Array:
    """[size]: the sum of the weights at each place."""
    return np.bincount(places, weights, size).astype(np.float64)


def _places(grid: Array, values: Array) -> Places:
    """Return the number of points of an even logarithmic grid at or below each value, as `numpy.searchsorted` finds."""
    low, step = math.log(grid[0]), math.log(grid[-1] / grid[0]) / (len(grid) - 1)
    with np.errstate(divide="ignore"):
        guess = np.clip(np.floor((np.log(values) - low) / step), -1, len(grid) - 1).astype(np.int64)
    guess += (guess + 1 < len(grid)) & (values >= grid[np.minimum(guess + 1, len(grid) - 1)])
    guess -= (guess >= 0) & (values < grid[np.maximum(guess, 0)])
    return np.asarray(guess + 1)


def _placed(masses: Array, means: Array, grid: Array, bound: Bound) -> _Law:
    """Atoms for the mass below the grid, in its cells and above it; masses and sums of values are [len(grid) + 1]."""
    if bound == "lower":
        kept = masses > 0.0
        return _Law(means[kept] / masses[kept], masses[kept], 0.0)
    nodes = np.concatenate(([0.0], grid))
    widths = np.diff(nodes)
    raised = np.clip((means[:-1] - masses[:-1] * nodes[:-1]) / widths, 0.0, masses[:-1])
    placed = np.zeros(len(nodes))
    placed[1:] += raised
    placed[:-1] += masses[:-1] - raised
    placed[-1] += masses[-1]
    return _Law(nodes, placed, max(0.0, float(means[-1] - masses[-1] * grid[-1])))


def _cumulants(law: _Law, rounds: int, direction: Direction) -> Cumulants:
    """Return the law for the choice of tilt and window, on which no guarantee rests."""
    kept = (law.values > 0.0) & (law.masses > 0.0)
    losses, weights = np.log(law.values[kept]), np.log(law.masses[kept])
    return Cumulants(direction, weights[None], losses[None], np.array([float(rounds)]), 0.0, np.zeros(0), 1)


def _on_lattice(law: _Law, plan: LatticePlan, bound: Bound) -> LatticeLoss:
    """Return the law of the loss of an epoch on the lattice of ``plan``, as `dpsweep.accounting.pld.loss.discretise`
    gives it.
    """
    sign = 1.0 if plan.direction == "remove" else -1.0
    kept = (law.values > 0.0) & (law.masses > 0.0)
    losses, q = sign * np.log(law.values[kept]), law.masses[kept]
    p = q * law.values[kept]
    first, second = (p, q) if plan.direction == "remove" else (q, p)
    places = np.floor(losses / plan.spacing).astype(np.int64)
    start = int(places.min())
    size = int(places.max()) - start + 1
    numerator = _sums(places - start, first, size)
    edges = (start + np.arange(size)) * plan.spacing
    denominator = np.exp(edges) * _sums(places - start, second, size)
    beyond = law.lost if plan.direction == "remove" else float(law.masses[law.values == 0.0].sum())
    cells = Cells(
        start=start,
        numerator=numerator,
        denominator=np.clip(denominator, numerator * math.exp(-plan.spacing), numerator),
        above=beyond if bound == "upper" else 0.0,
        below=0.0,
        rounding=np.asarray(_ROUNDING * numerator, dtype=np.float64),
    )
    return spread(cells, plan.spacing) if bound == "upper" else merge(cells, plan.spacing)
