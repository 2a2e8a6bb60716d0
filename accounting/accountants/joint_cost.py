"""The joint privacy cost of several runs on the same data, at one delta."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.accountants.methods import total_rdp
from dpsweep.accounting.accountants.selection import selected_rdp
from dpsweep.accounting.errors import InvalidInput, UnsupportedMechanism, require_finite
from dpsweep.accounting.individual import epsilon_of_many_rounds
from dpsweep.accounting.mechanism.correlated import have_common_rounds, takes_turns
from dpsweep.accounting.mechanism.estimates import PrivacyEstimate, of_group, weakest
from dpsweep.accounting.mechanism.reasons import union, weakened
from dpsweep.accounting.mechanism.reductions import by_rows, is_attained, is_attained_by
from dpsweep.accounting.mechanism.rounds import gaussian_rounds, require_group_size
from dpsweep.accounting.mechanism.samplings import Adjacency, Sampling
from dpsweep.accounting.mechanism.trace import Trace, require_one_run
from dpsweep.accounting.mechanism.units import Unit
from dpsweep.accounting.numerics.renyi import ORDERS, epsilon_improved
from dpsweep.accounting.numerics.rounding import ROUND_UP
from dpsweep.accounting.pld import (
    MIN_DELTA,
    Chain,
    GroupRounds,
    PairBounds,
    epsilon_of_chain,
    require_pld_delta,
    rounds_of_examples,
    rounds_of_group,
    upper_epsilon_of_rounds,
)

_TIGHT = 1.001
"""Ratio of the bounds up to which Renyi DP is not tried."""


def account_together(traces: Iterable[Trace], delta: float, group_size: int = 1) -> PrivacyEstimate:
    """Return (epsilon, delta) of several runs whose results are all seen, for ``group_size`` examples or users.

    Guarantee: adaptive composition of the mechanisms of all traces, the tighter of PLD and Renyi DP, under the
    adjacency that they share. This is the traces' own, or ``zero_out`` where it holds for every sampling. It holds for
    runs whose noise is independent and whose traces were fixed before the first of them. It is an estimate if the kind
    of any trace is. Data sets may differ in size: a run without the example costs it nothing. Private selections count
    with their cost after the selection, by Renyi DP or by the sum of their epsilons. One run alone costs what `account`
    says. Several have no certified lower bound where one of them has none (`CertifiedEpsilon`).

    Raises: InvalidInput without traces or for a delta outside (0, 1), UnsupportedMechanism for runs that no adjacency
    covers together (fixed batches beside shuffled epochs), and for groups without a known bound.
    """
    counts, group_size = Counter(traces), require_group_size(group_size)
    delta = require_finite("delta", delta, above=0.0, below=1.0)
    if not counts:
        raise InvalidInput("no runs to account for together; give the trace of at least one")
    if counts.total() == 1:
        return account(next(iter(counts)), delta, group_size=group_size)
    adjacency, unit = _shared_adjacency(counts), _shared_unit(counts)
    reasons = union(trace.reasons for trace in counts)
    moved = Counter(replace(trace, adjacency=adjacency) for trace in counts.elements())
    if not all(trace.is_private for trace in moved):
        return of_group(
            PrivacyEstimate(math.inf, delta, adjacency, "rdp", "none", lower_epsilon=math.inf), group_size, unit
        )
    if any(trace.selection is not None for trace in moved):
        return weakened(of_group(_with_selections(moved, delta, group_size), group_size), reasons)
    sized = Counter[tuple[Trace, int]]()
    for trace, count in moved.items():
        sized[by_rows(trace, group_size)] += count
    found = _by_pld(sized, delta) if delta >= MIN_DELTA else PairBounds(math.inf, 0.0, "rdp")
    if found.upper > _TIGHT * found.lower:
        found = min(found, _by_renyi(sized, delta, found.lower), key=lambda bounds: bounds.upper)
    largest = max(size for _, size in sized)
    if largest > 1 and math.isinf(found.upper):
        raise UnsupportedMechanism(f"no accountant covers groups of {largest} at a delta below {MIN_DELTA:g}")
    is_known = all(is_attained(*run) and not takes_turns(run[0]) for run in sized)  # other examples come first
    lower = found.lower if delta >= MIN_DELTA and is_known else None
    best = PrivacyEstimate(found.upper, delta, adjacency, found.method, lower_epsilon=lower)
    return weakened(of_group(best, group_size, unit), reasons)


def epsilon_of_examples_together(
    runs: Iterable[tuple[Trace, Sequence[int], npt.ArrayLike]], delta: float
) -> PrivacyEstimate:
    """Return the epsilon of one group of given examples, such as all records of a user, in several runs whose results
    are seen.

    runs: of each run its trace, and steps and contributions of its members as `epsilon_of_examples` takes them, with
    the same members in the same order. A member that is not in the data of a run contributes 0 to it. A run that has
    none of them costs nothing: leave it out.

    Claim: (epsilon, delta)-DP of the group under the adjacency that all runs share, as `account_together` chooses it:
    as strong as the weakest of `Trace.individual_kind`. Proof: docs/group-proof.md, "Several runs". There is no lower
    bound where a run costs something, but all contributions to it are 0: its data may have no member.

    Raises: InvalidInput without runs, for other numbers of members, and as `epsilon_of_examples`;
    UnsupportedMechanism as `account_together`, and for private selections.
    """
    delta, runs = require_pld_delta(delta), tuple(runs)
    if not runs:
        raise InvalidInput("no runs to account for together; give the trace and the contributions of at least one")
    for trace, _, _ in runs:
        require_one_run(trace)
    adjacency = _shared_adjacency(trace for trace, _, _ in runs)
    moved = [(replace(trace, adjacency=adjacency), steps, own) for trace, steps, own in runs]
    rounds = [rounds_of_examples(*run) for run in moved]
    sizes = {np.shape(own)[0] for _, _, own in moved}
    if len(sizes) > 1:
        raise InvalidInput(f"runs have contributions of {sorted(sizes)} members; give the same members for every run")
    size = sizes.pop()
    whole = GroupRounds.together((each, 1) for each in rounds)
    found = (epsilon_of_many_rounds if size == 1 else upper_epsilon_of_rounds)(whole, delta)
    attained = all(is_attained_by(trace, size) for trace, _, _ in moved) or math.isinf(found.lower)
    take_part = all(np.any(own) or each == GroupRounds() for (_, _, own), each in zip(moved, rounds, strict=True))
    estimate = PrivacyEstimate(
        found.upper,
        delta,
        adjacency,
        found.method,
        weakest(*(trace.individual_kind for trace, _, _ in moved)) if math.isfinite(found.upper) else "none",
        lower_epsilon=found.lower if attained and take_part else None,
    )
    return weakened(of_group(estimate, size), union(trace.individual_reasons for trace, _, _ in moved))


def _by_pld(counts: Mapping[tuple[Trace, int], int], delta: float) -> PairBounds:
    """Return bounds by privacy loss distributions, over a chain of single examples if any run needs one."""
    if not _has_chains(counts):
        rounds = GroupRounds.together((rounds_of_group(*run), count) for run, count in counts.items())
        return epsilon_of_many_rounds(rounds, delta)
    of_one = GroupRounds.together((rounds_of_group(trace), count) for (trace, _), count in counts.items())
    return epsilon_of_chain(Chain(of_one, max(size for _, size in counts)), delta)


def _by_renyi(counts: Mapping[tuple[Trace, int], int], delta: float, lower: float) -> PairBounds:
    """Renyi DP of all runs, each with its size of group; infinite where it covers no groups, or random allocation."""
    if _has_chains(counts) or any(trace.allocated for trace, _ in counts):
        return PairBounds(math.inf, lower, "rdp")
    if any(size > 1 and part.is_sampled for trace, size in counts for part in gaussian_rounds(trace)):
        return PairBounds(math.inf, lower, "rdp")
    rdp = sum((count * total_rdp(*run) for run, count in counts.items()), np.zeros_like(ORDERS))
    return PairBounds(float(epsilon_improved(rdp, delta)), lower, "rdp")


def _has_chains(runs: Iterable[tuple[Trace, int]]) -> bool:
    return not all(have_common_rounds(*run) for run in runs)


def _with_selections(counts: Mapping[Trace, int], delta: float, group_size: int) -> PrivacyEstimate:
    """Return the lower of Renyi DP and of the sum of epsilons, each at an equal share of delta; all under one
    adjacency.

    Of groups of several examples, and with random allocation, only the sum: Renyi DP does not cover them.
    """
    alone = math.inf
    if group_size == 1 and not any(trace.allocated for trace in counts):
        rdp = sum((count * selected_rdp(trace) for trace, count in counts.items()), np.zeros_like(ORDERS))
        alone = float(epsilon_improved(rdp, delta))
    best = PrivacyEstimate(alone, delta, next(iter(counts)).adjacency, "selection-rdp")
    selected = {trace: count for trace, count in counts.items() if trace.selection is not None}
    plain = [trace for trace, count in counts.items() if trace.selection is None for _ in range(count)]
    share = delta / (sum(selected.values()) + bool(plain))
    added = sum(count * account(trace, share, group_size=group_size).epsilon for trace, count in selected.items())
    added = (added + (account_together(plain, share, group_size).epsilon if plain else 0.0)) * ROUND_UP
    return replace(best, epsilon=added, accountant="selection-sum") if added < best.epsilon else best


def _shared_unit(traces: Iterable[Trace]) -> Unit:
    """Return the unit of a claim about all runs, which may differ in how many rows they keep of a user."""
    units = {trace.unit.name: trace.unit for trace in traces}
    if len(units) > 1:
        raise UnsupportedMechanism(
            f"these runs protect different units, {' and '.join(sorted(units))}, so no epsilon covers them together; "
            "compare runs of one unit"
        )
    (unit,) = units.values()
    return unit


def _shared_adjacency(traces: Iterable[Trace]) -> Adjacency:
    found: set[Adjacency] = {trace.adjacency for trace in traces}
    samplings: set[Sampling] = {segment.sampling for trace in traces for segment in trace.segments}
    if len(found) == 1:
        return found.pop()
    if "fixed_graph" in found:
        raise UnsupportedMechanism(
            "some of these runs take as known who owns which record (fixed_graph) and others do not, so that a user "
            "may own other records in each; compare runs of one adjacency"
        )
    if all("zero_out" in sampling.adjacencies for sampling in samplings):
        return "zero_out"
    words = " and ".join(sorted({sampling.words for sampling in samplings}))
    raise UnsupportedMechanism(
        f"runs with {words} share no adjacency, so no epsilon covers them together; compare runs of one sampling"
    )
