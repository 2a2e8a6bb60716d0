"""Trace -> dp-accounting's event and accountant: an independent route to the same numbers.

dp_accounting composes each event with its count; only events whose count it honours are produced here.
"""

from __future__ import annotations

import dp_accounting
import numpy as np
from dp_accounting.dp_event import MixtureOfGaussiansDpEvent
from dp_accounting.pld import PLDAccountant
from scipy.stats import binom, hypergeom

from accounting.errors import UnsupportedMechanism
from accounting.mechanism import GaussianRelease, Segment, Trace
from accounting.rounds import gaussian_rounds
from accounting.samplings import FixedBatchSampling, PoissonSampling

_RELATIONS = {
    "add_remove": dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "zero_out": dp_accounting.NeighboringRelation.REPLACE_SPECIAL,
}
_NEGLIGIBLE = 1e-18


def to_event(trace: Trace, group_size: int = 1) -> dp_accounting.DpEvent:
    """The event of a private trace: sampled Gaussians for one example, mixtures of Gaussians for groups.

    Raises: UnsupportedMechanism for pure releases, for which dp_accounting has no dominating event.
    """
    released = [release.noise_multiplier for release in trace.releases if isinstance(release, GaussianRelease)]
    if len(released) < len(trace.releases):
        raise UnsupportedMechanism("dp-accounting has no event for an arbitrary pure release")
    sampled = any(segment.sampling.draws != "epoch" for segment in trace.segments)
    if group_size == 1 or not sampled:
        parts = gaussian_rounds(trace, group_size)
        return dp_accounting.ComposedDpEvent(
            [_repeated(_sampled(part.sample_rate, part.noise_multiplier), part.count) for part in parts]
        )
    releases = [dp_accounting.GaussianDpEvent(sigma / group_size) for sigma in released]
    steps = [_repeated(_group(segment, group_size), segment.steps) for segment in trace.segments]
    return dp_accounting.ComposedDpEvent(steps + releases)


def _repeated(event: dp_accounting.DpEvent, count: int) -> dp_accounting.DpEvent:
    return dp_accounting.SelfComposedDpEvent(event, count)


def _sampled(sample_rate: float, noise_multiplier: float) -> dp_accounting.DpEvent:
    gaussian = dp_accounting.GaussianDpEvent(noise_multiplier)
    return gaussian if sample_rate == 1.0 else dp_accounting.PoissonSampledDpEvent(sample_rate, gaussian)


def _group(segment: Segment, group_size: int) -> dp_accounting.DpEvent:
    members = np.arange(group_size + 1)
    match segment.sampling:
        case PoissonSampling(sample_rate=rate):
            probabilities = binom.pmf(members, group_size, rate)
        case FixedBatchSampling(dataset_size=size, batch_size=batch):
            probabilities = hypergeom.pmf(members, size, group_size, batch)
        case _:
            raise UnsupportedMechanism("only Poisson and fixed batches have a mixture of Gaussians")
    kept = probabilities > _NEGLIGIBLE
    weights = probabilities[kept] / probabilities[kept].sum()
    moved = (1.0 + segment.sampling.displaced) * members[kept]
    return MixtureOfGaussiansDpEvent(segment.effective_noise_multiplier(), moved.tolist(), weights)


def reference_epsilon_pld(trace: Trace, delta: float, group_size: int = 1, grid: float = 1e-4) -> float:
    """Epsilon by dp_accounting's own PLD accountant, with privacy losses rounded up to multiples of ``grid``."""
    accountant = PLDAccountant(_RELATIONS[trace.adjacency], grid)
    accountant.compose(to_event(trace, group_size))
    return float(accountant.get_epsilon(delta))
