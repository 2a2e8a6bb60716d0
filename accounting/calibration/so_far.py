"""Cost of the first steps of a run, for every epoch, by the accountant that calibrated the run.

A prefix of a run is post-processing of a longer one, so the cost of a longer prefix bounds that of a shorter one. A
slow accountant is therefore asked at some epochs only; each epoch before one of them has its value. All that `pld` is
asked at share one lattice.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from dpsweep.accounting.accountants.account import account_again
from dpsweep.accounting.accountants.methods import bounds_pld
from dpsweep.accounting.accountants.one_run import ACCOUNTANTS, Accountant
from dpsweep.accounting.mechanism.estimates import PrivacyEstimate
from dpsweep.accounting.mechanism.reductions import by_rows
from dpsweep.accounting.mechanism.rounds import enforced_epsilon
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.accounting.pld import Chain, rounds_of_group, rounds_or_chain, upper_of_prefixes

_TOLERANCE: Final = 4e-3
"""Target for the relative gap of certified bounds. Beside the exact epsilon, the upper one of a run with one noise
level is higher by about 0.1 %. With many levels, it is by 0.5 % in the middle of the run and 0.1 % at its end. Below a
fifth of the last epsilon it may be a few hundredths."""
_MOST: Final = 60
_ON_ONE_LATTICE: Final = (20, 1200)
_ON_MANY: Final = (5, 200)
"""An accountant is asked at the second number over that of segments: at least the first number of times, at most
`_MOST`. Other epochs have the value of the next one. For 200 epochs of 1,000 steps with 200 noise levels, all that
share a lattice take .2 to .5 s of CPU (benchmarks/so_far.py)."""
_QUICK: Final = frozenset(("rdp", "rdp-classic", "zcdp", "zcdp-sampled"))
"""Accountants that take a few milliseconds for any run; they are asked at every epoch."""


def cost_so_far(trace: Trace, ends: Sequence[int], step: int, whole: PrivacyEstimate) -> float:
    """Return the upper bound on epsilon of the first ``step`` steps of ``trace``; an estimate where ``whole`` is one.

    ends: last steps of the epochs, increasing. whole: the cost of all of ``trace``, and so of its last step;
    its delta and its accountant are used. Raises: UnsupportedMechanism if nothing covers the steps.
    """
    if step >= trace.steps:
        return whole.epsilon
    name = _known(whole.accountant)
    before = tuple(ends[: bisect_left(ends, trace.steps)])
    # a quick accountant is asked at every step, and a step after the last epoch is accounted for itself
    asked, bounds = _curve(
        trace, (step,) if name in _QUICK or step > max(before, default=0) else before, whole.delta, name
    )
    place = bisect_left(asked, step)
    partial = bounds[place]
    if math.isinf(partial):
        partial = _cost(trace.until(asked[place]), whole.delta, name)
    # The first steps of a run are a function of all its steps, here of a trace fixed beforehand, so by post-processing
    # they are (epsilon, delta)-DP wherever the whole run is. Both bounds hold; the one of fewer steps may be the larger
    # because it is coarse.
    return min(partial, whole.epsilon)


def cost_of_steps(trace: Trace, delta: float, accountant: str) -> float:
    """Return the upper bound on epsilon at ``delta`` of all of ``trace``, or an estimate where the trace's kind is one.

    accountant: the name in the run's `PrivacyEstimate`. A name that is not one of `ACCOUNTANTS`, such as ``filter``,
    stands for ``rdp``, because the bound of the filter is compared in any case. The name ``gdp`` stands for ``pld``,
    which is exact for Gaussians too, and whose bound for sampled batches may bear that name. So does ``rdp`` where it
    does not cover the run. Raises: UnsupportedMechanism if nothing covers it.
    """
    return _cost(trace, delta, _known(accountant))


def _known(accountant: str) -> str:
    return accountant if accountant in ACCOUNTANTS else "rdp"


@functools.lru_cache(maxsize=256)  # trials that differ only in the seed have the same trace, and epochs share an answer
def _curve(trace: Trace, ends: tuple[int, ...], delta: float, name: str) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return the steps at which the accountant is asked, as each bounds those before it, and bounds there.

    A bound is infinite where the accountant is to be asked about that step alone. The cost of the last epoch is known;
    the one before it is asked, so the last one is seen to cost something.
    """
    shares = _shares_lattice(trace, name)
    fewest, at_once = _ON_ONE_LATTICE if shares else _ON_MANY
    most = min(_MOST, max(fewest, at_once // max(1, len(trace.segments))))
    asked = ends[::-1][:: -(-len(ends) // most)][::-1]
    if not shares:
        return asked, (math.inf,) * len(asked)
    runs = [rounds_of_group(*by_rows(trace.until(step), 1)) for step in asked]
    return asked, tuple(upper_of_prefixes(runs, delta, _TOLERANCE))


def _shares_lattice(trace: Trace, name: str) -> bool:
    if name not in ("pld", "auto", "gdp") or trace.selection is not None or trace.filter is not None:
        return False
    match rounds_or_chain(*by_rows(trace, 1)):
        case Chain():
            return False
        case rounds:
            return rounds.is_private and bool(rounds.laws or rounds.allocated)


@functools.lru_cache(maxsize=4096)
def _cost(trace: Trace, delta: float, name: str) -> float:
    if not trace.is_private:
        return math.inf
    if name not in ("pld", "auto", "gdp") or trace.selection is not None:
        return account_again(trace, delta, name).epsilon
    rows, size = by_rows(trace, 1)
    coarse = Accountant("pld", functools.partial(bounds_pld, tolerance=_TOLERANCE))
    found = coarse.estimate(rows, delta, size)[0].epsilon
    return found if trace.filter is None else min(found, enforced_epsilon(trace.filter, trace, delta))
