"""Epsilons by dp-accounting, step by step: an oracle that shares no code with the accountants but the trace's fields.

The rules are written out again: side queries add in quadrature, an example that joins a fixed batch displaces another,
an epoch of shuffled batches is one round at its lowest noise, and groups in sampled batches are mixtures of Gaussians.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import dp_accounting
from dp_accounting.dp_event import MixtureOfGaussiansDpEvent
from dp_accounting.pld import PLDAccountant

from dpsweep.accounting.mechanism.samplings import FixedBatchSampling, PoissonSampling, ShuffledSampling
from dpsweep.accounting.mechanism.trace import GaussianRelease, Segment, Trace

Round = tuple[float, float]
"""Sample rate, and noise over how far an example moves the result."""


def rounds(trace: Trace) -> Counter[Round]:
    """How often each round occurs, for one example."""
    found: Counter[Round] = Counter()
    epochs: dict[int, float] = {}
    for step, segment in _steps(trace):
        moves = 2.0 if isinstance(segment.sampling, FixedBatchSampling) else 1.0
        noise = _noise(segment) / moves
        match segment.sampling:
            case PoissonSampling(sample_rate=rate):
                found[rate, noise] += 1
            case FixedBatchSampling(dataset_size=size, batch_size=batch):
                found[batch / size, noise] += 1
            case ShuffledSampling(steps_per_epoch=length):
                epochs[step // length] = min(noise, epochs.get(step // length, math.inf))
    found.update((1.0, noise) for noise in epochs.values())
    found.update((1.0, r.noise_multiplier) for r in trace.releases if isinstance(r, GaussianRelease))
    return found


def event(trace: Trace) -> dp_accounting.DpEvent:
    """The rounds of one example as an event of dp-accounting."""
    return _composed(
        (gaussian if rate == 1.0 else dp_accounting.PoissonSampledDpEvent(rate, gaussian), count)
        for (rate, noise), count in rounds(trace).items()
        for gaussian in (dp_accounting.GaussianDpEvent(noise),)
    )


def group_event(trace: Trace, size: int) -> dp_accounting.DpEvent:
    """Of a group of ``size`` examples, in Poisson or fixed batches."""
    steps = Counter((segment.sampling, _noise(segment)) for _, segment in _steps(trace))
    members = range(size + 1)
    parts: list[tuple[dp_accounting.DpEvent, int]] = []
    for (sampling, noise), count in steps.items():
        match sampling:
            case PoissonSampling(sample_rate=q):
                moves, law = 1.0, [math.comb(size, j) * q**j * (1.0 - q) ** (size - j) for j in members]
            case FixedBatchSampling(dataset_size=n, batch_size=batch):
                ways = [math.comb(size, j) * math.comb(n - size, batch - j) for j in members]
                moves, law = 2.0, [way / math.comb(n, batch) for way in ways]
            case _:
                raise AssertionError("no mixture for shuffled epochs")
        parts.append((MixtureOfGaussiansDpEvent(noise, [moves * j for j in members], law), count))
    released = [r.noise_multiplier / size for r in trace.releases if isinstance(r, GaussianRelease)]
    return _composed([*parts, *((dp_accounting.GaussianDpEvent(noise), 1) for noise in released)])


def epsilon(trace: Trace, delta: float, group_size: int = 1, grid: float = 1e-4) -> float:
    """By dp-accounting's PLD accountant, with losses rounded up to multiples of ``grid``."""
    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    if trace.adjacency == "zero_out":
        relation = dp_accounting.NeighboringRelation.REPLACE_SPECIAL
    accountant = PLDAccountant(relation, grid)
    accountant.compose(event(trace) if group_size == 1 else group_event(trace, group_size))
    return float(accountant.get_epsilon(delta))


def _steps(trace: Trace) -> Iterator[tuple[int, Segment]]:
    return (
        (step, segment)
        for segment in trace.segments
        for step in range(segment.start_step, segment.start_step + segment.steps)
    )


def _noise(segment: Segment) -> float:
    """Of gradient and side queries together, over a full contribution."""
    precisions = [segment.noise_multiplier**-2, *(query.noise_multiplier**-2 for query in segment.side_queries)]
    return 1.0 / math.sqrt(math.fsum(precisions))


def _composed(
    parts: Iterator[tuple[dp_accounting.DpEvent, int]] | list[tuple[dp_accounting.DpEvent, int]],
) -> dp_accounting.DpEvent:
    return dp_accounting.ComposedDpEvent([dp_accounting.SelfComposedDpEvent(one, count) for one, count in parts])
