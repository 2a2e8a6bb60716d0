"""Individual accounting by exact composition of privacy losses, for many examples at once.

Let (P, Q) be the dominating pair of a whole run, K(z) = sum over steps of log E_Q[(P/Q)^z] and Re z = a > 1 any line.
Then

    delta(eps) = E_Q[(P/Q - e^eps)_+] = (1/2 pi) int exp(K(z) + eps (1 - z)) / (z (z - 1)) dw,   z = a + i w,

and for the pair (Q, P) the same with K(1 - z). The saddle point is near the best Renyi order; with a there the
integrand is a short bump, and all errors are relative to the Renyi bound on delta. No privacy loss is discretised.

Why the result is certified:
- The trapezoidal rule with step w_1 equals, by Poisson summation, sum over m of e^((a-1) m P) delta(eps + m P) with P =
  2 pi / w_1. All terms are non-negative, so aliasing only adds. The lower bound subtracts a Renyi bound on the other
  terms.
- K is linear in the step weights except for a bounded error per node (`contour.MomentTable`).
- Frequencies left out are bounded by a proven decay of every factor (`contour.DecayBound`) and 1/w^2.
- Floating point is bounded by `FLOAT_ERROR` per term, and by one rounding per step in K.
All of this is added to delta. delta is evaluated again at the epsilon returned; if the Renyi bound is lower, it is
returned instead.

If an example is expected in hardly any batch, exp(K) decays slowly: the spectrum is damped
(`dpsweep.accounting.individual.inversion`), and at high frequencies K is not linear enough in the step weights. So
after runs of few steps, examples with noticeably loose bounds are accounted again on more nodes. In small data sets,
each example still loose is then accounted as a group of one (`dpsweep.accounting.pld`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpsweep.accounting.individual.blocks import (
    MOST_POINTS,
    block_spectra,
    cut_by_repetitions,
    enough_decay,
    lattice_damping,
    spectrum_columns,
)
from dpsweep.accounting.individual.contour import (
    Contour,
    DecayBound,
    decay_bound,
    exponent_of,
    moment_table,
)
from dpsweep.accounting.individual.contributions import (
    AllocationBlock,
    Array,
    RecordedContributions,
    SampledNodes,
    StepLaw,
    StepsLaw,
    StepWeights,
    density_of_blocks,
    tail_of_blocks,
)
from dpsweep.accounting.individual.inversion import (
    FLOAT_ERROR,
    LARGEST_INVERTED,
    NEGLIGIBLE,
    STEP_ERROR,
    Bucket,
    buckets,
    damping,
    plain_exponent,
    raise_bounds,
    truncation_bound,
)
from dpsweep.accounting.individual.rdp import RenyiCosts, renyi_costs
from dpsweep.accounting.individual.spectrum_kernels import LOOSE
from dpsweep.accounting.individual.spreading import (
    NODES,
    near_reached,
    of_rows,
    spread_linearly,
    stacked,
    weighted_sums,
)
from dpsweep.accounting.individual.table_cache import kept
from dpsweep.accounting.individual.tail_bounds import is_within
from dpsweep.accounting.numerics.rounding import ROUND_UP
from dpsweep.accounting.pld import MIN_DELTA, Direction, PairBounds, epsilon_of_rounds, rounds_of_examples

_SIZES = (16, 32, 48, 64, 80, 96, 128, 160, 192, 256)
"""Numbers of points of a contour, tried in this order; if even the longest ends too early, exp(K) is damped on it."""

_LONGEST = MOST_POINTS
"""Points of a contour tried without damping in that case; at its high frequencies K may be too far from linear."""

_CUTS = (3, 4, 5, 6, 7, 8)
"""Where a row's terms may be cut off, in eighths of the contour."""

_PIECES = 16
"""Number of pieces of a contour; one bound on the error of K holds for all points of a piece."""

_BLOCK = 1 << 10
"""Largest number of rows whose terms are in memory at once."""

_FEW_STEPS = 1000
"""In runs of up to this many steps, exp(K) reaches high frequencies, where K is less linear in the step weights."""

_DENSITIES = (2, 4, 8)
"""Factors on the number of nodes in such short runs; a factor divides the error of K by its square. The first is for
all rows, each next one for rows whose bounds are still loose."""

_FEW_EXAMPLES = 100_000
"""Largest data set whose still loose examples are accounted on a lattice, at 20 to 200 ms each: all of them or none,
because groups are compared."""

_NOTICEABLE = 0.01
"""Gap between the bounds up to which they are not refined. One example in fifty of a large data set may have such a
gap, at epsilons of 0.002 to 0.02; closing it takes a hundred times as long as everything else."""

_TOLERANCES = (0.5 * LOOSE, 0.05 * LOOSE)
"""Targets for the relative gap on a lattice, tried in this order; for small epsilons the gap may be larger."""


def pld_epsilons(contributions: RecordedContributions, delta: float) -> tuple[Array, Array]:
    """Return the upper and lower epsilon [rows] at ``delta``, the worse of removing and adding the example.

    Rows are computed in the order of their contributions: neighbours use the same nodes, whose table entries are then
    still in the processor's cache.
    """
    order = np.argsort(contributions.values.sum(axis=1))
    bounds = np.empty((2, len(order)))
    bounds[:, order] = _ordered_epsilons(contributions.of(order), delta)
    return bounds[0], bounds[1]


def _ordered_epsilons(contributions: RecordedContributions, delta: float) -> tuple[Array, Array]:
    """Return the bounds of rows in any order: on nodes, on more nodes where bounds are loose, and finally on a
    lattice.
    """
    trace = contributions.trace
    tail, delta = tail_of_blocks(trace, delta)
    is_short = trace.steps <= _FEW_STEPS and tail == 0.0
    first, *denser = _DENSITIES if is_short else (density_of_blocks(trace),)
    costs = contributions.costs(functools.partial(spread_linearly, nodes=first * NODES), tail)
    renyi = renyi_costs(costs, delta)
    upper, lower, loose = bounds_of_costs(costs, renyi, _NOTICEABLE)
    for density in denser:
        if len(loose):
            costs = contributions.of(loose).costs(functools.partial(spread_linearly, nodes=density * NODES))
            above, below, left = bounds_of_costs(costs, renyi.of(loose), 0.0)
            upper[loose], lower[loose] = np.minimum(upper[loose], above), np.maximum(lower[loose], below)
            loose = loose[left]
    if is_short and trace.dataset_size <= _FEW_EXAMPLES and delta >= MIN_DELTA:
        _, firsts, places = np.unique(contributions.values[loose], axis=0, return_index=True, return_inverse=True)
        alone = [_alone(contributions.of(slice(row, row + 1)), delta) for row in loose[firsts].tolist()]
        for row, place in zip(loose.tolist(), places.ravel().tolist(), strict=True):  # many are clipped at every step
            upper[row], lower[row] = min(upper[row], alone[place].upper), max(lower[row], alone[place].lower)
    return upper, np.minimum(lower, upper)


def bounds_of_costs(costs: StepWeights, renyi: RenyiCosts, gap: float) -> tuple[Array, Array, NDArray[np.intp]]:
    """Return the upper and lower epsilon [rows] of these costs, and the rows where they are too far apart.

    Too far is more than `LOOSE` relative to the upper one and more than ``gap``. renyi: costs of the same rows, on
    these or other nodes; rows above `LARGEST_INVERTED` never count as too far apart.
    """
    upper, lower = _interpolated_epsilons(costs, renyi)
    upper = np.minimum(upper, _of_one_gaussian(costs, renyi.delta))
    loose = (upper - lower > np.maximum(LOOSE * upper, gap)) & (renyi.epsilons <= LARGEST_INVERTED)
    return upper, lower, np.flatnonzero(loose)


def _of_one_gaussian(costs: StepWeights, delta: float) -> Array:
    """Return the upper epsilon [rows] of one unsampled Gaussian with the precision of all steps, which dominates the
    run.

    A sampled Gaussian is a post-processing of the unsampled one. With mean shift m the loss is N(m^2 / 2, m^2), and
    Pr[N(0, 1) > z] <= exp(-z^2 / 2). Pure releases add to epsilon.
    """
    precisions = stacked([part.largest[:, None] for part in costs.sampled], 1)
    precision = weighted_sums(costs, precisions, np.array([[0.0], [1.0]]))[:, 0]
    mean = np.sqrt(precision)
    return np.asarray(mean * (0.5 * mean + np.sqrt(-2.0 * np.log(delta))) * ROUND_UP + math.fsum(costs.pure) * ROUND_UP)


def _alone(contributions: RecordedContributions, delta: float) -> PairBounds:
    """Return the bounds of one row, as a group of one, on a lattice of privacy losses."""
    rounds = rounds_of_examples(contributions.trace, contributions.steps, contributions.values)
    for tolerance in _TOLERANCES:
        found = epsilon_of_rounds(rounds, delta, tolerance)
        if found.upper - found.lower <= LOOSE * found.upper:
            break
    return found


def _interpolated_epsilons(costs: StepWeights, renyi: RenyiCosts) -> tuple[Array, Array]:
    """Return the upper and lower epsilon [rows] with K interpolated between nodes."""
    bound = renyi.epsilons
    above, below = np.where(bound > 0.0, np.inf, 0.0), np.zeros_like(bound)
    bounds, all_costs = np.zeros((2, len(bound))), near_reached(costs, [len(p.precisions) for p in costs.sampled])
    for bucket in buckets(costs, renyi):
        own, places = of_rows(costs, bucket.rows, bucket.stops)
        _Group(own, places, bucket, renyi, Direction.REMOVE).raise_all(bounds)
        cheaper = is_within(all_costs, bucket.rows, bucket.tilt, bounds[0, bucket.rows], renyi.delta, Direction.ADD)
        rest = np.flatnonzero(~cheaper)
        if len(rest):
            _Group(own, places[rest], bucket.of(rest), renyi, Direction.ADD).raise_all(bounds)
        above[bucket.rows], below[bucket.rows] = bounds[:, bucket.rows]
    return np.minimum(above, bound), below


@kept(256 * 2**20)
def _moment_columns(law: StepsLaw, nodes: bytes, contour: Contour, direction: Direction) -> Array:
    """Return logs of moments and the decay at `_cut_sizes` as one table [nodes, 2 points + pieces + cuts].

    Columns: real parts, imaginary parts, the largest error in each piece of the contour plus `STEP_ERROR`, decay.
    """
    if isinstance(law, AllocationBlock):
        period = 2.0 * np.pi / contour.spacing
        log_moments, errors, decay = spectrum_columns(
            block_spectra(law, nodes, contour.tilt, period, direction), contour.size
        )
        decays = decay[:, _cut_sizes(contour)]
    else:
        table = moment_table(law, np.frombuffer(nodes), contour, direction)
        log_moments, errors = table.log_moments, table.errors
        exponent = exponent_of(direction, contour.tilt)
        decays = np.transpose(
            [_node_decay(law, nodes, exponent, contour.spacing * size) for size in _cut_sizes(contour)]
        )
    errors = errors.reshape(len(errors), _PIECES, -1).max(axis=2) + STEP_ERROR
    return np.hstack([log_moments.real, log_moments.imag, errors, decays])


@kept(16 * 2**20)
def _node_decay(law: StepLaw, nodes: bytes, exponent: float, frequency: float) -> Array:
    """Return `DecayBound.node_decay` [nodes]; 0 for steps that may not take place, which have no better bound."""
    if law.chance < 1.0:
        return np.zeros_like(np.frombuffer(nodes))
    return _decay_bound(law.sample_rate, nodes, exponent).node_decay(frequency)


@functools.lru_cache(maxsize=64)
def _decay_bound(sample_rate: float, nodes: bytes, exponent: float) -> DecayBound:
    """Return `decay_bound`, cached: 0.5 MB per result for 256 nodes."""
    return decay_bound(sample_rate, np.frombuffer(nodes), exponent)


def _cut_sizes(contour: Contour) -> list[int]:
    """Return numbers of points after which a row's terms may be cut off."""
    return [contour.size * eighths // 8 for eighths in _CUTS]


@dataclass(frozen=True)
class _Group:
    """The rows of a bucket in one direction. places [rows]: their indices in ``costs``. renyi: of all rows."""

    costs: StepWeights
    places: NDArray[np.intp]
    bucket: Bucket
    renyi: RenyiCosts
    direction: Direction

    def raise_all(self, bounds: Array) -> None:
        """Raise ``bounds`` [2, all rows], upper and lower, to the bounds of this direction where these are larger.

        A row computed on two contours gets the tighter bounds.
        """
        sizes = (*_SIZES, _LONGEST)
        enough = self._reach(sizes)
        first = np.where(enough[:, :-1].any(axis=1), enough.argmax(axis=1), len(_SIZES))
        for number in np.unique(first).tolist():
            rows = np.flatnonzero(first == number)
            if number < len(_SIZES):
                self._raise(bounds, rows, self._contour(sizes[number]), 0.0)
            else:
                self._raise_damped(bounds, rows, enough[rows, -1])

    def _raise_damped(self, bounds: Array, rows: NDArray[np.intp], enough: NDArray[np.bool_]) -> None:
        """Raise ``bounds`` of rows for which all `_SIZES` are too short, with exp(K) damped.

        enough [rows]: whether `_LONGEST` is long enough; these rows are also computed on it, without damping, and get
        the tighter bounds.
        """
        own, longest = self.bucket.rows[rows], self._contour(_SIZES[-1])
        known = bounds[:, own]
        self._raise(bounds, rows, longest, damping(longest))
        if enough.any():
            damped = bounds[:, own[enough]]
            bounds[:, own[enough]] = known[:, enough]
            self._raise(bounds, rows[enough], self._contour(_LONGEST), 0.0)
            bounds[0, own[enough]] = np.minimum(damped[0], bounds[0, own[enough]])
            bounds[1, own[enough]] = np.maximum(damped[1], bounds[1, own[enough]])

    def _contour(self, size: int) -> Contour:
        return Contour(self.bucket.tilt, 2.0 * np.pi / self.bucket.period, size)

    def _reach(self, sizes: Sequence[int]) -> NDArray[np.bool_]:
        """Return whether exp(K) is negligible beyond contours of these sizes; shape [rows, sizes]."""
        ends = np.array([self._contour(size).end for size in sizes])
        table = stacked([self._decays(part, sizes) for part in self.costs.sampled], len(ends))
        decay = weighted_sums(self.costs, table, np.array([0.0 * ends, 0.5 * ends**2]), self.places)
        wanted = -np.log(NEGLIGIBLE)
        if any(isinstance(part.law, AllocationBlock) for part in self.costs.sampled):
            return enough_decay(decay, wanted)
        return np.asarray(decay >= wanted)

    def _decays(self, part: SampledNodes, sizes: Sequence[int]) -> Array:
        """Return the decay beyond contours of these sizes at each node of ``part``; shape [nodes, sizes]."""
        nodes, tilt, period = part.precisions.tobytes(), self.bucket.tilt, 2.0 * np.pi / self._contour(1).spacing
        if isinstance(part.law, AllocationBlock):
            spectra = block_spectra(part.law, nodes, tilt, period, self.direction)
            return spectrum_columns(spectra, 1)[2][:, list(sizes)]
        exponent = exponent_of(self.direction, tilt)
        return np.transpose([_node_decay(part.law, nodes, exponent, self._contour(size).end) for size in sizes])

    def _raise(self, bounds: Array, rows: NDArray[np.intp], contour: Contour, v: float) -> None:
        """Raise ``bounds`` [2, all rows] of some rows of the bucket, given the bounds of the other direction.

        With blocks, lower bounds hold for the pairs that replace them.
        """
        repeated = [part.law for part in self.costs.sampled if isinstance(part.law, AllocationBlock)]
        v = max([v, *(lattice_damping(law, contour) for law in repeated)])
        table, plain, cuts = self._columns(contour), _plain_columns(self.costs.pure, contour, v), _cuts(contour, v)
        for start in range(0, len(rows), _BLOCK):
            some = rows[start : start + _BLOCK]
            exponents = weighted_sums(self.costs, table, plain, self.places[some])
            if repeated:
                exponents[:, -len(_CUTS) :] = cut_by_repetitions(exponents[:, -len(_CUTS) :])
            raise_bounds(bounds, self.bucket.of(some), exponents, cuts, contour, v, self.renyi)

    def _columns(self, contour: Contour) -> Array:
        """Return the table for `weighted_sums`: K, its error and its decay, as `certified_bounds` takes them."""
        tables = [
            _moment_columns(part.law, part.precisions.tobytes(), contour, self.direction) for part in self.costs.sampled
        ]
        return stacked(tables, 2 * contour.size + _PIECES + len(_CUTS))


@functools.lru_cache(maxsize=512)
def _plain_columns(pure: tuple[float, ...], contour: Contour, v: float) -> Array:
    """Return table columns [2, ...] of unsampled mechanisms: pure releases and damping; a Gaussian of precision 1."""
    with np.errstate(over="ignore", invalid="ignore"):  # NaN certifies nothing
        fixed, gaussian = plain_exponent(pure, contour, v)
    frequencies = contour.spacing * np.array(_cut_sizes(contour))
    return np.array(
        [
            np.concatenate([fixed.real, fixed.imag, np.full(_PIECES, FLOAT_ERROR), 0.0 * frequencies]),
            np.concatenate([gaussian.real, gaussian.imag, np.zeros(_PIECES), 0.5 * frequencies**2]),
        ]
    )


@functools.lru_cache(maxsize=512)
def _cuts(contour: Contour, v: float) -> Array:
    """Return the number of points up to each cut, and the bound of `truncation_bound` there; [2, cuts]."""
    return np.array([(size, truncation_bound(contour, size, v)) for size in _cut_sizes(contour)]).T.copy()
