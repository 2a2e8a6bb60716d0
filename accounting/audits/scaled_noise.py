"""Lower bounds on epsilon from one run, by the noise that its outputs contradict.

The other tests compare guesses with a Gaussian mechanism, whose trade-off function that of sampled batches is not. Here
the alternatives are the stated run itself with other noise: every noise multiplier of its steps divided by one factor,
a power of `RATIO`. A factor is contradicted if so much would be recognised with probability at most the allowed error.
The bound is the epsilon of the largest factor up to which all are contradicted.

Guarantee: if the run is the stated one with its noise divided by a factor f, the result exceeds the epsilon of that run
with probability at most the error. For f = 1: a correct run is accused with probability at most the error. Proof: what
contradicts a factor contradicts every smaller one, because noise that is larger reveals less. The result therefore
exceeds the epsilon of f only if f is contradicted. Where no lower bound on the epsilon of a run is known, as for
shuffled epochs, that of the accountant takes its place. The guarantee is then one about accounted epsilons, as the
claim is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy import special

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.attacks import privacy_curve
from dpsweep.accounting.errors import require_finite
from dpsweep.accounting.mechanism.trace import Trace

Array = NDArray[np.float64]

RATIO: Final = 1.01
"""Ratio of neighbouring factors."""
_LARGEST: Final = 280
"""Largest exponent of a factor, about 16, and of its inverse."""
_STRIDE: Final = 16
"""First step of the search over exponents."""
_RUNS: Final = 2000
"""Simulated runs per factor."""
_DEVIATES: Final = np.linspace(-3.5, 3.5, 29)
"""Normal deviates of the false positive rates at which scores are counted."""
_RATES: Final = np.concatenate([[0.0], special.ndtr(np.linspace(-6.0, 6.0, 2001)), [1.0]])
"""False positive rates at which trade-off functions are evaluated."""


class Uniforms(Protocol):
    """Draws uniform numbers, as `numpy.random.Generator` does."""

    def random(self, size: int, /) -> Array:
        """Return independent numbers [size] in [0, 1]."""


@dataclass(frozen=True)
class StatedRun:
    """The stated run of an audit, at ``delta``.

    `trace`: what a canary may have shown. `least`: the part of it that a canary surely has contributed to in full, by
    which epsilon is computed; of a filter that stops canaries it is a step shorter than ``trace``.
    """

    trace: Trace
    least: Trace
    delta: float

    @property
    def of_canary(self) -> float:
        """Epsilon of a canary: at most the claim, which may count releases besides, or what a filter allows."""
        return _epsilon(self.trace, self.delta)

    def most_found(self, exponent: int) -> Array:
        """Return the largest shares of canaries in that are found at the shares `_RATES` of those out, if the noise is
        divided by RATIO^exponent.
        """
        return _most_found(self.trace, exponent)

    def epsilon(self, exponent: int) -> float:
        """Return the epsilon of the run with its noise divided by RATIO^exponent: the certified lower one, if known,
        else the accounted one.
        """
        found = account(_divided(self.least, exponent), self.delta)
        return found.epsilon if found.lower_epsilon is None else found.lower_epsilon


def _divided(trace: Trace, exponent: int) -> Trace:
    factor = RATIO**exponent
    segments = (replace(each, noise_multiplier=each.noise_multiplier / factor) for each in trace.segments)
    return replace(trace, segments=tuple(segments))


@functools.lru_cache(maxsize=256)
def _epsilon(trace: Trace, delta: float) -> float:
    return account(trace, delta).epsilon


@functools.lru_cache(maxsize=256)
def _most_found(trace: Trace, exponent: int) -> Array:
    return np.maximum.accumulate(privacy_curve(_divided(trace, exponent)).most_found(_RATES))


def ranks_epsilon(inside: Array, outside: Array, run: StatedRun, confidence: float, seed: int) -> float:
    """Return the epsilon that scores of canaries contradict, ranked among scores of canaries that took no part.

    `inside`: [k], scores of canaries that took part. `outside`: [n], of those that did not, or of directions that no
    canary has. `seed`: of the simulation of the test, which uses nothing of the run.

    Assumes that scores are independent, and all of ``outside`` have one distribution. From the noisy sums they do:
    noise is isotropic and directions are orthogonal. Thresholds are order statistics of ``outside``, so that their
    false positive rates are order statistics of uniform numbers, whatever the distribution. A canary that took part is
    above a threshold of rate alpha with probability at most 1 - f(alpha). Here f is the trade-off function of the run
    with a record, as the positives, and without it: the pair of a round dominates in that direction alone, too
    (docs/group-proof.md, Theorem 1). The number of thresholds below each, summed over canaries, is therefore
    stochastically at most that of canaries which attain f at every rate at once. It is simulated: with T of N simulated
    sums at least the observed one, (1 + T) / (1 + N) is the p-value of a Monte Carlo test (Davison and Hinkley 1997,
    Section 4.2), valid for every N.
    """
    error = 1.0 - require_finite("confidence", confidence, above=0.0, below=1.0)
    if min(len(inside), len(outside)) == 0:
        return 0.0
    places = np.unique(np.clip(np.ceil(special.ndtr(_DEVIATES) * (len(outside) + 1)), 1, len(outside))).astype(int)
    thresholds = np.sort(outside)[::-1][places - 1]
    observed = int((inside[:, None] > thresholds).sum())
    generator = np.random.default_rng(seed)
    gaps = generator.standard_gamma(
        np.diff(np.concatenate([[0], places, [len(outside) + 1]])), (_RUNS, len(places) + 1)
    )
    rates = np.cumsum(gaps, axis=1)[:, :-1] / gaps.sum(axis=1, keepdims=True)
    rows = np.arange(_RUNS)[:, None]
    uniform = (np.sort(generator.random((_RUNS, len(inside))), axis=1) + rows).ravel()

    def contradicts(exponent: int) -> bool:
        most = _most_between(run.most_found(exponent), rates)
        found = np.searchsorted(uniform, rows + most) - rows * len(inside)
        return bool((1 + np.sum(found.sum(axis=1) >= observed)) / (1 + _RUNS) <= error)

    return _largest_epsilon(run, contradicts)


def _most_between(found: Array, rates: Array) -> Array:
    """Return upper bounds at ``rates`` in (0, 1) on a concave increasing curve that is ``found`` at `_RATES`.

    Its chord over the interval before, or after, that of a rate lies above the curve where it is prolonged. Neighbours
    of `_RATES` are 0.006 normal deviates apart, and a canary shows about 0.25 at a claim of 1: to take the next of them
    would give 1% away.
    """
    after = np.searchsorted(_RATES, rates)
    slopes = np.concatenate([[math.inf], np.diff(found) / np.diff(_RATES), [0.0]])
    from_before = found[after - 1] + slopes[after - 1] * (rates - _RATES[after - 1])
    from_after = found[after] - slopes[after + 1] * (_RATES[after] - rates)
    return np.asarray(np.minimum(from_before, from_after))


def random_scores(run: StatedRun, included: NDArray[np.bool_], draws: Uniforms) -> Array:
    """Return random scores of canaries; the ``included`` ones show all that the stated run allows.

    A canary that took no part scores above the score of rate alpha with probability alpha. One that did so with
    probability 1 - f(alpha), for the f of `ranks_epsilon`: the best that an attack could do.
    """
    uniform = draws.random(len(included))
    return -np.where(included, np.interp(uniform, run.most_found(0), _RATES), uniform)


def _largest_epsilon(run: StatedRun, contradicts: Callable[[int], bool]) -> float:
    """Return the epsilon of the largest contradicted exponent; 0 if none is."""
    known = functools.cache(contradicts)
    if not run.trace.segments or not run.least.segments:
        return 0.0
    if known(0):
        low, high = 0, _STRIDE
        while high < _LARGEST and known(high):
            low, high = high, min(2 * high, _LARGEST)
    else:
        low, high = -_STRIDE, 0
        while low > -_LARGEST and not known(low):
            low, high = max(2 * low, -_LARGEST), low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if known(middle) else (low, middle)
    if known(high):
        low = high
    if not known(low):
        return 0.0
    epsilon = run.epsilon(low)
    return epsilon if math.isfinite(epsilon) else 0.0
