"""A trace as rounds of scalar mechanisms that dominate it.

Every sampling in a trace but random allocation reduces, for one example, to the pair N(0, sigma^2) against (1 - q) N(0,
sigma^2) + q N(1, sigma^2), in both directions. That is the sampled Gaussian mechanism with rate q and noise multiplier
sigma. A table in docs/accounting-proofs.md, "From a run to rounds", has the rate and the noise of each sampling.

Used by the accountants that work with a rate and a noise multiplier (Renyi, concentrated, strong composition). The
mixtures of Gaussians that groups need are in `dpsweep.accounting.pld.group_rounds`.

Independent side queries on the same batch are part of the same Gaussian (`Segment.effective_noise_multiplier`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from dpsweep.accounting.errors import UnsupportedMechanism, require_whole
from dpsweep.accounting.mechanism.filters import IndividualFilter
from dpsweep.accounting.mechanism.reductions import as_accounted, cases_of
from dpsweep.accounting.mechanism.samplings import Sampling, draws_by_epoch
from dpsweep.accounting.mechanism.trace import GaussianRelease, PureRelease, Segment, Trace

LARGEST_GROUP = 10**6
"""Largest accepted group size: the law of the number of members in a batch has one entry per member."""


def require_group_size(group_size: int) -> int:
    """Return ``group_size`` as an int, or `InvalidInput` unless it is a whole number from 1 to `LARGEST_GROUP`."""
    return require_whole("group_size", group_size, at_least=1, at_most=LARGEST_GROUP)


class SampledGaussian(NamedTuple):
    """One case of a round: with this ``probability`` it is the sampled Gaussian mechanism (plain at sample_rate 1)."""

    probability: float
    sample_rate: float
    noise_multiplier: float


@dataclass(frozen=True)
class Round:
    """``count`` equal rounds; each is one of ``cases``, by a public draw that does not depend on the data."""

    cases: tuple[SampledGaussian, ...]
    count: int

    @property
    def is_sampled(self) -> bool:
        """Return whether an example may be left out."""
        return any(case.sample_rate < 1.0 for case in self.cases)


def gaussian_rounds(trace: Trace, group_size: int = 1) -> tuple[Round, ...]:
    """Return rounds that dominate the training steps and Gaussian releases of ``trace``, with equal rounds merged.

    For a group of ``group_size`` examples the shift of every unsampled round is multiplied by it. The trace must have
    noise (`Trace.is_private`); callers handle runs without noise first.

    Raises: UnsupportedMechanism for groups in sampled rounds, and for a private selection.
    """
    group_size, trace = require_group_size(group_size), as_accounted(trace, group_size)
    if trace.allocated:
        words = trace.allocated[0].sampling.words
        raise UnsupportedMechanism(
            f"{words} are accounted for by privacy loss distributions alone; use the accountant 'pld'"
        )
    counts: Counter[tuple[tuple[tuple[float, Sampling], ...], float]] = Counter()
    for sampling, segments in groupby(trace.segments, key=lambda segment: segment.sampling):
        cases = cases_of(sampling, group_size)
        for noise_multiplier, count in _round_noise(sampling, segments):
            counts[cases, noise_multiplier] += count
    merged: Counter[tuple[SampledGaussian, ...]] = Counter()
    for (cases, sigma), count in counts.items():
        merged[tuple(SampledGaussian(p, s.sample_rate, sigma / (1 + s.displaced)) for p, s in cases)] += count
    for release in trace.releases:
        if isinstance(release, GaussianRelease):
            merged[(SampledGaussian(1.0, 1.0, release.noise_multiplier),)] += 1
    found = tuple(Round(cases, count) for cases, count in merged.items())
    if group_size == 1:
        return found
    if any(part.is_sampled for part in found):
        raise UnsupportedMechanism(
            f"groups of {group_size} in sampled batches are not a sampled Gaussian mechanism; use the accountant 'pld'"
        )
    return tuple(Round(tuple(_for_group(case, group_size) for case in part.cases), part.count) for part in found)


def _for_group(case: SampledGaussian, group_size: int) -> SampledGaussian:
    return case._replace(noise_multiplier=case.noise_multiplier / group_size)


def pure_epsilons(trace: Trace, group_size: int = 1) -> tuple[float, ...]:
    """Return the epsilon of every pure release for a group of ``group_size`` examples."""
    group_size = require_group_size(group_size)
    releases = as_accounted(trace).releases
    return tuple(group_size * release.epsilon for release in releases if isinstance(release, PureRelease))


def enforced_epsilon(individual: IndividualFilter, trace: Trace, delta: float) -> float:
    """Return the epsilon of every example at ``delta`` by the budget of the filter ``individual`` and the releases of
    ``trace``.

    A guarantee under adding, removing or blanking the example, whatever the run did.
    """
    precision = math.fsum(r.noise_multiplier**-2 for r in trace.releases if isinstance(r, GaussianRelease))
    return individual.epsilon(delta, precision, pure_epsilons(trace))


def _round_noise(sampling: Sampling, segments: Iterable[Segment]) -> Iterator[tuple[float, int]]:
    """(effective noise multiplier, number of rounds) for consecutive segments with one sampling."""
    if draws_by_epoch(sampling):
        return _epoch_noise(segments, sampling.steps_per_epoch)
    return ((segment.effective_noise_multiplier(), segment.steps) for segment in segments)


def _epoch_noise(segments: Iterable[Segment], steps_per_epoch: int) -> Iterator[tuple[float, int]]:
    """(lowest effective noise multiplier of an epoch, number of such epochs); an unfinished last epoch counts.

    Only the first and the last epoch of a segment can share steps with another segment.
    """
    lowest: dict[int, float] = {}
    first_step: int | None = None
    for segment in segments:
        first_step = segment.start_step if first_step is None else first_step
        first = (segment.start_step - first_step) // steps_per_epoch
        last = (segment.stop_step - 1 - first_step) // steps_per_epoch
        sigma = segment.effective_noise_multiplier()
        for epoch in {first, last}:
            lowest[epoch] = min(sigma, lowest.get(epoch, sigma))
        if last - first > 1:
            yield sigma, last - first - 1
    yield from ((sigma, 1) for sigma in lowest.values())
