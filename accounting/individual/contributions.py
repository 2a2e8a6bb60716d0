"""Recorded contributions of single examples, reduced to weights on a few nodes of effective precision.

For one example, a step is the sampled Gaussian mechanism with effective precision

    u = (moved / sigma)^2 + sum over side queries of (side / sigma_side)^2,

the inverse square of its effective noise multiplier. ``moved`` is how far the example moves the clipped sum, in units
of the sum's sensitivity; ``side`` how far it moves a side query, in units of that query's sensitivity:

- Poisson sampling: moved is the contribution c, and side is 1, under either adjacency.
- Fixed batches under ``add_remove``: an example that joins a batch displaces another, whose contribution is only known
  to be at most 1. moved is 1 + c and side is 2; at c = 1 this is the factor 2 of paper B, Theorem 3.3. Under
  ``zero_out`` they are refused: the rest of the batch reveals whether the example is in it, which defeats the
  amplification by sampling (docs/group-proof.md).
- Shuffled epochs under ``zero_out``: the example is in one batch of the epoch. For every order of the data the epoch is
  one Gaussian, at worst that of the step with the largest u (paper C, Theorem 2).
- Under ``replace_one``, full batches and shuffled epochs: moved is 1 + c and side is 2, because nothing is known of the
  record that takes the example's place (docs/group-proof.md, Theorem 5).

Renyi and privacy-loss accounting need only the sum of log E_Q[(P/Q)^z] over the steps. It is smooth in u, so each step
is spread linearly over the two nodes beside its u. For real z = alpha > 1 this can only increase the sum, because
log A_alpha is convex in u. Proof: M_u = exp(B_u - u/2), the likelihood ratio as a function of Brownian time u, is a
martingale; A(u) = E[g(M_u)] with g(m) = (1 - q + q m)^alpha; A' = E[L g], A'' = E[L L g] with L = (m^2/2) d^2/dm^2.
With p = q m / (1 - q + q m) in [0, 1], L g = alpha (alpha-1) p^2 g / 2 and g L L g - (L g)^2 =
alpha (alpha-1) p^2 g^2 (1-p) (2 + (4 alpha - 6) p) / 4 >= 0. So L L g >= 0, and by Cauchy-Schwarz
A'^2 <= (E sqrt(g L L g))^2 <= A A''.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse

from accounting.mechanism import GaussianRelease, PureRelease, Trace
from accounting.reductions import with_displacement
from accounting.samplings import Sampling
from accounting.snapshots import checked_snapshots

Array = NDArray[np.float64]

NODES = 256
"""Nodes per sampling rate, uniform in sqrt(u). Above a largest sqrt(u) of 1 the number grows in proportion, to 4x."""

_BLOCK_ENTRIES = 1 << 15
"""Rows times stretches that are spread at once, so that they stay in the processor's cache."""

_DENSE_ENTRIES = 1 << 16
"""Rows times nodes that are merged at once."""

_BESIDE = 2
"""Neighbours on either side that what tables say of a node depends on."""

_FEW = 4
"""Nodes are left out where less than one in so many is needed; else tables are worth keeping for other rows."""


@dataclass(frozen=True)
class Stretch:
    """Steps [start, stop) with one noise level and one snapshot, ``column``: u = (slope (offset + c))^2 + side.

    slope is 1/sigma, or 0 for steps without noise; examples that contributed to those are unprotected.
    """

    column: int
    start: int
    stop: int
    slope: float
    offset: float
    side: float

    @property
    def steps(self) -> int:
        """Number of steps."""
        return self.stop - self.start

    def precisions(self, contributions: Array) -> Array:
        """u at each contribution c, in 64 bits; shape of ``contributions``."""
        moved = self.offset + np.asarray(contributions, np.float64)
        return np.asarray(np.square(self.slope * moved) + self.side)


@dataclass(frozen=True)
class SampledSteps:
    """Steps with one sampling rate; weights [rows, nodes] are the numbers of steps assigned to each node.

    precisions [nodes] are increasing; the first may be 0. The weights of a row sum to the number of steps. Rows are
    sparse, because the product of a sparse row with a table is one sum in the order of the row's entries, of which
    several may belong to one node. Unlike those of a dense product, its bits depend neither on the other rows nor on
    the number of threads.
    """

    sample_rate: float
    precisions: Array
    weights: sparse.csr_array


@dataclass(frozen=True)
class StepWeights:
    """Sufficient statistic of a block of examples.

    precision [rows] is the summed u of unsampled Gaussians (full batches, shuffled epochs, releases); pure are the
    epsilons of pure releases.
    """

    sampled: tuple[SampledSteps, ...]
    precision: Array
    pure: tuple[float, ...]


def merged(costs: StepWeights) -> StepWeights:
    """The same with one entry per node in each row, in the order of the nodes: worth its time for many tables."""
    sampled = tuple(SampledSteps(p.sample_rate, p.precisions, _merged(p.weights)) for p in costs.sampled)
    return StepWeights(sampled, costs.precision, costs.pure)


def _merged(weights: sparse.csr_array) -> sparse.csr_array:
    """By way of a dense block at a time, which takes a quarter of the time of sorting the entries."""
    rows, size = weights.shape
    nodes, columns, values = np.arange(size, dtype=np.int32), [np.empty(0, np.int32)], [np.empty(0)]
    counts, block = np.zeros(rows + 1, np.int64), max(1, _DENSE_ENTRIES // size)
    for start in range(0, rows, block):
        ends = weights.indptr[start : start + block + 1]
        at = slice(int(ends[0]), int(ends[-1]))
        row = np.repeat(np.arange(len(ends) - 1) * size, np.diff(ends))
        row += weights.indices[at]
        dense = np.bincount(row, weights.data[at], minlength=(len(ends) - 1) * size).reshape(-1, size)
        filled = dense != 0.0
        values.append(dense[filled])
        columns.append(np.broadcast_to(nodes, dense.shape)[filled])
        counts[start + 1 : start + len(ends)] = filled.sum(axis=1)
    return sparse.csr_array((np.concatenate(values), np.concatenate(columns), np.cumsum(counts)), (rows, size))


def select(costs: StepWeights, rows: NDArray[np.intp]) -> StepWeights:
    """The costs of some rows."""
    sampled = tuple(SampledSteps(p.sample_rate, p.precisions, p.weights[rows]) for p in costs.sampled)
    return StepWeights(sampled, costs.precision[rows], costs.pure)


def near_reached(costs: StepWeights) -> StepWeights:
    """The same without the nodes that no row comes near, where these are most: few rows need little of a table.

    What tables say of a node follows from its own u, those of `_BESIDE` nodes on either side, and the largest u. All of
    these stay, so that no bit of what rows cost depends on which nodes are left out.
    """
    return replace(costs, sampled=tuple(map(_near_reached, costs.sampled)))


def _near_reached(part: SampledSteps) -> SampledSteps:
    matrix, size = part.weights, len(part.precisions)
    reached = np.flatnonzero(np.bincount(matrix.indices, minlength=size))
    around = reached[:, None] + np.arange(-_BESIDE, _BESIDE + 1)
    near = np.union1d(around[(around >= 0) & (around < size)], [size - 2, size - 1])
    if len(near) * _FEW > size:
        return part
    places = np.searchsorted(near, matrix.indices).astype(matrix.indices.dtype)
    weights = sparse.csr_array((matrix.data, places, matrix.indptr), (matrix.shape[0], len(near)))
    return SampledSteps(part.sample_rate, part.precisions[near], weights)


Spread = Callable[[float, tuple[Stretch, ...], Array], SampledSteps]
"""Reduces the stretches with one sampling rate, given contributions [snapshots, rows]."""


@dataclass(frozen=True)
class RecordedContributions:
    """Contributions ``values`` [rows, snapshots] in [0, 1], recorded at ``steps`` of the run ``trace``.

    A snapshot holds until the next one. `checked` builds them from a caller's input.
    """

    steps: Sequence[int]
    values: Array
    trace: Trace

    @staticmethod
    def checked(
        steps: Sequence[int] | NDArray[np.integer[Any]], values: ArrayLike, trace: Trace
    ) -> RecordedContributions:
        """The contributions, validated. Raises: InvalidInput as `checked_snapshots` does."""
        return RecordedContributions(*checked_snapshots(steps, values, trace), with_displacement(trace))

    def of(self, rows: NDArray[np.intp] | slice) -> RecordedContributions:
        """The contributions of some rows."""
        columns = self.values.T
        return replace(self, values=(columns[:, rows] if isinstance(rows, slice) else columns.take(rows, axis=1)).T)

    def unprotected(self) -> NDArray[np.bool_]:
        """Whether each example contributed to a step without noise; shape [rows]."""
        found = np.zeros(len(self.values), np.bool_)
        for _, stretches in _stretches(tuple(self.steps), self.trace):
            for part in stretches:
                if part.slope == 0.0:
                    found |= part.offset + self.values[:, part.column] > 0.0
        return found

    def costs(self, spread: Spread) -> StepWeights:
        """The step weights of each example; ``spread`` reduces the sampled steps."""
        values = np.minimum(np.ascontiguousarray(self.values.T), 1.0)
        trace = self.trace
        releases = [release.noise_multiplier**-2 for release in trace.releases if isinstance(release, GaussianRelease)]
        precision = np.full(len(self.values), float(sum(releases)))
        sampled: dict[float, tuple[Stretch, ...]] = {}
        for sampling, stretches in _stretches(tuple(self.steps), trace):
            if sampling.draws == "epoch":
                precision += _shuffled_precision(stretches, values, sampling.steps_per_epoch)
            elif sampling.sample_rate == 1.0:
                precision += sum(part.steps * part.precisions(values[part.column]) for part in stretches)
            else:
                sampled[sampling.sample_rate] = sampled.get(sampling.sample_rate, ()) + stretches
        pure = tuple(release.epsilon for release in trace.releases if isinstance(release, PureRelease))
        parts = tuple(spread(sample_rate, stretches, values) for sample_rate, stretches in sampled.items())
        return StepWeights(parts, precision, pure)


@functools.lru_cache(maxsize=16)
def _stretches(steps: tuple[int, ...], trace: Trace) -> tuple[tuple[Sampling, tuple[Stretch, ...]], ...]:
    """Runs of segments with one sampling, cut where the noise or the snapshot changes, in step order."""
    ends = [*steps[1:], trace.steps]
    runs: list[tuple[Sampling, tuple[Stretch, ...]]] = []
    for sampling, segments in groupby(trace.segments, key=lambda segment: segment.sampling):
        run: list[Stretch] = []
        for segment in segments:
            slope = 1.0 / segment.noise_multiplier if segment.noise_multiplier > 0.0 else 0.0
            side = sum(((1 + sampling.displaced) / query.noise_multiplier) ** 2 for query in segment.side_queries)
            for column, (first, last) in enumerate(zip(steps, ends, strict=True)):
                start, stop = max(first, segment.start_step), min(last, segment.stop_step)
                if start < stop:
                    run.append(Stretch(column, start, stop, slope, sampling.displaced, side))
        runs.append((sampling, tuple(run)))
    return tuple(runs)


def _shuffled_precision(stretches: Sequence[Stretch], values: Array, steps_per_epoch: int) -> Array:
    """Sum over epochs, an unfinished last one included, of the largest u within the epoch; shape [rows]."""
    total, worst = np.zeros(values.shape[1]), np.zeros(values.shape[1])
    current = 0
    for part in stretches:
        precisions = part.precisions(values[part.column])
        first, last = ((step - stretches[0].start) // steps_per_epoch for step in (part.start, part.stop - 1))
        worst, total = (worst, total) if first == current else (np.zeros_like(worst), total + worst)
        worst = np.maximum(worst, precisions)
        if last > first:
            worst, total = precisions, total + worst + (last - first - 1) * precisions
        current = last
    return total + worst


def spread_linearly(sample_rate: float, stretches: tuple[Stretch, ...], values: Array) -> SampledSteps:
    """Weights of the stretches on nodes; each step is split linearly between the two nodes beside its u.

    Nodes are (x_0 + k h)^2, so a u with root x_0 + (k + t) h lies at t (2 (k + x_0 / h) + t) / (2 (k + x_0 / h) + 1) of
    the way from node k to the next. Rounding moves u by 1e-14 of itself, far below `renyi._ROUNDING`.
    """
    nodes = _nodes(stretches)
    column, steps, slope, offset, side = _fields(stretches)
    rows, count, size = values.shape[1], len(stretches), len(nodes)
    spacing = (np.sqrt(nodes[-1]) - np.sqrt(nodes[0])) / (size - 1)
    origin = np.sqrt(nodes[0]) / spacing
    weights, indices = np.empty((rows, count, 2)), np.empty((rows, count, 2), np.int32)
    block = max(1, _BLOCK_ENTRIES // max(count, 1))
    for start in range(0, rows, block):
        at = slice(start, start + block)
        root = np.ascontiguousarray(values[column, at].T, np.float64)
        root += offset
        root *= slope
        if side.any():
            root = np.sqrt(np.square(root) + side)
        root *= 1.0 / spacing
        root -= origin
        cells = np.clip(root.astype(np.int32), 0, size - 2, out=indices[at, :, 0])
        root -= cells
        np.clip(root, 0.0, 1.0, out=root)
        twice = 2.0 * cells + 2.0 * origin
        above = (twice + root) * root
        above /= twice + 1.0
        above *= steps
        weights[at, :, 1] = above
        np.subtract(steps, above, out=weights[at, :, 0])
        np.add(cells, 1, out=indices[at, :, 1])
    starts = np.arange(rows + 1) * (2 * count)
    return SampledSteps(sample_rate, nodes, sparse.csr_array((weights.ravel(), indices.ravel(), starts), (rows, size)))


@functools.lru_cache(maxsize=16)
def _fields(stretches: tuple[Stretch, ...]) -> tuple[NDArray[Any], ...]:
    names = ("column", "steps", "slope", "offset", "side")
    return tuple(np.array([getattr(part, name) for part in stretches]) for name in names)


@functools.lru_cache(maxsize=16)
def _nodes(stretches: tuple[Stretch, ...]) -> Array:
    """Nodes that cover u for all contributions in [0, 1], so that they do not depend on the block of rows."""
    lowest, highest = _ends(stretches)
    if not highest > lowest * (1.0 + 1e-9):  # nodes in between would coincide
        highest = lowest * (1.0 + 1e-6) + 1e-12
    size = int(NODES * min(max(1.0, np.sqrt(highest)), 4.0))
    nodes = np.square(np.linspace(np.sqrt(lowest), np.sqrt(highest), size))
    nodes[0], nodes[-1] = lowest, highest
    return nodes


def _ends(stretches: Sequence[Stretch]) -> tuple[float, float]:
    """The least and the largest u of these stretches over contributions in [0, 1]."""
    ends = np.array([part.precisions(np.array([0.0, 1.0])) for part in stretches])
    return float(ends[:, 0].min()), float(ends[:, 1].max())
