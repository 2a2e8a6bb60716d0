"""Recorded contributions of single examples, reduced to weights on a few nodes of effective precision.

For one example, a step is the sampled Gaussian mechanism with effective precision u = (moved / sigma)^2 + sum over side
queries of (side / sigma_side)^2. This is the inverse square of its effective noise multiplier. ``moved`` is how far the
example moves the clipped sum, in units of the sum's sensitivity; ``side`` how far it moves a side query, in units of
that query's sensitivity:

- Poisson sampling: moved is the contribution c, and side is 1, under either adjacency.
- Fixed batches under ``add_remove``: an example that joins a batch displaces another, whose contribution is only known
  to be at most 1. So moved is 1 + c and side is 2; at c = 1 this is the factor 2 of paper B, Theorem 3.3. Under
  ``zero_out`` they are refused: the rest of the batch reveals whether the example is in it, which defeats the
  amplification by sampling (docs/group-proof.md).
- Truncated Poisson batches: a step of Poisson sampling and, with the probability of a cut, one in which the example
  displaces another, as in fixed batches (`_one_by_one`).
- Shuffled epochs under ``zero_out``: the example is in one batch of the epoch. For every order of the data the epoch is
  one Gaussian, at worst the one with the largest u of its steps (paper C, Theorem 2).
- Full batches and shuffled epochs under ``replace_one``: moved is 1 + c and side is 2, because nothing is known about
  the record that takes the example's place (docs/group-proof.md, Theorem 5).
- Random allocation: a block is one round of its largest u, and has a law of its own (`AllocationBlock`,
  `dpsweep.accounting.individual.blocks`).

Renyi and privacy-loss accounting need only the sum of log E_Q[(P/Q)^z] over the steps. It is smooth in u, so each step
is split linearly between the two nodes (grid points of u) beside its u. For real z = alpha > 1 this can only increase
the sum, because log A_alpha is convex in u. Proof: M_u = exp(B_u - u/2), the likelihood ratio as a function of Brownian
time u, is a martingale. A(u) = E[g(M_u)] with g(m) = (1 - q + q m)^alpha. A' = E[L g], A'' = E[L L g] with L = (m^2/2)
d^2/dm^2. With p = q m / (1 - q + q m) in [0, 1], L g = alpha (alpha-1) p^2 g / 2 and g L L g - (L g)^2 = alpha
(alpha-1) p^2 g^2 (1-p) (2 + (4 alpha - 6) p) / 4 >= 0. So L L g >= 0, and by Cauchy-Schwarz A'^2 <= (E sqrt(g L L g))^2
<= A A''.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any, NamedTuple, assert_never

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from dpsweep.accounting.errors import UnsupportedMechanism
from dpsweep.accounting.mechanism.reductions import MOST_ALLOCATED, as_accounted, cases_of
from dpsweep.accounting.mechanism.samplings import Draws, Sampling
from dpsweep.accounting.mechanism.trace import GaussianRelease, PureRelease, Trace
from dpsweep.accounting.numerics.gaussian import LEVEL_SCALE
from dpsweep.accounting.pld import MIN_DELTA
from dpsweep.accounting.records.recorded_contributions import checked_snapshots

Array = NDArray[np.float64]

_PLACE_UP = 1.0 + 1e-9
"""Factor on places, far above their error from rounding."""
_FEW_BLOCKS = 64
_LARGEST_BLOCK = 1.0 / 0.3
"""Shift above which a block counts as one Gaussian step: chords of moments between nodes are looser there."""
_SPENT = 1e-6
"""Share of delta for blocks of random allocation that lose mass to infinity."""
LARGEST_LOSS = 1e3
"""Largest mass that a block may lose, over `AllocationBlock.tail`."""
_MOSTLY = 0.75
"""Probability of batches that are cut above which all are accounted for as cut."""


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
        """Return u at each contribution c, in float64; shape of ``contributions``. A c rounded to above 1
        counts as 1.
        """
        moved = self.offset + np.minimum(np.asarray(contributions, np.float64), 1.0)
        return np.asarray(np.square(self.slope * moved) + self.side)


class StepLaw(NamedTuple):
    """The sampled Gaussian mechanism at ``sample_rate``; it takes place with probability ``chance``, by a public draw.

    Its moment is 1 - chance + chance A. log of that is convex in u, as log A is.
    """

    sample_rate: float
    chance: float


class AllocationBlock(NamedTuple):
    """A block of ``steps`` steps of random allocation.

    In the one that an example joins it moves the sum by at most ``top`` noise standard deviations. Each block may
    lose about the mass ``tail`` to an infinite loss. ``blocks`` is about their number in the run, for choices on which
    no bound rests.

    The place of a block in which it moves the sum by x is tau(x) / tau(top), tau(x) = erf(x / sqrt(6)). The expectation
    of a convex function of the likelihood ratio is convex in it (docs/accounting-proofs.md, "Many noise levels").
    """

    steps: int
    top: float
    tail: float
    blocks: int

    def shifts(self, places: Array) -> Array:
        """Return how far the sum is moved at each place."""
        moved = LEVEL_SCALE * special.erfinv(places * special.erf(self.top / LEVEL_SCALE))
        return np.asarray(np.where(places < 1.0, np.minimum(moved, self.top), self.top))

    def roots(self, shifts: Array) -> Array:
        """Return the square root of the place of each shift, rounded up."""
        places = special.erf(shifts / LEVEL_SCALE) / special.erf(self.top / LEVEL_SCALE)
        return np.minimum(np.sqrt(places) * _PLACE_UP, 1.0)


StepsLaw = StepLaw | AllocationBlock


@dataclass(frozen=True)
class SampledNodes:
    """The nodes for all steps with one law: precisions [nodes] increase; the first may be 0.

    They are values of u, or of a block's place.
    """

    law: StepsLaw
    precisions: Array

    @property
    def largest(self) -> Array:
        """Return u of the one unsampled Gaussian that dominates a step at each node; shape [nodes]."""
        return self.precisions if isinstance(self.law, StepLaw) else np.square(self.law.shifts(self.precisions))


@dataclass(frozen=True)
class SparseRows:
    """A sparse matrix by rows: row r has the entries ends[r] to ends[r + 1] of ``weights`` and ``nodes`` (columns).

    In each row nodes increase and weights are positive. A sum over a row in this order has the same bits whatever other
    rows or threads there are.
    """

    weights: Array
    nodes: NDArray[np.int32]
    ends: NDArray[np.int64]

    def of(self, rows: NDArray[np.intp]) -> SparseRows:
        """Return the matrix of some of the rows."""
        starts, lengths = self.ends[rows], np.diff(self.ends)[rows]
        ends = np.append(0, np.cumsum(lengths))
        entries = np.arange(ends[-1]) + np.repeat(starts - ends[:-1], lengths)
        return SparseRows(self.weights[entries], self.nodes[entries], ends)


@dataclass(frozen=True)
class StepWeights:
    """The costs of a block of examples, as accounting needs them.

    steps: number of sampled steps assigned to each node. Nodes are numbered through all sampling rates, one after the
    other; with each rate a row's weights sum to the number of steps. Fields: precision [rows]: summed u of unsampled
    Gaussians (full batches, shuffled epochs, releases). pure: epsilons of pure releases. examples: size of the whole
    data set.
    """

    sampled: tuple[SampledNodes, ...]
    steps: SparseRows
    precision: Array
    pure: tuple[float, ...]
    examples: int

    @property
    def starts(self) -> list[int]:
        """Index of the first node of each sampling rate, followed by the number of all nodes."""
        return [0, *accumulate(len(part.precisions) for part in self.sampled)]

    def of(self, rows: NDArray[np.intp]) -> StepWeights:
        """Return the step weights of some rows."""
        return replace(self, steps=self.steps.of(rows), precision=self.precision[rows])

    def on_nodes(self, kept: Sequence[NDArray[np.intp]]) -> StepWeights:
        """Return the same weights on only the ``kept`` nodes (ascending) of each rate; rows have no weight on other
        nodes.
        """
        if all(len(own) == len(part.precisions) for own, part in zip(kept, self.sampled, strict=True)):
            return self
        places = np.zeros(self.starts[-1], np.int32)
        all_kept = np.concatenate([start + own for start, own in zip(self.starts, kept, strict=False)])
        places[all_kept] = np.arange(len(all_kept))
        sampled = tuple(replace(p, precisions=p.precisions[own]) for p, own in zip(self.sampled, kept, strict=True))
        return replace(self, sampled=sampled, steps=replace(self.steps, nodes=places[self.steps.nodes]))


Spreading = Callable[[Mapping[StepsLaw, tuple[Stretch, ...]], Array], tuple[tuple[SampledNodes, ...], SparseRows]]
"""Reduces the stretches with each law, given contributions [snapshots, rows]."""


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
        """Return the contributions, validated. Raises: InvalidInput as `checked_snapshots` does."""
        return RecordedContributions(*checked_snapshots(steps, values, trace), as_accounted(trace))

    def of(self, rows: NDArray[np.intp] | slice) -> RecordedContributions:
        """Return the contributions of some rows."""
        columns = self.values.T
        return replace(self, values=(columns[:, rows] if isinstance(rows, slice) else columns.take(rows, axis=1)).T)

    def unprotected(self) -> NDArray[np.bool_]:
        """Return whether each example contributed to a step without noise; shape [rows]."""
        found = np.zeros(len(self.values), np.bool_)
        for _, _, stretches in _stretches(tuple(self.steps), self.trace):
            for part in stretches:
                if part.slope == 0.0:
                    found |= part.offset + self.values[:, part.column] > 0.0
        return found

    def costs(self, spread: Spreading, tail: float = 0.0) -> StepWeights:
        """Return the step weights of each example; ``spread`` reduces the sampled steps. tail: of `AllocationBlock`."""
        values = np.ascontiguousarray(self.values.T, np.float64)
        trace = self.trace
        releases = [release.noise_multiplier**-2 for release in trace.releases if isinstance(release, GaussianRelease)]
        precision = np.full(len(self.values), float(sum(releases)))
        sampled: dict[StepsLaw, tuple[Stretch, ...]] = {}
        places: list[Array] = []
        top = min(_largest_shift(trace), _LARGEST_BLOCK)
        for sampling, chance, stretches in _stretches(tuple(self.steps), trace):
            match sampling.draws:
                case Draws.EPOCH:
                    for worst, epochs in _worst_by_epoch(stretches, values, sampling.steps_per_epoch):
                        precision += epochs * worst
                case Draws.ALLOCATED:
                    block = AllocationBlock(min(sampling.steps_per_round, MOST_ALLOCATED), top, tail, _blocks(trace))
                    for worst, blocks in _worst_by_epoch(stretches, values, sampling.steps_per_round):
                        alone = worst > top**2 if block.steps > 1 else np.ones_like(worst, np.bool_)
                        precision += np.where(alone, blocks * worst, 0.0)
                        if block.steps > 1 and top > 0.0:
                            alike = Stretch(len(values) + len(places), 0, blocks, 1.0, 0.0, 0.0)
                            sampled[block] = (*sampled.get(block, ()), alike)
                            places.append(np.where(alone, 0.0, block.roots(np.sqrt(worst))))
                case Draws.INDEPENDENT | Draws.SUBSET if sampling.sample_rate == 1.0:
                    precision += sum(part.steps * part.precisions(values[part.column]) for part in stretches)
                case Draws.INDEPENDENT | Draws.SUBSET:
                    law = StepLaw(sampling.sample_rate, chance)
                    sampled[law] = sampled.get(law, ()) + stretches
                case Draws.IN_TURN:
                    raise UnsupportedMechanism(f"no epsilon of single examples is known for {sampling.words}")
                case unknown:
                    assert_never(unknown)
        pure = tuple(release.epsilon for release in trace.releases if isinstance(release, PureRelease))
        recorded_and_places = np.array([*values, *places]) if places else values
        return StepWeights(*spread(sampled, recorded_and_places), precision, pure, trace.dataset_size)


@functools.lru_cache(maxsize=16)
def _stretches(steps: tuple[int, ...], trace: Trace) -> tuple[tuple[Sampling, float, tuple[Stretch, ...]], ...]:
    """Return stretches of each run of segments of one sampling, cut where noise or snapshot changes, in step order.

    With the probability that its steps take place (`_one_by_one`).
    """
    ends = [*steps[1:], trace.steps]
    runs: list[tuple[Sampling, float, tuple[Stretch, ...]]] = []
    for whole, group in groupby(trace.segments, key=lambda segment: segment.sampling):
        segments = tuple(group)
        for chance, sampling in _one_by_one(whole):
            run: list[Stretch] = []
            for segment in segments:
                slope = 1.0 / segment.noise_multiplier if segment.noise_multiplier > 0.0 else 0.0
                side = sum(((1 + sampling.displaced) / query.noise_multiplier) ** 2 for query in segment.side_queries)
                for column, (first, last) in enumerate(zip(steps, ends, strict=True)):
                    start, stop = max(first, segment.start_step), min(last, segment.stop_step)
                    if start < stop:
                        run.append(Stretch(column, start, stop, slope, sampling.displaced, side))
            runs.append((sampling, chance, tuple(run)))
    return tuple(runs)


def _one_by_one(sampling: Sampling) -> tuple[tuple[float, Sampling], ...]:
    """Return independent steps, each with its probability to take place, that together dominate one of ``sampling``.

    A step that is one of several cases p_1, p_2, ... is a function of these. The first case always takes place, case i
    > 1 with p_i / (1 - p_2 - ... - p_(i-1)). The step shows the first i > 1 that took place, or case 1. Where most
    batches are cut, the case of one that is cut, which dominates the others, takes place alone.
    """
    cases = cases_of(sampling, 1)
    if math.fsum(chance for chance, _ in cases[1:]) > _MOSTLY:
        return ((1.0, cases[-1][1]),)
    found, left = [(1.0, cases[0][1])], 1.0
    for chance, case in cases[1:]:
        found.append((min(chance / left, 1.0), case))
        left -= chance
    return tuple(found)


def _worst_by_epoch(stretches: Sequence[Stretch], values: Array, steps_per_epoch: int) -> Iterator[tuple[Array, int]]:
    """Yield the largest u [rows] within an epoch, and how many epochs are alike; an unfinished last one is included."""
    worst, current = np.zeros(values.shape[1]), 0
    for part in stretches:
        precisions = part.precisions(values[part.column])
        first, last = ((step - stretches[0].start) // steps_per_epoch for step in (part.start, part.stop - 1))
        if first > current:
            yield worst, 1
            worst = np.zeros_like(worst)
        worst = np.maximum(worst, precisions)
        if last > first:
            yield worst, 1
            if last - first > 1:
                yield precisions, last - first - 1
            worst = precisions
        current = last
    yield worst, 1


def _largest_shift(trace: Trace) -> float:
    """Return how far a full contribution to a noisy, randomly allocated batch moves the sum at most."""
    return max((s.amplitude() for s in trace.allocated if s.noise_multiplier > 0.0), default=0.0) * _PLACE_UP


def _blocks(trace: Trace) -> int:
    """Return at least the number of blocks."""
    return sum(-(-segment.steps // segment.sampling.steps_per_round) + 1 for segment in trace.allocated)


def density_of_blocks(trace: Trace) -> int:
    """Return a factor on the number of nodes: with few blocks of random allocation, errors between nodes count more."""
    return 2 if 0 < _blocks(trace) <= _FEW_BLOCKS else 1


def tail_of_blocks(trace: Trace, delta: float) -> tuple[float, float]:
    """Return `AllocationBlock.tail` for this run, and what is left of ``delta``.

    Each block may lose `LARGEST_LOSS` tails. An upper bound on epsilon at the delta left is one at ``delta``.

    Raises: UnsupportedMechanism for a delta that is not far above the least tail of a double.
    """
    blocks = _blocks(trace)
    if not blocks:
        return 0.0, delta
    if delta < MIN_DELTA:
        raise UnsupportedMechanism(
            f"delta is {delta:g}, but randomly allocated batches are accounted for from {MIN_DELTA:g} on; choose a "
            "larger delta"
        )
    share = _SPENT * delta / (LARGEST_LOSS * blocks)
    tail = 10.0 ** (4 * math.floor(math.log10(share) / 4))  # rounded down, so that laws are reused
    return tail, delta * (1.0 - 2.0 * _SPENT)
