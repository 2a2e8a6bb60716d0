"""From a trace to the random sensitivities of its rounds, for a group of equal or of given examples.

All plain Gaussian mechanisms of a run are merged into one: sensitivities over noise add in quadrature. The other rounds
are a list of distinct mixtures with counts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from accounting.errors import InvalidInput
from accounting.mechanism import GaussianRelease, PureRelease, Trace
from accounting.pld.sensitivity import SensitivityMixture, examples_law, group_law
from accounting.recorded_contributions import checked_snapshots
from accounting.reductions import with_displacement
from accounting.rounds import require_group_size
from accounting.samplings import Sampling

_GRID_POINTS = 512  # amplitudes of given examples are rounded up to multiples of the largest one / _GRID_POINTS


@dataclass(frozen=True)
class GroupRounds:
    """Dominating pairs of the rounds of a trace for one group; their product dominates the whole run.

    mixtures: subsampled rounds and how often each occurs. gaussian: mean shift, in noise standard deviations, of all
    plain Gaussian mechanisms together. pure: the epsilons of pure-DP releases. is_private: false without noise.
    """

    mixtures: tuple[tuple[SensitivityMixture, int], ...] = ()
    gaussian: float = 0.0
    pure: tuple[float, ...] = ()
    is_private: bool = True

    @property
    def count(self) -> int:
        """Number of rounds that a lattice has to discretise."""
        return sum(count for _, count in self.mixtures) + len(self.pure) + (self.gaussian > 0.0)

    @staticmethod
    def together(parts: Iterable[tuple[GroupRounds, int]]) -> GroupRounds:
        """The rounds of several runs, each with how often it was run; equal mixtures are counted together."""
        counts: Counter[SensitivityMixture] = Counter()
        square, pure, is_private = 0.0, list[float](), True
        for rounds, times in parts:
            for mixture, count in rounds.mixtures:
                counts[mixture] += times * count
            square += times * rounds.gaussian**2
            pure += times * rounds.pure
            is_private = is_private and rounds.is_private
        return GroupRounds(tuple(counts.items()), math.sqrt(square), tuple(pure), is_private)


@dataclass(frozen=True)
class _Piece:
    """Steps over which the group's amplitudes (`Segment.amplitude`, per member) stay the same."""

    start: int
    stop: int
    sampling: Sampling
    amplitudes: tuple[float, ...]


def rounds_of_group(trace: Trace, group_size: int = 1) -> GroupRounds:
    """The rounds that dominate a trace for any group of ``group_size`` examples."""
    group_size, trace = require_group_size(group_size), with_displacement(trace)
    if not trace.is_private:
        return GroupRounds(is_private=False)
    pieces = [_Piece(s.start_step, s.stop_step, s.sampling, (s.amplitude(),) * group_size) for s in trace.segments]
    return _rounds(trace, pieces, group_size, _equal_members)


def rounds_of_examples(trace: Trace, steps: Sequence[int], contributions: npt.ArrayLike) -> GroupRounds:
    """The rounds that dominate a trace for one group of given examples.

    steps: first step of each snapshot, ascending from 0, shape [snapshots]. contributions: contribution over
    sensitivity (c / S), in [0, 1], shape [members, snapshots].

    Raises: InvalidInput as `checked_snapshots` does, and for an empty group.
    """
    steps, table = checked_snapshots(steps, contributions, trace)
    if len(table) == 0:
        raise InvalidInput("contributions have no rows, but a group has at least one member; give one row per member")
    starts, trace = np.array(steps), with_displacement(trace)
    if not trace.is_private:
        return GroupRounds(is_private=False)
    pieces = []
    for segment in trace.segments:
        first = int(np.searchsorted(starts, segment.start_step, side="right")) - 1
        last = int(np.searchsorted(starts, segment.stop_step, side="left"))
        for snapshot in range(first, last):
            start = max(int(starts[snapshot]), segment.start_step)
            stop = min(int(starts[snapshot + 1]) if snapshot + 1 < len(starts) else trace.steps, segment.stop_step)
            pieces.append(
                _Piece(
                    start,
                    stop,
                    segment.sampling,
                    tuple(map(segment.amplitude, table[:, snapshot].tolist())),
                )
            )
    return _rounds(trace, pieces, table.shape[0], _given_members)


def _rounds(
    trace: Trace, pieces: Sequence[_Piece], group_size: int, law: Callable[[_Piece], SensitivityMixture]
) -> GroupRounds:
    counts: Counter[tuple[Sampling, tuple[float, ...]]] = Counter()
    example: dict[tuple[Sampling, tuple[float, ...]], _Piece] = {}
    for piece in pieces:
        if piece.sampling.draws != "epoch" and any(piece.amplitudes):
            counts[piece.sampling, piece.amplitudes] += piece.stop - piece.start
            example[piece.sampling, piece.amplitudes] = piece
    shuffled = [piece for piece in pieces if piece.sampling.draws == "epoch"]
    mixtures, squares = [], [_shuffled_square(shuffled)]
    for key, count in counts.items():
        mixture = law(example[key])
        if mixture.is_gaussian:
            squares.append(count * mixture.sensitivities[0] ** 2)
        else:
            mixtures.append((mixture, count))
    gaussians = [r.noise_multiplier for r in trace.releases if isinstance(r, GaussianRelease)]
    squares.extend((group_size / multiplier) ** 2 for multiplier in gaussians)
    pure = tuple(group_size * r.epsilon for r in trace.releases if isinstance(r, PureRelease) and r.epsilon > 0.0)
    return GroupRounds(tuple(mixtures), float(np.sqrt(sum(squares))), pure)


def _equal_members(piece: _Piece) -> SensitivityMixture:
    return group_law(piece.sampling, len(piece.amplitudes)).scaled(piece.amplitudes[0])


def _given_members(piece: _Piece) -> SensitivityMixture:
    return examples_law(piece.sampling, piece.amplitudes, max(piece.amplitudes) / _GRID_POINTS)


def _shuffled_square(pieces: Iterable[_Piece]) -> float:
    """Squared mean shift of all reshuffled epochs: one Gaussian per epoch, each member at its largest amplitude.

    Given the order of an epoch, its batches are Gaussians whose squared shifts sum to at most the square of the sum of
    the members' largest amplitudes; the order is random, which quasi-convexity covers (docs/group-proof.md, Theorem 3).
    An epoch counts once, also if the noise changes within it or the run ends in it.
    """
    whole, partial = 0.0, dict[tuple[int, int], npt.NDArray[np.float64]]()
    run_start, run_stop, length = 0, -1, 0
    for piece in pieces:
        if piece.start != run_stop or piece.sampling.steps_per_epoch != length:
            run_start, length = piece.start, piece.sampling.steps_per_epoch
        run_stop = piece.stop
        amplitudes = np.asarray(piece.amplitudes)
        first, last = (piece.start - run_start) // length, (piece.stop - 1 - run_start) // length
        whole += max(0, last - first - 1) * float(amplitudes.sum()) ** 2
        for epoch in {first, last}:
            partial[run_start, epoch] = np.maximum(partial.get((run_start, epoch), 0.0), amplitudes)
    return whole + sum(float(largest.sum()) ** 2 for largest in partial.values())
