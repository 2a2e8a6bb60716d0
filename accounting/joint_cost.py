"""The joint privacy cost of several runs on the same data, at one delta."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from accounting.accountants import account, total_rdp
from accounting.errors import InvalidInput, UnsupportedMechanism, require_finite
from accounting.estimates import PrivacyEstimate, of_group
from accounting.individual import epsilon_of_many_rounds
from accounting.mechanism import Trace
from accounting.pld import MIN_DELTA, GroupRounds, PairBounds, rounds_of_group
from accounting.reasons import union, weakened
from accounting.reductions import is_attained
from accounting.renyi import ORDERS, epsilon_improved
from accounting.rounds import gaussian_rounds, require_group_size
from accounting.samplings import Adjacency, Sampling
from accounting.selection import selected_rdp

_ROUND_UP = 1.0 + 1e-9  # far above the rounding error of a sum
_TIGHT = 1.001
"""Ratio of the bounds up to which Renyi DP is not tried."""


def account_together(traces: Iterable[Trace], delta: float, group_size: int = 1) -> PrivacyEstimate:
    """(epsilon, delta) of several runs whose results are all seen, for ``group_size`` examples that may be in each.

    Guarantee: adaptive composition of the mechanisms of all traces, the tighter of PLD and Renyi DP, under the
    adjacency that they share: that of the traces, or ``zero_out`` where it holds for every sampling. It holds for runs
    whose noise is independent and whose traces were fixed before the first of them. It is an estimate if the kind of
    any trace is. Data sets may differ in size: a run without the example costs it nothing. Private selections count
    with their cost after the selection, by Renyi DP or by the sum of their epsilons. One run alone costs what `account`
    says. Several have no certified lower bound where one of them has none (`CertifiedEpsilon`).

    Raises: InvalidInput without traces or for a delta outside (0, 1), UnsupportedMechanism for runs that no adjacency
    covers together, such as fixed batches beside shuffled epochs, and for groups of which no bound is known.
    """
    counts, group_size = Counter(traces), require_group_size(group_size)
    delta = require_finite("delta", delta, above=0.0, below=1.0)
    if not counts:
        raise InvalidInput("no runs to account for together; give the trace of at least one")
    if counts.total() == 1:
        return account(next(iter(counts)), delta, group_size=group_size)
    adjacency = _shared_adjacency(counts)
    reasons = union(trace.reasons for trace in counts)
    moved = {replace(trace, adjacency=adjacency): count for trace, count in counts.items()}
    if not all(trace.is_private for trace in moved):
        return of_group(PrivacyEstimate(math.inf, delta, adjacency, "rdp", "none", lower_epsilon=math.inf), group_size)
    if any(trace.selection is not None for trace in moved):
        return weakened(of_group(_with_selections(moved, delta, group_size), group_size), reasons)
    rounds = GroupRounds.together((rounds_of_group(trace, group_size), count) for trace, count in moved.items())
    found = epsilon_of_many_rounds(rounds, delta) if delta >= MIN_DELTA else PairBounds(math.inf, 0.0, "rdp")
    if found.upper > _TIGHT * found.lower:
        found = min(found, _by_renyi(moved, delta, group_size, found.lower), key=lambda bounds: bounds.upper)
    if group_size > 1 and math.isinf(found.upper):
        raise UnsupportedMechanism(f"no accountant covers groups of {group_size} at a delta below {MIN_DELTA:g}")
    lower = found.lower if delta >= MIN_DELTA and all(map(is_attained, moved)) else None
    best = PrivacyEstimate(found.upper, delta, adjacency, found.method, lower_epsilon=lower)
    return weakened(of_group(best, group_size), reasons)


def _by_renyi(counts: Mapping[Trace, int], delta: float, group_size: int, lower: float) -> PairBounds:
    """Renyi DP of all runs; infinite where it covers no groups."""
    if group_size > 1 and any(part.is_sampled for trace in counts for part in gaussian_rounds(trace)):
        return PairBounds(math.inf, lower, "rdp")
    rdp = sum((count * total_rdp(trace, group_size) for trace, count in counts.items()), np.zeros_like(ORDERS))
    return PairBounds(float(epsilon_improved(rdp, delta)), lower, "rdp")


def _with_selections(counts: Mapping[Trace, int], delta: float, group_size: int) -> PrivacyEstimate:
    """The lower of Renyi DP and of the sum of epsilons, each at an equal share of delta; all under one adjacency.

    Of groups of several examples, only the sum: Renyi DP covers them in no sampled batches.
    """
    alone = math.inf
    if group_size == 1:
        rdp = sum((count * selected_rdp(trace) for trace, count in counts.items()), np.zeros_like(ORDERS))
        alone = float(epsilon_improved(rdp, delta))
    best = PrivacyEstimate(alone, delta, next(iter(counts)).adjacency, "selection-rdp")
    selected = {trace: count for trace, count in counts.items() if trace.selection is not None}
    plain = [trace for trace, count in counts.items() if trace.selection is None for _ in range(count)]
    share = delta / (sum(selected.values()) + bool(plain))
    added = sum(count * account(trace, share, group_size=group_size).epsilon for trace, count in selected.items())
    added = (added + (account_together(plain, share, group_size).epsilon if plain else 0.0)) * _ROUND_UP
    return replace(best, epsilon=added, accountant="selection-sum") if added < best.epsilon else best


def _shared_adjacency(traces: Iterable[Trace]) -> Adjacency:
    found: set[Adjacency] = {trace.adjacency for trace in traces}
    samplings: set[Sampling] = {segment.sampling for trace in traces for segment in trace.segments}
    if len(found) == 1:
        return found.pop()
    if all("zero_out" in sampling.adjacencies for sampling in samplings):
        return "zero_out"
    words = " and ".join(sorted({sampling.words for sampling in samplings}))
    raise UnsupportedMechanism(
        f"runs with {words} share no adjacency, so no epsilon covers them together; compare runs of one sampling"
    )
