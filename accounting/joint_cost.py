"""The joint privacy cost of several runs on the same data, at one delta."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from accounting.accountants import account, total_rdp
from accounting.errors import InvalidInput, UnsupportedMechanism, require_finite
from accounting.estimates import PrivacyEstimate
from accounting.individual import epsilon_of_many_rounds
from accounting.mechanism import Trace
from accounting.pld import MIN_DELTA, GroupRounds, PairBounds, rounds_of_group
from accounting.reasons import union, weakened
from accounting.reductions import is_attained
from accounting.renyi import ORDERS, epsilon_improved
from accounting.samplings import Adjacency, Sampling
from accounting.selection import selected_rdp

_ROUND_UP = 1.0 + 1e-9  # far above the rounding error of a sum
_TIGHT = 1.001
"""Ratio of the bounds up to which Renyi DP is not tried."""


def account_together(traces: Iterable[Trace], delta: float) -> PrivacyEstimate:
    """(epsilon, delta) of several runs whose results are all seen, for one example that may be in the data of each.

    Guarantee: adaptive composition of the mechanisms of all traces, the tighter of PLD and Renyi DP, under the
    adjacency that they share: that of the traces, or ``zero_out`` where it holds for every sampling. It holds for runs
    whose noise is independent and whose traces were fixed before the first of them. It is an estimate if the kind of
    any trace is. Data sets may differ in size: a run without the example costs it nothing. Private selections count
    with their cost after the selection, by Renyi DP or by the sum of their epsilons. One run alone costs what `account`
    says. Several have no certified lower bound where one of them has none (`CertifiedEpsilon`).

    Raises: InvalidInput without traces or for a delta outside (0, 1), UnsupportedMechanism for runs that no adjacency
    covers together, such as fixed batches beside shuffled epochs.
    """
    counts = Counter(traces)
    delta = require_finite("delta", delta, above=0.0, below=1.0)
    if not counts:
        raise InvalidInput("no runs to account for together; give the trace of at least one")
    if counts.total() == 1:
        return account(next(iter(counts)), delta)
    adjacency = _shared_adjacency(counts)
    reasons = union(trace.reasons for trace in counts)
    moved = {replace(trace, adjacency=adjacency): count for trace, count in counts.items()}
    if not all(trace.is_private for trace in moved):
        return PrivacyEstimate(math.inf, delta, adjacency, "rdp", "none", lower_epsilon=math.inf)
    if any(trace.selection is not None for trace in moved):
        return weakened(_with_selections(moved, delta), reasons)
    rounds = GroupRounds.together((rounds_of_group(trace), count) for trace, count in moved.items())
    found = epsilon_of_many_rounds(rounds, delta) if delta >= MIN_DELTA else PairBounds(math.inf, 0.0, "rdp")
    if found.upper > _TIGHT * found.lower:
        rdp = sum((count * total_rdp(trace) for trace, count in moved.items()), np.zeros_like(ORDERS))
        found = min(found, PairBounds(float(epsilon_improved(rdp, delta)), found.lower, "rdp"), key=lambda b: b.upper)
    lower = found.lower if delta >= MIN_DELTA and all(map(is_attained, moved)) else None
    return weakened(PrivacyEstimate(found.upper, delta, adjacency, found.method, lower_epsilon=lower), reasons)


def _with_selections(counts: Mapping[Trace, int], delta: float) -> PrivacyEstimate:
    """The lower of Renyi DP and of the sum of epsilons, each at an equal share of delta; all under one adjacency."""
    rdp = sum((count * selected_rdp(trace) for trace, count in counts.items()), np.zeros_like(ORDERS))
    best = PrivacyEstimate(float(epsilon_improved(rdp, delta)), delta, next(iter(counts)).adjacency, "selection-rdp")
    selected = {trace: count for trace, count in counts.items() if trace.selection is not None}
    plain = [trace for trace, count in counts.items() if trace.selection is None for _ in range(count)]
    share = delta / (sum(selected.values()) + bool(plain))
    added = sum(count * account(trace, share).epsilon for trace, count in selected.items())
    added = (added + (account_together(plain, share).epsilon if plain else 0.0)) * _ROUND_UP
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
