"""Epsilon of a trace by Google's dp-accounting: an independent implementation, for cross-checks.

dp_accounting ignores the count of some events; only events whose count it honours are produced here. Importing this
module imports dp_accounting, which takes seconds.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from dataclasses import replace

import dp_accounting
import numpy as np
import scipy
from dp_accounting.dp_event import MixtureOfGaussiansDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from dpsweep.accounting.errors import UnsupportedMechanism
from dpsweep.accounting.mechanism.reductions import as_accounted
from dpsweep.accounting.mechanism.rounds import SampledGaussian, gaussian_rounds
from dpsweep.accounting.mechanism.samplings import (
    FixedBatchSampling,
    PoissonSampling,
    TruncatedPoissonSampling,
    draws_by_epoch,
)
from dpsweep.accounting.mechanism.trace import GaussianRelease, Segment, Trace, join_segments
from dpsweep.accounting.pld import epsilon_pld

_RELATIONS = {
    "add_remove": dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "zero_out": dp_accounting.NeighboringRelation.REPLACE_SPECIAL,
}
_NEGLIGIBLE = 1e-18  # probabilities of members in a batch that are dropped
_POINTS = 2e5  # most points of a table of losses
_COARSEST = 0.05  # largest spacing of losses used


def to_event(trace: Trace, group_size: int = 1) -> dp_accounting.DpEvent:
    """Return the event of a private trace: sampled Gaussians for one example, mixtures of Gaussians for groups.

    Raises: UnsupportedMechanism for pure releases, for which dp_accounting has no dominating event.
    """
    trace = as_accounted(trace, group_size)
    released = [release.noise_multiplier for release in trace.releases if isinstance(release, GaussianRelease)]
    if len(released) < len(trace.releases):
        raise UnsupportedMechanism(
            "dp-accounting has no event for an arbitrary pure release; use the accountant 'pld' or 'rdp'"
        )
    sampled = not all(draws_by_epoch(segment.sampling) for segment in trace.segments)
    if group_size == 1 or not sampled:
        cut = [segment for segment in trace.segments if isinstance(segment.sampling, TruncatedPoissonSampling)]
        rest = replace(trace, segments=join_segments(segment for segment in trace.segments if segment not in cut))
        rounds = [_repeated(_sampled(part.cases[0]), part.count) for part in gaussian_rounds(rest, group_size)]
        return dp_accounting.ComposedDpEvent([*rounds, *map(_truncated, cut)])
    releases = [dp_accounting.GaussianDpEvent(sigma / group_size) for sigma in released]
    steps = [_repeated(_group(segment, group_size), segment.steps) for segment in trace.segments]
    return dp_accounting.ComposedDpEvent(steps + releases)


def _repeated(event: dp_accounting.DpEvent, count: int) -> dp_accounting.DpEvent:
    return dp_accounting.SelfComposedDpEvent(event, count)


def _sampled(case: SampledGaussian) -> dp_accounting.DpEvent:
    gaussian = dp_accounting.GaussianDpEvent(case.noise_multiplier)
    return gaussian if case.sample_rate == 1.0 else dp_accounting.PoissonSampledDpEvent(case.sample_rate, gaussian)


def _truncated(segment: Segment) -> dp_accounting.DpEvent:
    """Ganesh (arXiv 2508.15089). It has the data set with the example at hand, where ours has either one."""
    sampling = segment.sampling
    assert isinstance(sampling, TruncatedPoissonSampling)
    sizes = sampling.dataset_size, sampling.sample_rate, sampling.max_batch_size
    event = dp_accounting.TruncatedSubsampledGaussianDpEvent(*sizes, segment.effective_noise_multiplier())
    return _repeated(event, segment.steps)


def _group(segment: Segment, group_size: int) -> dp_accounting.DpEvent:
    members = np.arange(group_size + 1)
    match segment.sampling:
        case PoissonSampling(sample_rate=rate):
            probabilities = scipy.stats.binom.pmf(members, group_size, rate)
        case FixedBatchSampling(dataset_size=size, batch_size=batch):
            probabilities = scipy.stats.hypergeom.pmf(members, size, group_size, batch)
        case _:
            raise UnsupportedMechanism(
                f"dp-accounting has no event for groups in {segment.sampling.words}; use the accountant 'pld'"
            )
    kept = probabilities > _NEGLIGIBLE
    weights = probabilities[kept] / probabilities[kept].sum()
    moved = (1.0 + segment.sampling.displaced) * members[kept]
    return MixtureOfGaussiansDpEvent(segment.effective_noise_multiplier(), moved.tolist(), weights)


def dp_accounting_pld(trace: Trace, delta: float, group_size: int = 1, grid: float | None = None) -> float:
    """Return the epsilon by dp_accounting's PLD accountant, with privacy losses rounded up to multiples of ``grid``.

    grid None is 1e-4, dp_accounting's own, or coarser where that would take too many points. The result is
    an estimate: losses are rounded up, but floating-point errors, which matter at tiny deltas, are not bounded.

    Raises: UnsupportedMechanism for pure releases, for runs that need too coarse a grid, and where no finite epsilon
    is found because the accountant cuts off more probability than delta allows.
    """
    trace = as_accounted(trace, group_size)
    event = to_event(trace, group_size)
    accountant = PLDAccountant(_RELATIONS[trace.adjacency], _grid(trace, group_size) if grid is None else grid)
    with _silently():
        accountant.compose(event)
        epsilon = float(accountant.get_epsilon(delta))
    return _finite(epsilon, "dp-accounting-pld", delta)


def dp_accounting_rdp(trace: Trace, delta: float, group_size: int = 1) -> float:
    """Return the epsilon by dp_accounting's RDP accountant and its own orders: an estimate, as rounding errors are not
    bounded.

    Raises: UnsupportedMechanism for pure releases, for groups in sampled batches, and where rounding makes a
    divergence negative, which dp_accounting would count as no cost.
    """
    trace = as_accounted(trace, group_size)
    accountant = RdpAccountant(neighboring_relation=_RELATIONS[trace.adjacency])
    event = to_event(trace, group_size)
    if not accountant.supports(event):
        raise UnsupportedMechanism(
            f"dp-accounting-rdp covers no groups of {group_size} in sampled batches, and no batches that may be cut; "
            "use the accountant 'pld'"
        )
    with _silently():
        accountant.compose(event)
        if not (np.asarray(accountant.rdp) >= 0.0).all():
            raise UnsupportedMechanism(
                "dp-accounting-rdp loses costs as small as this run's to rounding; use the accountant 'rdp' or 'pld'"
            )
        epsilon = float(accountant.get_epsilon(delta))
    return _finite(epsilon, "dp-accounting-rdp", delta)


@contextlib.contextmanager
def _silently() -> Iterator[None]:
    """Keep numpy and dp_accounting from printing: overflows, and orders that are left out, only raise its bound."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        logger.setLevel(before)


def _grid(trace: Trace, group_size: int) -> float:
    """Return the finest grid, at least dp_accounting's own 1e-4, on which its tables have at most about `_POINTS`
    points.

    A table spans the losses of one round down to probability e^-50, or of the composed run down to 1e-15. The first is
    ten standard deviations of the Gaussian without sampling.
    """
    shifts = [(1.0 + segment.sampling.displaced) / segment.effective_noise_multiplier() for segment in trace.segments]
    shifts += [1.0 / release.noise_multiplier for release in trace.releases if isinstance(release, GaussianRelease)]
    shift = group_size * max(shifts, default=0.0)
    span = shift**2 + 20.0 * shift + 2.0 * epsilon_pld(trace, 1e-15, group_size, tolerance=0.1).upper
    grid = max(1e-4, span / _POINTS)
    if grid > _COARSEST:
        raise UnsupportedMechanism(
            f"dp-accounting-pld would need a grid of {grid:.2g}, but {_COARSEST} is the coarsest used: too little "
            "noise or too large a group; use the accountant 'pld'"
        )
    return grid


def _finite(epsilon: float, accountant: str, delta: float) -> float:
    if not math.isfinite(epsilon):
        raise UnsupportedMechanism(f"{accountant} finds no finite epsilon at delta {delta:g}; use the accountant 'pld'")
    return epsilon
