"""Replaces traces that no theorem covers by traces that dominate them. Proofs: docs/group-proof.md."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

from dpsweep.accounting.mechanism.correlated import as_independent, turns_attain_pairs
from dpsweep.accounting.mechanism.samplings import (
    SMALLEST_RATE,
    DisplacingSampling,
    FixedBatchSampling,
    PoissonSampling,
    Sampling,
    TruncatedPoissonSampling,
)
from dpsweep.accounting.mechanism.trace import (
    GaussianRelease,
    PureRelease,
    Release,
    Trace,
    require_one_run,
    require_supported,
    require_unit_of_rows,
)
from dpsweep.accounting.mechanism.units import EXAMPLE, of_records

ALLOCATED_SHIFTS = (1e-4, 1.0 / 0.2)
"""The range of shifts, in noise standard deviations, in which random allocation is bounded from below, too."""
MOST_ALLOCATED = 1_000_000
"""Most steps of a block that are told apart; the mean of fewer ratios is above that of more in convex order."""
_RAREST = 1e-3
"""Largest share of delta that `rarest_apart` spends."""
_ROUND_DOWN = 1.0 - 1e-12
_CHANCE_UP = 1.0 + 1e-9
"""Inflation of tail probabilities, far above the error of their evaluation."""
_CHANCE_DOWN = 1.0 - 1e-9
_LEAST = 1e-290
"""Least probability of a batch that is cut: below it, doubles lose precision."""


def by_rows(trace: Trace, group_size: int) -> tuple[Trace, int]:
    """Return the run as one of rows, and how many of them ``group_size`` units of ``trace`` are at most.

    Guarantee: an epsilon of that many rows of the run that is returned is one of the units.
    """
    return replace(trace, unit=EXAMPLE, adjacency=of_records(trace.adjacency)), group_size * trace.unit.rows


def as_accounted(trace: Trace, group_size: int = 1) -> Trace:
    """Return the trace whose rounds the accountants compose: replaced records as displaced ones, and samplings in one
    form.

    Guarantee: its rounds dominate the rounds of ``trace``. A record replaced by any other moves a sum by at most both
    contributions, as if it displaced the other. A release on the whole data set is one for a group of two (Theorem 5).
    Samplings are replaced by others that draw the same batches (`_in_one_form`). Turns and correlated noise are
    replaced by independent rounds that dominate them for any ``group_size`` examples
    (`dpsweep.accounting.mechanism.correlated`).

    Raises: UnsupportedMechanism for the trace of a selection, for that of users
    (`by_rows`), and for a sampling or noise strategy without a known theorem: every
    accountant of single runs passes here.
    """
    require_one_run(trace)
    require_unit_of_rows(trace)
    require_supported(trace)
    trace = as_independent(trace, group_size)
    samplings = {segment.sampling: _in_one_form(segment.sampling) for segment in trace.segments}
    if any(before != after for before, after in samplings.items()):
        segments = tuple(replace(segment, sampling=samplings[segment.sampling]) for segment in trace.segments)
        trace = replace(trace, segments=segments)
    if trace.adjacency != "replace_one":
        return trace
    segments = tuple(replace(segment, sampling=DisplacingSampling(segment.sampling)) for segment in trace.segments)
    releases = tuple(map(_replaced_in, trace.releases))
    return replace(trace, segments=segments, releases=releases, adjacency="add_remove")


def _in_one_form(sampling: Sampling) -> Sampling:
    """Return a sampling that draws the same batches: a maximum that no batch can exceed is none.

    Where every example joins, the maximum is a fixed batch size.
    """
    match sampling:
        case TruncatedPoissonSampling(dataset_size=size, sample_rate=rate, max_batch_size=most) if most >= size:
            return PoissonSampling(rate)
        case TruncatedPoissonSampling(dataset_size=size, sample_rate=1.0, max_batch_size=most):
            return FixedBatchSampling(size, most)
        case _:
            return sampling


def _replaced_in(release: Release) -> Release:
    match release:
        case GaussianRelease(name, noise_multiplier):
            return GaussianRelease(name, noise_multiplier / 2.0)
        case PureRelease(name, epsilon):
            return PureRelease(name, 2.0 * epsilon)


def rarest_apart(trace: Trace, delta: float, group_size: int = 1) -> tuple[Trace, float]:
    """Return the trace without cuts, if they take at most a thousandth of delta as a failure, and what is left of
    delta.

    Any other trace is returned as it is. Only Renyi divergences need this: however rare an event is, it alone decides
    their moments of high order. Guarantee: if the trace returned is (epsilon, the delta returned)-DP, the given one is
    (epsilon, delta)-DP. The reason: whether a batch has no room has the same law with the group and without it (Theorem
    4).
    """
    require_supported(trace)
    segments, spent = [], 0.0
    for segment in trace.segments:
        match cases_of(_in_one_form(segment.sampling), group_size):
            case ((_, PoissonSampling() as uncut), *others):
                spent += segment.steps * sum(chance for chance, _ in others)
                segments.append(replace(segment, sampling=uncut))
            case _:
                segments.append(segment)
    if not 0.0 < spent <= _RAREST * delta:
        return trace, delta
    return replace(trace, segments=tuple(segments)), (delta - spent) * _ROUND_DOWN


def cases_of(sampling: Sampling, group_size: int) -> tuple[tuple[float, Sampling], ...]:
    """Return the ways in which a round may draw its batch, with the probabilities of a public draw among them."""
    return _of_truncated(sampling, group_size) if isinstance(sampling, TruncatedPoissonSampling) else ((1.0, sampling),)


@functools.lru_cache(maxsize=64)  # a run of many noise levels asks for every level
def _of_truncated(sampling: TruncatedPoissonSampling, group_size: int) -> tuple[tuple[float, Sampling], ...]:
    """Return the batches of a step, for any ``group_size`` examples.

    Guarantee: a step is dominated by the pair that reveals the draw and then has the batches drawn (Theorem 4). The
    draw is whether the others left no room, C = 1[|R| > B - k]; batches in which they did displace. The size n may be
    the size of the data set with the group or without it. For one example, that fewer joining examples are kept in a
    batch that is cut counts, too.
    """
    from scipy import stats  # late: importing it takes half a second

    size, most, rate = sampling.dataset_size, sampling.max_batch_size, sampling.sample_rate
    uncut, cut = sampling.uncut, DisplacingSampling(sampling.uncut)
    if group_size > 1:
        full = min(1.0, max(float(stats.binom.sf(most - group_size, size, rate)) * _CHANCE_UP, _LEAST))
        return _possible((1.0 - full, uncut), (full, cut))
    crowded = float(stats.binom.sf(most - 1, size - 1, rate)) * _CHANCE_DOWN
    filled = rate * float(stats.binom.pmf(most - 1, size - 1, rate)) * _CHANCE_UP  # by one more, if n = |D'|
    filled = min(1.0 - crowded, max(filled + (_CHANCE_UP**2 - 1.0) * crowded, _LEAST))
    kept = most / size * float(stats.binom.sf(most, size, rate)) / max(crowded, _LEAST) * _CHANCE_UP
    thinned = DisplacingSampling(PoissonSampling(min(max(kept, SMALLEST_RATE), rate)))
    return _possible((1.0 - crowded - filled, uncut), (crowded, thinned), (filled, cut))


def _possible(*cases: tuple[float, Sampling]) -> tuple[tuple[float, Sampling], ...]:
    return tuple(case for case in cases if case[0] > 0.0)


def is_attained(trace: Trace, group_size: int = 1) -> bool:
    """Return whether some run that the trace describes is the pairs of its rounds for ``group_size`` examples, so that
    what bounds these from below holds.

    False where batches may be cut, or where the order of an epoch's batches is random (the pair is that of the worst
    order). False also where fixed batches are too large for the group to displace as many others (Theorem 2), and where
    the group has more members than the run has examples. Nor is it attained where a pure release meets several records:
    their k steps of epsilon are not one of k epsilon. False where a filter limits contributions, or where noise or end
    followed results.
    """
    samplings = [segment.sampling for segment in as_accounted(trace).segments]
    fixed = not (trace.noise_follows_results or trace.ended_by_results or trace.filter)
    attains = turns_attain_pairs(trace) and _blocks_attain_pairs(trace)
    displaced = all(s.batch_size <= s.dataset_size - group_size for s in samplings if isinstance(s, FixedBatchSampling))
    fits = group_size <= trace.dataset_size
    alone = group_size == 1 and trace.adjacency != "replace_one"
    stepped = alone or not any(isinstance(each, PureRelease) for each in trace.releases)
    return (
        fixed and fits and attains and displaced and stepped and all(sampling.draws_its_pair for sampling in samplings)
    )


def is_attained_by(trace: Trace, members: int) -> bool:
    """Return `is_attained` for ``members`` given examples that contribute what was recorded.

    False for several, whose sums are rounded up. False in random allocation, where a block counts as if every
    contribution to it were the largest.
    """
    return members == 1 and not trace.allocated and is_attained(trace)


def _blocks_attain_pairs(trace: Trace) -> bool:
    """Return whether every block of random allocation is complete and has one noise level, with a shift within
    `ALLOCATED_SHIFTS` and at most `MOST_ALLOCATED` steps.
    """
    lowest, highest = ALLOCATED_SHIFTS
    return all(
        segment.start_step % segment.sampling.steps_per_round == 0
        and segment.steps % segment.sampling.steps_per_round == 0
        and segment.sampling.steps_per_round <= MOST_ALLOCATED
        and lowest <= segment.amplitude() <= (highest if segment.sampling.steps_per_round > 1 else math.inf)
        for segment in trace.allocated
    )
