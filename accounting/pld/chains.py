"""Groups whose members have no common pair of rounds: from one example to the next, over the curve of a single one.

Members of a group may join different steps of a block of random allocation, or have their turns in different steps.
No pair of distributions on the line is known here to dominate their rounds. But data sets that differ in k examples are
ends of a chain of k neighbours, and the curve delta(epsilon) of one example bounds every link. Proof:
docs/group-proof.md, "Chains".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dpsweep.accounting.errors import require_finite
from dpsweep.accounting.mechanism.correlated import have_common_rounds
from dpsweep.accounting.mechanism.rounds import LARGEST_GROUP, require_group_size
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.accounting.numerics.gaussian import gaussian_epsilon
from dpsweep.accounting.numerics.roots import root
from dpsweep.accounting.numerics.rounding import ROUND_UP
from dpsweep.accounting.pld.ceilings import dominating_mean
from dpsweep.accounting.pld.composition import (
    MIN_DELTA,
    TOLERANCE,
    PairBounds,
    delta_of_rounds,
    epsilon_of_rounds,
    require_pld_delta,
)
from dpsweep.accounting.pld.group_rounds import GroupRounds, rounds_of_group
from dpsweep.accounting.pld.profile import RESOLVED, CertifiedProfile, epsilon_grid, profile_of_rounds
from dpsweep.accounting.pld.sensitivity import Array

_APART = 1e-2
"""Ratio of neighbouring deltas at which the curve of one example is made tight."""
_MOST_AIMS = 10
_LONGER = 3
"""Most times that smaller deltas are tried."""
_FARTHER = 1.2
"""Factor on the epsilon of the group, which says how small the deltas of links become."""
_TESTS = 4000
"""Number of false positive rates at the end of the chain that are tried."""
_LEAST_LOG_RATE = -690.0
_LEAST_START = 1e-300
"""Starts of lines are at least this, so that no product of them with slopes underflows."""
_WIDEST_MEAN = 1e4
_LARGEST_AIM = 0.5
"""Every curve resolves larger deltas, and at 1 there is no epsilon."""


@dataclass(frozen=True)
class Chain:
    """A group of ``links`` examples: each costs ``one``."""

    one: GroupRounds
    links: int

    @property
    def as_gaussian(self) -> GroupRounds:
        """Rounds that dominate the group's: every round of one example as a Gaussian, whose chain is one Gaussian."""
        pure = tuple(self.links * epsilon for epsilon in self.one.pure)
        return GroupRounds(gaussian=self.links * dominating_mean(self.one), pure=pure, is_private=self.one.is_private)


def rounds_or_chain(trace: Trace, group_size: int = 1) -> GroupRounds | Chain:
    """Return the rounds that dominate a trace for any ``group_size`` examples, or else a chain of single examples."""
    group_size = require_group_size(group_size)
    if have_common_rounds(trace, group_size):
        return rounds_of_group(trace, group_size)
    return Chain(rounds_of_group(trace), group_size)


@np.errstate(all="ignore")
def epsilon_of_chain(chain: Chain, delta: float, tolerance: float = TOLERANCE) -> PairBounds:
    """Return the epsilon of a group at ``delta``: an upper bound, and a lower bound on that of one example."""
    delta = require_pld_delta(delta)
    gaussian = epsilon_of_rounds(chain.as_gaussian, delta, tolerance)
    if not chain.one.is_private:
        return gaussian
    alone = epsilon_of_rounds(chain.one, delta, tolerance)
    least = _epsilon_below(_points(chain, alone.upper, delta), delta)
    return min(PairBounds(least, alone.lower), PairBounds(gaussian.upper, alone.lower, "gdp"), key=lambda it: it.upper)


@np.errstate(all="ignore")
def delta_of_chain(chain: Chain, epsilon: float, tolerance: float = TOLERANCE) -> PairBounds:
    """Return the delta of a group at ``epsilon`` >= 0: an upper bound, and a lower bound on that of one example."""
    epsilon = require_finite("epsilon", epsilon, at_least=0.0)
    gaussian = delta_of_rounds(chain.as_gaussian, epsilon, tolerance)
    if not chain.one.is_private:
        return gaussian
    alone = delta_of_rounds(chain.one, epsilon, tolerance)
    share = delta_of_rounds(chain.one, epsilon / chain.links, tolerance).upper
    found = _points(chain, epsilon / chain.links, min(max(share, MIN_DELTA), _LARGEST_AIM))
    return PairBounds(min(1.0, gaussian.upper, _delta_below(found, epsilon)), alone.lower)


@np.errstate(all="ignore")
def profile_of_chain(chain: Chain, deltas: Sequence[float] = ()) -> CertifiedProfile:
    """Return the profile of a group as `profile_of_rounds` does, without lower bounds."""
    gaussian = profile_of_rounds(chain.as_gaussian, deltas)
    if not chain.one.is_private:
        return gaussian
    least = min([RESOLVED, *deltas])
    found = _points(chain, epsilon_of_rounds(chain.one, least).upper, least)
    epsilons = epsilon_grid(min(float(gaussian.epsilons[-1]), _epsilon_below(found, least)))
    before = np.searchsorted(gaussian.epsilons, epsilons, side="right") - 1
    upper = np.minimum(gaussian.worst[before], [_delta_below(found, float(each)) for each in epsilons])
    return CertifiedProfile(epsilons, np.minimum.accumulate([upper, upper], axis=1), None)


class _Points(NamedTuple):
    """Bounds on the group's curve: delta is at most deltas[i] at epsilons[i], which ascend, also from below 0."""

    epsilons: Array
    deltas: Array


def _points(chain: Chain, epsilon: float, delta: float) -> _Points:
    """Return points of the group's curve down to ``delta``, which one example has at about ``epsilon``.

    The curve of one example is made tight at ever smaller deltas, until all links have theirs among them. There are no
    points if these are too small for a lattice.
    """
    end, found = _of_gaussian_group(chain.links, epsilon, delta), _Points(np.array([math.inf]), np.ones(1))
    for _ in range(_LONGER):
        if math.log(delta) - _FARTHER * end <= math.log(MIN_DELTA):
            break
        found = _chained(_lines(profile_of_rounds(chain.one, _aims(end, delta))), chain.links)
        if found.deltas[-1] <= delta and _epsilon_below(found, delta) < end * _FARTHER:
            break
        end *= _FARTHER**2
    return found


def _of_gaussian_group(links: int, epsilon: float, delta: float) -> float:
    """Return the epsilon of the group if one example were a Gaussian mechanism."""

    def excess(mean: float) -> float:
        return gaussian_epsilon(mean, delta)[0] - epsilon

    least = 1e-9
    if not excess(least) < 0.0 < excess(_WIDEST_MEAN):
        return links * epsilon
    return gaussian_epsilon(links * root(excess, least, _WIDEST_MEAN, absolute=least), delta)[0]


def _aims(epsilon: float, delta: float) -> list[float]:
    """Return the deltas near which the curve of one example has to be tight, if the group's epsilon is about
    ``epsilon``.
    """
    first = math.log(delta)
    last = first - _FARTHER * epsilon
    count = min(_MOST_AIMS, 2 + math.ceil((first - last) / -math.log(_APART)))
    return [float(each) for each in np.unique(np.exp(np.linspace(last, first, count)).clip(MIN_DELTA))]


class _Lines(NamedTuple):
    """Lines start + exp(log_slope) * rate, by falling slopes: no ROC curve of one example passes any of them."""

    log_slopes: Array
    starts: Array
    ends: Array
    """Where the next line is lower [lines - 1]."""


def _lines(profile: CertifiedProfile) -> _Lines:
    """Return the lines of a profile that are lowest somewhere.

    Lines are TPR <= delta + e^epsilon FPR. With the hypotheses swapped they are TPR <= 1 - e^-epsilon (1 - delta -
    FPR).
    """
    used = profile.epsilons <= -_LEAST_LOG_RATE
    epsilons, deltas = profile.epsilons[used], profile.worst[used]
    swapped = (1.0 - np.exp(-epsilons) * (1.0 - deltas)) * ROUND_UP
    log_slopes, starts = np.concatenate([epsilons[::-1], -epsilons]), np.concatenate([deltas[::-1], swapped])
    starts = np.maximum(starts, _LEAST_START)
    kept, ends = list[int](), list[float]()
    for line in range(len(starts)):
        end = -math.inf
        while kept:
            last = kept[-1]
            steeper = math.exp(log_slopes[last]) - math.exp(log_slopes[line])
            end = (starts[line] - starts[last]) / steeper if steeper > 0.0 else math.inf
            if end > (ends[-1] if ends else 0.0):
                break
            kept.pop()
            end = ends.pop() if ends else -math.inf
        if not kept:
            kept.append(line)
        elif math.isfinite(end):
            kept.append(line)
            ends.append(end)
    return _Lines(log_slopes[kept], starts[kept], np.asarray(ends))


def _chained(lines: _Lines, links: int) -> _Points:
    """Return the compositions of ``links`` lines that are the lowest on the way of some test.

    A composition of lines is a line, and no ROC curve of the group passes it.
    """
    rates = np.exp(np.linspace(0.0, _LEAST_LOG_RATE, _TESTS))
    slopes, starts, left = np.zeros(len(rates)), np.zeros(len(rates)), np.full(len(rates), links)
    while left.any():
        lowest = np.searchsorted(lines.ends, rates)
        log_slope, start = lines.log_slopes[lowest], lines.starts[lowest]
        times = np.minimum(left, _until(np.append(lines.ends, math.inf)[lowest], log_slope, start, rates))
        times = np.where(rates < 1.0, times, left)
        slope, moved = _repeated(log_slope, start, times)
        rates = np.minimum(moved + slope * rates, 1.0)
        slopes, starts, left = slopes + times * log_slope, moved + slope * starts, left - times
    epsilons, deltas = slopes + np.abs(slopes) * (ROUND_UP - 1.0), starts * ROUND_UP
    order = np.argsort(epsilons, kind="stable")
    return _Points(epsilons[order], np.minimum.accumulate(deltas[order]))


def _until(end: Array, log_slope: Array, start: Array, rates: Array) -> npt.NDArray[np.int64]:
    """Return how many links lead each rate along its line to beyond ``end``, about; no bound rests on it."""
    fixed = start / np.expm1(log_slope)  # less it, rates grow by the slope alone
    links = np.where(log_slope == 0.0, (end - rates) / start, np.log((end + fixed) / (rates + fixed)) / log_slope)
    most = np.clip(-_LEAST_LOG_RATE / np.abs(log_slope), 1.0, LARGEST_GROUP)  # no product of slopes overflows
    whole = np.floor(np.nan_to_num(links, nan=0.0, posinf=LARGEST_GROUP))
    return np.asarray(np.clip(1.0 + whole, 1.0, most), dtype=np.int64)


def _repeated(log_slope: Array, start: Array, times: npt.NDArray[np.int64]) -> tuple[Array, Array]:
    """Return slope and start of the composition of each line with itself, of ``times`` links."""
    grown = times * log_slope
    sums = np.where(log_slope == 0.0, times, np.expm1(grown) / np.expm1(log_slope))
    return np.exp(grown), start * sums


def _epsilon_below(points: _Points, delta: float) -> float:
    """Return the least epsilon >= 0 at which delta is shown to be at most ``delta``; infinity if there is none."""
    after = int(np.argmax(points.deltas <= delta))
    if not points.deltas[after] <= delta:
        return math.inf
    high = max(float(points.epsilons[after]), 0.0)
    low = float(points.epsilons[after - 1]) if after else -math.inf
    if high == 0.0 or not math.isfinite(low):
        return high
    above, below = float(points.deltas[after - 1]), float(points.deltas[after])
    share = (above - delta) / (above - below)  # of e^high - e^low, as delta is convex in e^epsilon
    found = (low + math.log1p(share * math.expm1(high - low))) * ROUND_UP if math.isfinite(above) else high
    return min(max(found, 0.0), high)


def _delta_below(points: _Points, epsilon: float) -> float:
    """Return an upper bound on delta at ``epsilon`` >= 0, by the points around it; 1 where there is none before it."""
    after = int(np.searchsorted(points.epsilons, epsilon, side="right"))
    if after == 0:
        return 1.0
    above, low = float(points.deltas[after - 1]), float(points.epsilons[after - 1])
    if after == len(points.deltas) or not math.isfinite(above):
        return min(above, 1.0)
    below, high = float(points.deltas[after]), float(points.epsilons[after])
    share = math.expm1(epsilon - low) / math.expm1(high - low)  # of e^high - e^low, as delta is convex in e^epsilon
    return min((above + (below - above) * share) * ROUND_UP, above, 1.0)
