"""Replaces traces that no theorem covers by traces that dominate them. Proofs: docs/group-proof.md.

`with_displacement` is for replaced records and is applied wherever a trace is turned into rounds. `rare_cuts_apart` and
`without_cuts` are for truncated Poisson batches: they reserve a part of delta for batches that are cut. Without them,
every batch counts as cut, which is a guarantee too, but a loose one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from accounting.mechanism import GaussianRelease, PureRelease, Release, Segment, Trace, join_segments, require_one_run
from accounting.samplings import DisplacingSampling, TruncatedPoissonSampling

_SHARE = 1e-3
"""Share of delta for the event that more batches are cut than count as cut in any trace."""
_SHARE_OF_LEVEL = 0.03
"""Share of delta for each trace after the first."""
_TAILS = (0.3, 3e-2, 3e-3, 3e-4, 3e-5, 3e-6)
"""For each trace, the probability that more batches are cut than count as cut; in a trace before these none counts."""
_LARGEST_SHARE = 0.5
"""Largest share of delta that `without_cuts` spends. There no batch counts as cut, as it is unknown which ones are."""
_ROUND_UP = 1.0 + 1e-9
_ROUND_DOWN = 1.0 - 1e-12


def with_displacement(trace: Trace) -> Trace:
    """A trace under add/remove whose rounds dominate those of a trace under replace-one; any other trace as it is.

    Guarantee: a record replaced by any other moves a sum by at most its own contribution and that of the other, as if
    it displaced the other; a release on the whole data set is one for a group of two (Theorem 5).

    Raises: UnsupportedMechanism for the trace of a selection: every accountant of single runs passes here.
    """
    require_one_run(trace)
    if trace.adjacency != "replace_one":
        return trace
    segments = tuple(replace(segment, sampling=DisplacingSampling(segment.sampling)) for segment in trace.segments)
    releases = tuple(map(_replaced_in, trace.releases))
    return replace(trace, segments=segments, releases=releases, adjacency="add_remove")


def _replaced_in(release: Release) -> Release:
    match release:
        case GaussianRelease(name, noise_multiplier):
            return GaussianRelease(name, noise_multiplier / 2.0)
        case PureRelease(name, epsilon):
            return PureRelease(name, 2.0 * epsilon)


def rare_cuts_apart(trace: Trace, delta: float, group_size: int = 1) -> tuple[tuple[Trace, float], ...]:
    """Traces in which more and more truncated Poisson batches count as cut, each with a delta.

    A trace without such batches is returned as it is, with ``delta``. Guarantee: if each trace returned is
    (epsilon, its delta)-DP for groups of ``group_size``, the given one is (epsilon, delta)-DP for them under add/remove
    (Theorem 4). How many batches are cut does not depend on the group, so a trace's bound is needed only if more
    batches are cut than count as cut in the trace before it. With f the probability of that, it adds f times its delta.
    """
    truncated = sum(part.steps for part in trace.segments if isinstance(part.sampling, TruncatedPoissonSampling))
    if truncated == 0:
        return ((trace, delta),)
    last = _with_cuts(trace, group_size, _SHARE * delta, truncated)
    none = _with_cuts(trace, group_size, 1.0, truncated)
    if none.exceeded > _TAILS[0]:  # where cuts are no exception, several traces would only share the delta
        return ((last.trace, (delta - last.exceeded) * _ROUND_DOWN),)
    levels = _distinct([none, *(_with_cuts(trace, group_size, tail, truncated) for tail in _TAILS), last])
    share = _SHARE_OF_LEVEL * delta
    needed = [levels[0]]
    for before, level in pairwise(levels):
        if before.exceeded <= share:
            break
        needed.append(level)
    first = delta - (len(needed) - 1) * share - needed[-1].exceeded
    apart = [(needed[0].trace, first)]
    apart += [(level.trace, share / before.exceeded) for before, level in pairwise(needed)]
    return tuple((level, left * _ROUND_DOWN) for level, left in apart)


@dataclass(frozen=True)
class _Level:
    """A trace in which some batches count as cut, and the probability that more are."""

    trace: Trace
    exceeded: float


def _distinct(levels: Sequence[_Level]) -> list[_Level]:
    """The levels with different traces; of those with equal traces the first is kept."""
    return [level for index, level in enumerate(levels) if all(level.trace != other.trace for other in levels[:index])]


def _with_cuts(trace: Trace, group_size: int, tail: float, truncated: int) -> _Level:
    """The trace in which, with probability ``tail`` at most, more batches are cut than count as cut."""
    segments: list[Segment] = []
    exceeded = 0.0
    for part in trace.segments:
        if not isinstance(part.sampling, TruncatedPoissonSampling):
            segments.append(part)
            continue
        probability = part.sampling.cut_probability(group_size)
        cuts, failure = _rare_cuts(part.steps, probability, tail * part.steps / truncated)
        exceeded += failure
        if cuts < part.steps:
            segments.append(replace(part, steps=part.steps - cuts, sampling=part.sampling.uncut))
        if cuts > 0:
            segments.append(replace(part, steps=cuts, sampling=DisplacingSampling(part.sampling.uncut)))
    return _Level(replace(trace, segments=join_segments(segments)), exceeded)


def without_cuts(trace: Trace, delta: float, group_size: int = 1) -> tuple[Trace, float]:
    """The trace with no batch counted as cut, and what is left of delta.

    Trace and delta are returned as they are if this would take more than half of delta. For contributions that differ
    from step to step, where it matters which batches are cut; for others see `rare_cuts_apart`.
    """
    segments, spent = [], 0.0
    for part in trace.segments:
        if isinstance(part.sampling, TruncatedPoissonSampling):
            spent += part.steps * part.sampling.cut_probability(group_size)
            segments.append(replace(part, sampling=part.sampling.uncut))
        else:
            segments.append(part)
    if spent == 0.0 or spent > _LARGEST_SHARE * delta:
        return trace, delta
    return replace(trace, segments=tuple(segments)), (delta - spent) * _ROUND_DOWN


def _rare_cuts(steps: int, probability: float, allowed: float) -> tuple[int, float]:
    """The smallest number of cuts that is exceeded with probability at most ``allowed``, and that probability."""
    from scipy import stats  # late: importing it takes half a second

    def exceeded(cuts: int) -> float:
        return float(stats.binom.sf(cuts, steps, probability)) * _ROUND_UP

    low, high = -1, steps
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if exceeded(middle) <= allowed else (middle, high)
    return high, exceeded(high)
