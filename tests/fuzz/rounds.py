"""A trace as rounds of mixtures of Gaussians on the line, by rules that are written out again here.

It reads the fields of a trace and calls nothing of `accounting`: side queries add in quadrature; an example that joins
a fixed batch, or is replaced, moves the sum by its own contribution and that of another; an epoch of shuffled batches
is one round, in which every member counts with its largest contribution.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from dpsweep.accounting.mechanism.samplings import FixedBatchSampling, PoissonSampling, ShuffledSampling
from dpsweep.accounting.mechanism.trace import GaussianRelease, PureRelease, Segment, Trace


@dataclass(frozen=True)
class Mixture:
    """N(A, 1) against N(0, 1), where A is ``shifts[j]`` with probability ``weights[j]``; shifts ascend."""

    shifts: tuple[float, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True)
class Rounds:
    """``mixtures`` with their counts, one Gaussian that stands for all plain ones, and randomised responses."""

    mixtures: tuple[tuple[Mixture, int], ...]
    gaussian: float
    pure: tuple[float, ...]

    @property
    def only_gaussian(self) -> bool:
        """Whether the closed form of the Gaussian mechanism is exact."""
        return not self.mixtures and not self.pure


@dataclass(frozen=True)
class Members:
    """Contributions [members][snapshots] of given examples, each from its step on."""

    steps: tuple[int, ...]
    contributions: tuple[tuple[float, ...], ...]

    def at(self, step: int) -> tuple[float, ...]:
        place = int(np.searchsorted(self.steps, step, side="right")) - 1
        return tuple(row[place] for row in self.contributions)


def full_members(size: int) -> Members:
    """A group of ``size`` examples that contribute in full."""
    return Members((0,), ((1.0,),) * size)


def rounds_of(trace: Trace, members: Members) -> Rounds:
    """What the members, added or removed together, or blanked, or replaced, cost at every step."""
    replaced = trace.adjacency == "replace_one"
    size = len(members.contributions)
    counts: Counter[Mixture] = Counter()
    squares: list[float] = []
    for segment, start, stop in _pieces(trace, members):
        if isinstance(segment.sampling, ShuffledSampling):
            continue
        amplitudes = [_amplitude(segment, c, replaced) for c in members.at(start)]
        mixture = _mixture(segment, amplitudes)
        if mixture.weights == (1.0,):
            squares.append((stop - start) * mixture.shifts[0] ** 2)
        elif mixture.shifts != (0.0,):
            counts[mixture] += stop - start
    squares += [sum(epoch) ** 2 for epoch in _epochs(trace, members, replaced)]
    moves = (2 if replaced else 1) * size
    squares += [(moves / r.noise_multiplier) ** 2 for r in trace.releases if isinstance(r, GaussianRelease)]
    pure = tuple(moves * r.epsilon for r in trace.releases if isinstance(r, PureRelease) and r.epsilon > 0.0)
    return Rounds(tuple(counts.items()), math.sqrt(math.fsum(squares)), pure)


def _pieces(trace: Trace, members: Members) -> Iterator[tuple[Segment, int, int]]:
    """Each segment, cut where a snapshot begins."""
    for segment in trace.segments:
        end = segment.start_step + segment.steps
        cuts = [segment.start_step, *(s for s in members.steps if segment.start_step < s < end), end]
        yield from ((segment, start, stop) for start, stop in itertools.pairwise(cuts))


def _amplitude(segment: Segment, contribution: float, replaced: bool) -> float:
    also = 1.0 if replaced or isinstance(segment.sampling, FixedBatchSampling) else 0.0
    sides = ((1.0 + also) / query.noise_multiplier for query in segment.side_queries)
    return math.hypot((contribution + also) / segment.noise_multiplier, *sides)


def _mixture(segment: Segment, amplitudes: Sequence[float]) -> Mixture:
    match segment.sampling:
        case PoissonSampling(sample_rate=1.0):
            return Mixture((sum(amplitudes),), (1.0,))
        case PoissonSampling(sample_rate=q):
            size = len(amplitudes)
            return _law(amplitudes, [q**j * (1.0 - q) ** (size - j) for j in range(size + 1)])
        case FixedBatchSampling(dataset_size=n, batch_size=batch):
            size = len(amplitudes)
            drawn = stats.hypergeom.pmf(np.arange(size + 1), n, size, batch)
            return _law(amplitudes, [float(p) / math.comb(size, j) for j, p in enumerate(drawn)])
        case _:
            raise AssertionError(f"no mixture for {segment.sampling!r}")


def _law(amplitudes: Sequence[float], subset: Sequence[float]) -> Mixture:
    """Of the sum over a random subset; subset[j] is the probability of each subset of j members."""
    found: defaultdict[float, float] = defaultdict(float)
    if len(set(amplitudes)) == 1:
        for drawn, each in enumerate(subset):
            found[drawn * amplitudes[0]] += math.comb(len(amplitudes), drawn) * each
    else:
        for drawn, each in enumerate(subset):
            for chosen in itertools.combinations(amplitudes, drawn):
                found[math.fsum(chosen)] += each
    atoms = sorted((shift, weight) for shift, weight in found.items() if weight > 1e-60)
    return Mixture(tuple(shift for shift, _ in atoms), tuple(weight for _, weight in atoms))


def _epochs(trace: Trace, members: Members, replaced: bool) -> Iterator[list[float]]:
    """The largest amplitude of each member in each epoch; epochs begin anew where the sampling changes."""
    largest: dict[tuple[int, int], list[float]] = {}
    run, before = 0, None
    for segment in trace.segments:
        if segment.sampling != before:
            run, before = segment.start_step, segment.sampling
        if not isinstance(segment.sampling, ShuffledSampling):
            continue
        for step in range(segment.start_step, segment.start_step + segment.steps):
            key = run, (step - run) // segment.sampling.steps_per_epoch
            now = [_amplitude(segment, c, replaced) for c in members.at(step)]
            largest[key] = list(map(max, now, largest.get(key, now)))
    return iter(largest.values())
