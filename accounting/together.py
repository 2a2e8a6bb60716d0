"""Several runs on the same data taken together: what all their results cost, at one delta."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from accounting.accountants import total_rdp
from accounting.errors import InvalidInput, UnsupportedMechanism, require_finite
from accounting.estimates import Claim, PrivacyEstimate
from accounting.mechanism import Trace
from accounting.pld import GroupRounds, epsilon_of_rounds, rounds_of_group
from accounting.renyi import ORDERS, epsilon_improved
from accounting.samplings import Adjacency, Sampling

_MOST_MIXTURES = 2_000
"""Distinct sampled rounds up to which privacy loss distributions are composed, in seconds; beyond, Renyi DP alone."""


def account_together(traces: Iterable[Trace], delta: float) -> PrivacyEstimate:
    """(epsilon, delta) of several runs whose results are all seen, for one example that may be in the data of each.

    Guarantee: adaptive composition of the mechanisms of all traces, the tighter of PLD and Renyi DP, under the
    adjacency that they share: that of the traces, or ``zero_out`` where it holds for every sampling. It holds for runs
    whose noise is independent and whose traces were fixed before the first of them; it is an estimate where one of the
    traces is. Data sets may differ in size: a run without the example costs it nothing.

    Raises: InvalidInput without traces or for a delta outside (0, 1), UnsupportedMechanism for runs that no adjacency
    covers together, such as fixed batches beside shuffled epochs.
    """
    counts = Counter(traces)
    delta = require_finite("delta", delta, above=0.0, below=1.0)
    if not counts:
        raise InvalidInput("no runs to account for together; give the trace of at least one")
    adjacency = _shared_adjacency(counts)
    kind: Claim = "guarantee" if all(trace.kind == "guarantee" for trace in counts) else "estimate"
    moved = {replace(trace, adjacency=adjacency): count for trace, count in counts.items()}
    if not all(trace.is_private for trace in moved):
        return PrivacyEstimate(math.inf, delta, adjacency, "rdp", "none", lower_epsilon=math.inf)
    rdp = sum((count * total_rdp(trace) for trace, count in moved.items()), np.zeros_like(ORDERS))
    best = PrivacyEstimate(float(epsilon_improved(rdp, delta)), delta, adjacency, "rdp", kind)
    rounds = GroupRounds.together((rounds_of_group(trace), count) for trace, count in moved.items())
    if len(rounds.mixtures) > _MOST_MIXTURES:
        return best
    certified = epsilon_of_rounds(rounds, delta)
    if certified.upper > best.epsilon:
        return replace(best, lower_epsilon=certified.lower)
    return replace(best, epsilon=certified.upper, accountant=certified.method, lower_epsilon=certified.lower)


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
