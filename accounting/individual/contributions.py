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

from collections.abc import Callable, Iterator, Sequence
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

FINE_STEP = 1.0 / 512.0
"""Relative spacing, in sqrt(u), of the nodes that `round_up` and `round_down` use."""

_FINE_SPAN = 64.0
"""Ratio of the largest to the smallest sqrt(u) of these nodes, not counting the first one."""

_BLOCK_ENTRIES = 1 << 15
"""Rows times stretches that are spread at once, so that they stay in the processor's cache."""


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
        """u at each contribution c; shape of ``contributions``."""
        return np.square(self.slope * (self.offset + contributions)) + self.side


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


def merge_entries(costs: StepWeights) -> None:
    """Give each row one entry per node, in the order of the nodes: worth its time where rows meet many tables."""
    for part in costs.sampled:
        part.weights.sum_duplicates()


def select(costs: StepWeights, rows: NDArray[np.intp]) -> StepWeights:
    """The costs of some rows."""
    sampled = tuple(SampledSteps(p.sample_rate, p.precisions, p.weights[rows]) for p in costs.sampled)
    return StepWeights(sampled, costs.precision[rows], costs.pure)


Spread = Callable[[float, Sequence[Stretch], Array], SampledSteps]
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
        return replace(self, values=self.values[rows])

    def unprotected(self) -> NDArray[np.bool_]:
        """Whether each example contributed to a step without noise; shape [rows]."""
        found = np.zeros(len(self.values), np.bool_)
        for _, stretches in _stretches(self.steps, self.trace):
            for part in stretches:
                if part.slope == 0.0:
                    found |= part.offset + self.values[:, part.column] > 0.0
        return found

    def costs(self, spread: Spread) -> StepWeights:
        """The step weights of each example; ``spread`` reduces the sampled steps."""
        values = np.minimum(np.ascontiguousarray(np.asarray(self.values, np.float64).T), 1.0)
        trace = self.trace
        releases = [release.noise_multiplier**-2 for release in trace.releases if isinstance(release, GaussianRelease)]
        precision = np.full(len(self.values), float(sum(releases)))
        sampled: dict[float, list[Stretch]] = {}
        for sampling, stretches in _stretches(self.steps, trace):
            if sampling.draws == "epoch":
                precision += _shuffled_precision(stretches, values, sampling.steps_per_epoch)
            elif sampling.sample_rate == 1.0:
                precision += sum(part.steps * part.precisions(values[part.column]) for part in stretches)
            else:
                sampled.setdefault(sampling.sample_rate, []).extend(stretches)
        pure = tuple(release.epsilon for release in trace.releases if isinstance(release, PureRelease))
        parts = tuple(spread(sample_rate, stretches, values) for sample_rate, stretches in sampled.items())
        return StepWeights(parts, precision, pure)


def _stretches(steps: Sequence[int], trace: Trace) -> Iterator[tuple[Sampling, list[Stretch]]]:
    """Runs of segments with one sampling, cut where the noise or the snapshot changes, in step order."""
    ends = [*steps[1:], trace.steps]
    for sampling, segments in groupby(trace.segments, key=lambda segment: segment.sampling):
        run: list[Stretch] = []
        for segment in segments:
            slope = 1.0 / segment.noise_multiplier if segment.noise_multiplier > 0.0 else 0.0
            side = sum(((1 + sampling.displaced) / query.noise_multiplier) ** 2 for query in segment.side_queries)
            for column, (first, last) in enumerate(zip(steps, ends, strict=True)):
                start, stop = max(first, segment.start_step), min(last, segment.stop_step)
                if start < stop:
                    run.append(Stretch(column, start, stop, slope, sampling.displaced, side))
        yield sampling, run


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


def spread_linearly(sample_rate: float, stretches: Sequence[Stretch], values: Array) -> SampledSteps:
    """Weights of the stretches on nodes; each step is split linearly between the two nodes beside its u."""
    nodes = _nodes(stretches)
    column, steps, slope, offset, side = (field[:, None] for field in _fields(stretches))
    rows, count, size = values.shape[1], len(stretches), len(nodes)
    roots, widths = np.sqrt(nodes), np.diff(nodes)
    spacing = (roots[-1] - roots[0]) / (size - 1)
    weights = np.empty((rows, 2 * count))
    indices = np.empty((rows, 2 * count), np.int32)
    block = max(1, _BLOCK_ENTRIES // max(count, 1))
    for start in range(0, rows, block):
        at = slice(start, start + block)
        precisions = np.square(slope * (offset + values[column[:, 0], at])) + side
        cells = ((np.sqrt(precisions) - roots[0]) / spacing).astype(np.int32)
        np.clip(cells, 0, size - 2, out=cells)
        upper = np.clip((precisions - nodes[cells]) / widths[cells], 0.0, 1.0) * steps
        weights[at, :count], weights[at, count:] = (steps - upper).T, upper.T
        indices[at, :count], indices[at, count:] = cells.T, cells.T + 1
    starts = np.arange(rows + 1) * (2 * count)
    return SampledSteps(sample_rate, nodes, sparse.csr_array((weights.ravel(), indices.ravel(), starts), (rows, size)))


def round_up(sample_rate: float, stretches: Sequence[Stretch], values: Array) -> SampledSteps:
    """Each step at the nearest node not below its u. A larger u dominates: adding noise to it gives the smaller one."""
    return _rounded(sample_rate, stretches, values, lambda nodes, u: np.searchsorted(nodes, u, side="left"))


def round_down(sample_rate: float, stretches: Sequence[Stretch], values: Array) -> SampledSteps:
    """Each step at the nearest node not above its u, so that the step dominates its node (see `round_up`)."""
    return _rounded(sample_rate, stretches, values, lambda nodes, u: np.searchsorted(nodes, u, side="right") - 1)


def _rounded(
    sample_rate: float,
    stretches: Sequence[Stretch],
    values: Array,
    nearest: Callable[[Array, Array], NDArray[np.intp]],
) -> SampledSteps:
    nodes = _fine_nodes(stretches)
    column, steps, slope, offset, side = _fields(stretches)
    precisions = np.square(slope * (offset + values[column].T)) + side
    indices = np.clip(nearest(nodes, precisions), 0, len(nodes) - 1)
    rows = np.broadcast_to(np.arange(values.shape[1])[:, None], indices.shape)
    counts = np.broadcast_to(steps.astype(np.float64), indices.shape)
    shape = (values.shape[1], len(nodes))
    weights = sparse.csr_array((counts.ravel(), (rows.ravel(), indices.ravel())), shape)
    weights.sum_duplicates()
    return SampledSteps(sample_rate, nodes, weights)


def _fields(stretches: Sequence[Stretch]) -> tuple[NDArray[Any], ...]:
    names = ("column", "steps", "slope", "offset", "side")
    return tuple(np.array([getattr(part, name) for part in stretches]) for name in names)


def _nodes(stretches: Sequence[Stretch]) -> Array:
    """Nodes that cover u for all contributions in [0, 1], so that they do not depend on the block of rows."""
    lowest, highest = _ends(stretches)
    if not highest > lowest * (1.0 + 1e-9):  # nodes in between would coincide
        highest = lowest * (1.0 + 1e-6) + 1e-12
    size = int(NODES * min(max(1.0, np.sqrt(highest)), 4.0))
    nodes = np.square(np.linspace(np.sqrt(lowest), np.sqrt(highest), size))
    nodes[0], nodes[-1] = lowest, highest
    return nodes


def _fine_nodes(stretches: Sequence[Stretch]) -> Array:
    """Nodes from the largest possible u downwards, `FINE_STEP` apart, and the least possible u as the first node."""
    lowest, highest = _ends(stretches)
    count = int(np.log(_FINE_SPAN) / FINE_STEP)
    nodes = highest * np.exp(-2.0 * FINE_STEP * np.arange(count))[::-1]
    return np.append([lowest], nodes[nodes > lowest])


def _ends(stretches: Sequence[Stretch]) -> tuple[float, float]:
    """The least and the largest u of these stretches over contributions in [0, 1]."""
    ends = np.array([part.precisions(np.array([0.0, 1.0])) for part in stretches])
    return float(ends[:, 0].min()), float(ends[:, 1].max())
