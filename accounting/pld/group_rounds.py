"""From a trace to the random sensitivities of its rounds, for a group of equal or of given examples.

All plain Gaussian mechanisms of a run are merged into one: sensitivities over noise add in quadrature. The other rounds
are a list of distinct laws with counts.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dpsweep.accounting.errors import InvalidInput, UnsupportedMechanism
from dpsweep.accounting.mechanism.reductions import ALLOCATED_SHIFTS, MOST_ALLOCATED, as_accounted, cases_of
from dpsweep.accounting.mechanism.rounds import require_group_size
from dpsweep.accounting.mechanism.samplings import Draws, Sampling, draws_by_epoch
from dpsweep.accounting.mechanism.trace import GaussianRelease, PureRelease, Segment, Trace
from dpsweep.accounting.pld.sensitivity import AllocatedRound, RoundLaw, SensitivityMixture, examples_law, group_law
from dpsweep.accounting.records.recorded_contributions import checked_snapshots

_GRID_POINTS = 512  # amplitudes of given examples are rounded up to multiples of the largest one / _GRID_POINTS
_LEAST_SPACING = 1e-300  # of that grid, far below any delta, and above where doubles lose precision


@dataclass(frozen=True)
class GroupRounds:
    """Dominating pairs of the rounds of a trace for one group; their product dominates the whole run.

    laws: subsampled rounds and how often each occurs.
    gaussian: mean shift, in noise standard deviations, of all plain Gaussian mechanisms together.
    pure: the epsilons of pure-DP releases.
    is_private: false without noise.
    allocated: blocks of random allocation and how often each occurs.
    """

    laws: tuple[tuple[RoundLaw, int], ...] = ()
    gaussian: float = 0.0
    pure: tuple[float, ...] = ()
    is_private: bool = True
    allocated: tuple[tuple[AllocatedRound, int], ...] = ()

    @property
    def is_one_gaussian(self) -> bool:
        """Return whether the run is one plain Gaussian mechanism, or nothing at all."""
        return not self.laws and not self.pure and not self.allocated

    @property
    def has_draws(self) -> bool:
        """Return whether a round is by a public draw one of several, as where batches are truncated."""
        return any(len(law.cases) > 1 for law, _ in self.laws)

    @property
    def count(self) -> int:
        """Number of rounds that a lattice has to discretise."""
        sampled = sum(count for _, count in (*self.laws, *self.allocated))
        return sampled + len(self.pure) + (self.gaussian > 0.0)

    @staticmethod
    def together(parts: Iterable[tuple[GroupRounds, int]]) -> GroupRounds:
        """Return the rounds of several runs, each with how often it was run; equal laws are counted together."""
        counts: Counter[RoundLaw] = Counter()
        allocated: Counter[AllocatedRound] = Counter()
        square, pure, is_private = 0.0, list[float](), True
        for rounds, times in parts:
            for law, count in rounds.laws:
                counts[law] += times * count
            for block, count in rounds.allocated:
                allocated[block] += times * count
            square += times * rounds.gaussian**2
            pure += times * rounds.pure
            is_private = is_private and rounds.is_private
        blocks = tuple(allocated.items())
        return GroupRounds(tuple(counts.items()), math.sqrt(square), tuple(pure), is_private, blocks)


class _Case(NamedTuple):
    """One way in which a step may draw its batch, and how far it then moves: `Segment.amplitude` per member."""

    probability: float
    sampling: Sampling
    amplitudes: tuple[float, ...]


@dataclass(frozen=True)
class _Piece:
    """Steps over which the group's amplitudes stay the same; each is one of ``cases``, by a public draw."""

    start: int
    stop: int
    cases: tuple[_Case, ...]

    @property
    def by_epoch(self) -> bool:
        """Return whether an epoch of these steps, or a block of one, is one round."""
        return draws_by_epoch(self.cases[0].sampling)

    @property
    def allocation(self) -> Sampling | None:
        """The sampling, if a block of it is one round."""
        sampling = self.cases[0].sampling
        return sampling if sampling.draws is Draws.ALLOCATED else None


def rounds_of_group(trace: Trace, group_size: int = 1) -> GroupRounds:
    """Return the rounds that dominate a trace for any group of ``group_size`` examples.

    Raises: UnsupportedMechanism for groups of several in cyclic Poisson batches or random allocation.
    """
    group_size, trace = require_group_size(group_size), as_accounted(trace, group_size)
    if not trace.is_private:
        return GroupRounds(is_private=False)
    pieces = [_Piece(s.start_step, s.stop_step, _equal_cases(s, group_size)) for s in trace.segments]
    return _rounds(trace, pieces, group_size, lambda cases: _equal_members(cases, group_size))


def rounds_of_examples(trace: Trace, steps: Sequence[int], contributions: npt.ArrayLike) -> GroupRounds:
    """Return the rounds that dominate a trace for one group of given examples.

    steps: first step of each snapshot, ascending from 0, shape [snapshots]. contributions: contribution over
    sensitivity (c / S), in [0, 1], shape [members, snapshots].

    Raises: InvalidInput as `checked_snapshots` does, and for an empty group.
    """
    steps, table = checked_snapshots(steps, contributions, trace)
    if len(table) == 0:
        raise InvalidInput("contributions have no rows, but a group has at least one member; give one row per member")
    starts, trace, pieces = np.array(steps), as_accounted(trace), list[_Piece]()
    for segment in trace.segments:
        first = int(np.searchsorted(starts, segment.start_step, side="right")) - 1
        last = int(np.searchsorted(starts, segment.stop_step, side="left"))
        for snapshot in range(first, last):
            start = max(int(starts[snapshot]), segment.start_step)
            stop = min(int(starts[snapshot + 1]) if snapshot + 1 < len(starts) else trace.steps, segment.stop_step)
            pieces.append(_Piece(start, stop, _cases(segment, table[:, snapshot].tolist(), len(table))))
    if any(math.inf in case.amplitudes for piece in pieces for case in piece.cases):
        return GroupRounds(is_private=False)
    return _rounds(trace, pieces, len(table), _given_members)


@functools.lru_cache(maxsize=4096)  # a run's first epochs share their segments
def _equal_cases(segment: Segment, group_size: int) -> tuple[_Case, ...]:
    return _cases(segment, (1.0,), group_size)


@functools.lru_cache(maxsize=4096)
def _equal_members(cases: tuple[_Case, ...], group_size: int) -> RoundLaw:
    laws = [_law_of_group((case.sampling, group_size)).scaled(case.amplitudes[0]) for case in cases]
    return RoundLaw(tuple((case.probability, law) for case, law in zip(cases, laws, strict=True)))


@functools.lru_cache(maxsize=64)
def _law_of_group(drawn: tuple[Sampling, int]) -> SensitivityMixture:
    return group_law(*drawn)


def _cases(segment: Segment, contributions: Sequence[float], group_size: int) -> tuple[_Case, ...]:
    return tuple(
        _Case(probability, sampling, tuple(map(replace(segment, sampling=sampling).amplitude, contributions)))
        for probability, sampling in cases_of(segment.sampling, group_size)
    )


def _rounds(
    trace: Trace, pieces: Sequence[_Piece], group_size: int, law: Callable[[tuple[_Case, ...]], RoundLaw]
) -> GroupRounds:
    counts: Counter[tuple[_Case, ...]] = Counter()
    for piece in pieces:
        if not piece.by_epoch and any(any(case.amplitudes) for case in piece.cases):
            counts[piece.cases] += piece.stop - piece.start
    shuffled = [piece for piece in pieces if piece.by_epoch and piece.allocation is None]
    laws, squares = Counter[RoundLaw](), [_shuffled_square(shuffled, group_size)]
    blocks = _blocks(pieces, group_size)
    squares.extend(count * block.shift**2 for block, count in blocks.items() if _is_alone(block))
    allocated = tuple((block, count) for block, count in blocks.items() if not _is_alone(block))
    for cases, count in counts.items():
        found = law(cases)
        if found.is_gaussian:
            squares.append(count * found.largest**2)
        else:
            laws[found] += count  # several samplings may have one law
    gaussians = [r.noise_multiplier for r in trace.releases if isinstance(r, GaussianRelease)]
    squares.extend((group_size / multiplier) ** 2 for multiplier in gaussians)
    pure = tuple(group_size * r.epsilon for r in trace.releases if isinstance(r, PureRelease) and r.epsilon > 0.0)
    return GroupRounds(tuple(laws.items()), float(np.sqrt(sum(squares))), pure, allocated=allocated)


def _blocks(pieces: Iterable[_Piece], group_size: int) -> Counter[AllocatedRound]:
    """Return all blocks of random allocation, with the largest shift of their steps, and how often each occurs.

    An unfinished block counts as a whole one. Smaller shifts count as the largest: they are its post-processing
    (docs/accounting-proofs.md, "Random allocation").
    """
    counts: Counter[AllocatedRound] = Counter()
    largest: dict[tuple[int, int], float] = {}
    lengths: dict[int, Sampling] = {}
    run_start, run_stop, before = 0, -1, None
    for piece in pieces:
        sampling = piece.allocation
        if sampling is None:
            continue
        if group_size > 1:
            raise UnsupportedMechanism(
                f"groups of {group_size} in {sampling.words} have no common round, as their members may join different "
                f"steps; only the cost of any {group_size} examples is known, by the accountant 'pld'"
            )
        if piece.start != run_stop or sampling != before:
            run_start, before = piece.start, sampling
        run_stop, (shift,) = piece.stop, piece.cases[0].amplitudes
        first, last = ((step - run_start) // sampling.steps_per_round for step in (piece.start, piece.stop - 1))
        if last - first > 1 and shift > 0.0:
            counts[_block(shift, sampling)] += last - first - 1
        for block in {first, last}:
            largest[run_start, block] = max(shift, largest.get((run_start, block), 0.0))
        lengths[run_start] = sampling
    counts.update(_block(shift, lengths[start]) for (start, _), shift in largest.items() if shift > 0.0)
    return counts


def _block(shift: float, sampling: Sampling) -> AllocatedRound:
    """Return the block, with a shift that is at least the least one that differs from 0."""
    return AllocatedRound(max(shift, ALLOCATED_SHIFTS[0]), min(sampling.steps_per_round, MOST_ALLOCATED))


def _is_alone(block: AllocatedRound) -> bool:
    """Return whether a block is accounted for as one Gaussian: it has one step, or a shift beyond the largest told."""
    return block.steps == 1 or block.shift > ALLOCATED_SHIFTS[1]


def _given_members(cases: tuple[_Case, ...]) -> RoundLaw:
    return RoundLaw(tuple((case.probability, _sum_of_members(case)) for case in cases))


def _sum_of_members(case: _Case) -> SensitivityMixture:
    if not any(case.amplitudes):
        return SensitivityMixture((0.0,), (1.0,))
    return examples_law(case.sampling, case.amplitudes, max(max(case.amplitudes) / _GRID_POINTS, _LEAST_SPACING))


def _shuffled_square(pieces: Iterable[_Piece], group_size: int) -> float:
    """Squared mean shift of all reshuffled epochs: one Gaussian per epoch, each member at its largest amplitude.

    Given the order of an epoch, its batches are Gaussians whose squared shifts sum to at most the square of the sum of
    the members' largest amplitudes. The order is random, which quasi-convexity covers (docs/group-proof.md, Theorem 3).
    An epoch counts once, also if the noise changes within it or the run ends in it.
    """
    whole, partial = 0.0, dict[tuple[int, int], npt.NDArray[np.float64]]()
    run_start, run_stop, before = 0, -1, None
    for piece in pieces:
        (case,) = piece.cases
        if piece.start != run_stop or case.sampling != before:
            run_start, before = piece.start, case.sampling
        run_stop, length = piece.stop, case.sampling.steps_per_epoch
        amplitudes = np.broadcast_to(case.amplitudes, group_size)
        first, last = (piece.start - run_start) // length, (piece.stop - 1 - run_start) // length
        whole += max(0, last - first - 1) * float(amplitudes.sum()) ** 2
        for epoch in {first, last}:
            partial[run_start, epoch] = np.maximum(partial.get((run_start, epoch), 0.0), amplitudes)
    return whole + sum(float(largest.sum()) ** 2 for largest in partial.values())
