"""Cost of the first steps of a run, for every epoch, by the accountant that calibrated the run.

A prefix of a run is post-processing of a longer one, so the cost of a longer prefix bounds that of a shorter one. A
slow accountant is therefore asked at some epochs only; each epoch before one of them has its value.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from dpsweep.accounting.accountants.account import account_again
from dpsweep.accounting.accountants.one_run import ACCOUNTANTS, Accountant, Bounds, bounds_pld
from dpsweep.accounting.mechanism.reductions import by_rows
from dpsweep.accounting.mechanism.rounds import enforced_epsilon
from dpsweep.accounting.mechanism.trace import Trace

_TOLERANCE: Final = 4e-3
"""Target for the relative gap of certified bounds: the upper one is within about 0.1 % of the exact epsilon."""
_EACH: Final = 20
"""A run of up to so many epochs has a value of its own for each."""
_MOST: Final = 12
_FEWEST: Final = 4
_AT_ONCE: Final = 30
"""Longer runs, and runs of several segments, are asked at fewer epochs: this number over that of segments, within
`_FEWEST` and `_MOST`. All epochs then take about half a second of CPU (benchmarks/so_far.py)."""
_QUICK: Final = frozenset(("rdp", "rdp-classic", "zcdp", "zcdp-sampled"))
"""Accountants that take a few milliseconds for any run; they are asked at every epoch."""


def cost_so_far(trace: Trace, ends: Sequence[int], step: int, delta: float, accountant: str) -> float:
    """Return the upper bound on epsilon at ``delta`` of the first ``step`` steps of ``trace``, or an estimate where the
    trace's kind is one.

    ends: last steps of the epochs, increasing. accountant: the name in the run's `PrivacyEstimate`; any name that is
    not one of `ACCOUNTANTS`, such as ``filter``, stands for ``rdp``, because the bound of the filter is compared in any
    case. ``gdp`` stands for ``pld``, which is exact for Gaussians too, and whose bound for sampled batches may bear
    that name; so does ``rdp`` where it does not cover the run. Raises: UnsupportedMechanism if nothing covers it.
    """
    name = accountant if accountant in ACCOUNTANTS else "rdp"
    return _cost(trace.until(_asked_at(trace, tuple(ends), step, name)), delta, name)


def _asked_at(trace: Trace, ends: tuple[int, ...], step: int, name: str) -> int:
    """Return the first step from ``step`` on at which the accountant is asked."""
    if name in _QUICK or not ends or step > ends[-1]:
        return step
    longest = _EACH if len(ends) <= _EACH else _MOST
    most = min(longest, max(_FEWEST, _AT_ONCE // max(1, len(trace.segments))))
    asked = ends[::-1][:: -(-len(ends) // most)][::-1]
    return asked[bisect_left(asked, step)]


@functools.lru_cache(maxsize=4096)  # trials that differ only in the seed have the same trace
def _cost(trace: Trace, delta: float, name: str) -> float:
    if not trace.is_private:
        return math.inf
    if name not in ("pld", "auto", "gdp") or trace.selection is not None:
        return account_again(trace, delta, name).epsilon
    rows, size = by_rows(trace, 1)
    found = Accountant("pld", _coarse_bounds).estimate(rows, delta, size)[0].epsilon
    return found if trace.filter is None else min(found, enforced_epsilon(trace.filter, trace, delta))


def _coarse_bounds(trace: Trace, delta: float, group_size: int) -> Bounds:
    return bounds_pld(trace, delta, group_size, _TOLERANCE)
