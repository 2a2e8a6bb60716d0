"""The outputs that may leave the private folder: owner reports and differentially private statistics of epsilons.

Why plain composition suffices (paper A, Section 3.4): epsilon_i is computed from example i and the released iterates
alone. Given the iterates, whose cost is that of training, removing one example or replacing it by a null record changes
its own epsilon and no other. Where norms are taken when examples are sampled, epsilon_i depends on the batches of
example i too. The cost of training holds given the batches of all others, unless an example displaces others
(`Sampling.displaced`): there such statistics are refused. So a sum over examples of a function of epsilon_i bounded by
b has sensitivity b, and its Gaussian release composes with training like one more adaptive step. With
``ReleaseSpec.releases()`` in the planned trace, the trial's target covers this cost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri

from dpsweep.accounting.errors import InvalidInput, count_of, keep_whole, require_finite, require_numbers, require_whole
from dpsweep.accounting.jobs.summaries import CountedEpsilons, Counting, summarise
from dpsweep.accounting.mechanism.estimates import Kind, PrivacyEstimate
from dpsweep.accounting.mechanism.reasons import Reason
from dpsweep.accounting.mechanism.samplings import Adjacency
from dpsweep.accounting.mechanism.trace import GaussianRelease
from dpsweep.accounting.numerics.rounding import release_grid
from dpsweep.accounting.records.epsilon_files import Epsilons
from dpsweep.accounting.records.keystream import KeyedStream

Array = NDArray[np.float64]

_MOST = 10**6
"""Largest accepted number of bins, steps or groups of one release."""


@dataclass(frozen=True)
class ReleaseSpec:
    """The statistics that are released, and their noise: each multiplier is noise std over L2 sensitivity.

    The histogram has ``bins`` equal bins over [0, epsilon_bound]. Each quantile is found in ``quantile_steps`` noisy
    steps (Andrew et al. 2021); ``quantile_noise_multiplier`` is that of one step.
    """

    bins: int = 20
    histogram_noise_multiplier: float = 20.0
    group_count_noise_multiplier: float = 20.0
    group_sum_noise_multiplier: float = 20.0
    quantiles: tuple[float, ...] = ()
    quantile_steps: int = 20
    quantile_noise_multiplier: float = 100.0

    def __post_init__(self) -> None:
        keep_whole(self, "bins", "bins", at_least=1, at_most=_MOST)
        keep_whole(self, "quantile_steps", "quantile_steps", at_least=1, at_most=_MOST)
        quantiles = require_numbers("quantiles", self.quantiles, 1)
        checked = tuple(require_finite("quantile", quantile, above=0.0, below=1.0) for quantile in quantiles)
        object.__setattr__(self, "quantiles", checked)
        require_finite("quantile_noise_multiplier", self.quantile_noise_multiplier, above=0.0)
        self.releases()

    def releases(self) -> tuple[GaussianRelease, ...]:
        """Return the Gaussian releases that `release_statistics` makes, for the planned trace."""
        once = (
            GaussianRelease("histogram of epsilons", self.histogram_noise_multiplier),
            GaussianRelease("examples per group", self.group_count_noise_multiplier),
            GaussianRelease("sum of epsilons per group", self.group_sum_noise_multiplier),
        )
        steps = len(self.quantiles) * self.quantile_steps
        if steps == 0:
            return once
        # Gaussians on the same data compose to one whose precision is the sum of theirs.
        return (*once, GaussianRelease("quantiles of epsilons", self.quantile_noise_multiplier / steps**0.5))


@dataclass(frozen=True)
class GroupStatistics:
    """Released statistics of one group. The standard error comes from the noise, by the delta method."""

    group: int
    examples: float
    mean_epsilon: float
    mean_standard_error: float


@dataclass(frozen=True)
class ReleasedStatistics:
    """The statistics as released, which are public.

    edges has shape [bins + 1]; histogram [bins] holds the noisy count between neighbouring edges. quantiles maps each
    level to its released value.
    """

    edges: tuple[float, ...]
    histogram: tuple[float, ...]
    groups: tuple[GroupStatistics, ...]
    mean_epsilon: float
    quantiles: dict[float, float]


class GaussianDraws(Protocol):
    """A source of independent normal draws, such as `SecretDraws` or, for research, `numpy.random.Generator`."""

    def normal(self, loc: float, scale: float, size: tuple[int, ...]) -> Array:
        """Return draws of mean ``loc`` and standard deviation ``scale``, of shape ``size``."""


class SecretDraws:
    """Draws from a fresh key that is never stored, because the noise of a real release must not be reproducible."""

    def __init__(self) -> None:
        self._stream = KeyedStream.from_os()

    def normal(self, loc: float, scale: float, size: tuple[int, ...]) -> Array:
        """Return the inverse normal CDF at the midpoint of one of 2^52 equal parts of (0, 1), chosen uniformly."""
        words = self._stream.words(math.prod(size)) >> np.uint64(12)
        draws: Array = ndtri((words.astype(np.float64) + 0.5) * 2.0**-52).reshape(size)
        return loc + scale * draws


def release_statistics(
    epsilons: ArrayLike,
    groups: ArrayLike,
    num_groups: int,
    epsilon_bound: float,
    spec: ReleaseSpec,
    generator: GaussianDraws | None = None,
) -> ReleasedStatistics:
    """Return noisy histogram, per-group counts and means, overall mean and quantiles of epsilons [examples].

    Guarantee: that of the composed mechanisms ``spec.releases()``, under adding, removing or blanking one example, if
    ``num_groups`` and ``epsilon_bound`` are public. A valid bound is the worst-case epsilon of the planned trace;
    epsilons above the bound are clipped to it. groups [examples] are labels from 0 to num_groups - 1. generator: a
    seeded one is for research only; None draws from a fresh secret key, and the guarantee then assumes that SHAKE-256
    is not broken (`KeyedStream`).

    Raises: InvalidInput for NaN, for group labels outside [0, num_groups), and for a bound that is not positive.
    """
    epsilon_bound = require_finite("epsilon_bound", epsilon_bound, above=0.0)
    num_groups = require_whole("num_groups", num_groups, at_least=1, at_most=_MOST)
    values = require_numbers("epsilons", epsilons, 1)
    labels = _labels(groups, len(values), num_groups)
    unknown = np.zeros(len(values), np.float32)
    examples = Epsilons(np.arange(len(values)), labels, values, values, unknown, 0.5, "", "estimate")
    summary = summarise(examples, Counting(epsilon_bound, released_bins=spec.bins))
    return release_counted(CountedEpsilons(summary, [examples]), num_groups, spec, generator)


def release_counted(
    counted: CountedEpsilons, num_groups: int, spec: ReleaseSpec, generator: GaussianDraws | None = None
) -> ReleasedStatistics:
    """Return `release_statistics` of a summary, whose bound must be public; its parts are read once per quantile step.

    Raises: InvalidInput for group labels outside [0, num_groups), for a bound that is not positive, and for a summary
    with other bins than ``spec``.
    """
    summary, rng = counted.summary, SecretDraws() if generator is None else generator
    bound = require_finite("epsilon_bound", summary.counting.bound, above=0.0)
    if summary.counting.released_bins != spec.bins:
        raise InvalidInput(
            f"{count_of(summary.counting.released_bins, 'bin was', 'bins were')} counted, not the {spec.bins} to be "
            "released"
        )
    if not all(0 <= label < num_groups for label in summary.groups):
        raise _wrong_groups(num_groups)
    members = [summary.groups.get(group) for group in range(num_groups)]
    exact = [(each.epsilons.count, each.shares) if each else (0, 0.0) for each in members]
    histogram = _noisy(summary.released, spec.histogram_noise_multiplier, rng)
    counts = _noisy(np.array([count for count, _ in exact]), spec.group_count_noise_multiplier, rng)
    sums = _noisy(np.array([share for _, share in exact]), spec.group_sum_noise_multiplier, rng)
    overall, _ = _mean(sums.sum(), counts.sum(), spec)
    quantiles = bound * _release_quantiles(counted, float(counts.sum()), spec, rng)
    return ReleasedStatistics(
        edges=tuple(np.linspace(0.0, bound, spec.bins + 1).tolist()),
        histogram=tuple(histogram.tolist()),
        groups=tuple(
            GroupStatistics(
                group,
                float(counts[group]),
                *(bound * value for value in _mean(sums[group], counts[group], spec)),
            )
            for group in range(num_groups)
        ),
        mean_epsilon=bound * overall,
        quantiles=dict(zip(spec.quantiles, quantiles.tolist(), strict=True)),
    )


@dataclass(frozen=True)
class OwnerReport:
    """Report for the owner of one example, and for nobody else.

    Claim, of strength ``kind``: output-specific individual (epsilon, delta)-DP of that example under ``adjacency``.
    method: the individual method that gave epsilon, or the worst case's accountant where the worst case is lower.
    """

    example_id: int
    epsilon: float
    delta: float
    adjacency: Adjacency
    kind: Kind
    method: str
    worst_case_epsilon: float
    reasons: tuple[Reason, ...] = ()


def owner_report(epsilons: Epsilons, example_id: int, worst_case: PrivacyEstimate) -> OwnerReport:
    """Return epsilon_i for the owner of example i: the lower of its individual epsilon and the worst case, which also
    holds.

    The report has no privacy cost: only the owner sees it, and it depends on other examples only through the released
    iterates (paper A, Section 3.4). The caller must make sure that the reader is the owner.

    Raises: InvalidInput for an unknown example, and for a worst case at another delta.
    """
    if worst_case.delta != epsilons.delta:
        raise InvalidInput(
            f"the epsilons are at delta {epsilons.delta:g}, but the worst case at {worst_case.delta:g}; account again"
        )
    found = np.flatnonzero(epsilons.example_ids == example_id)
    if len(found) != 1:
        raise InvalidInput(
            f"example {example_id} is not in the training data of this trial, whose largest id is "
            f"{epsilons.example_ids.max()}; give the position of a training row in the data, counted from 0: test and "
            "public rows, and those with a missing value, have no epsilon"
        )
    epsilon, delta = float(epsilons.upper[found[0]]), epsilons.delta
    own = PrivacyEstimate(
        epsilon, delta, worst_case.adjacency, epsilons.method, epsilons.kind, reasons=epsilons.reasons
    )
    lowest = min(own, worst_case, key=lambda estimate: estimate.epsilon)
    return OwnerReport(
        example_id,
        lowest.epsilon,
        own.delta,
        own.adjacency,
        lowest.kind,
        lowest.accountant,
        worst_case.epsilon,
        lowest.reasons,
    )


def _labels(groups: ArrayLike, examples: int, num_groups: int) -> NDArray[np.int32]:
    """Group labels [examples] as integers."""
    labels = require_numbers("groups", groups, 1)
    if len(labels) != examples or not ((labels >= 0) & (labels < num_groups) & (labels == np.floor(labels))).all():
        raise _wrong_groups(num_groups)
    return labels.astype(np.int32)


def _wrong_groups(num_groups: int) -> InvalidInput:
    return InvalidInput(f"every example needs a group in [0, {num_groups}); the groups are public configuration")


def _noisy(values: NDArray[Any], noise_multiplier: float, rng: GaussianDraws) -> Array:
    """``values``, of L2 sensitivity 1, plus Gaussian noise, rounded to the public grid."""
    return _on_grid(values + rng.normal(0.0, noise_multiplier, values.shape), noise_multiplier)


def _on_grid(noisy: Array, noise_multiplier: float) -> Array:
    grid = release_grid(noise_multiplier)
    rounded: Array = np.round(noisy / grid) * grid
    return rounded


def _mean(total: float, count: float, spec: ReleaseSpec) -> tuple[float, float]:
    """Return a released sum over a released count, and the standard error of that of one group.

    The count is raised to at least 1 and the mean clipped to [0, 1], which is post-processing.
    """
    count = max(count, 1.0)
    mean = min(max(total / count, 0.0), 1.0)
    error = np.hypot(spec.group_sum_noise_multiplier, mean * spec.group_count_noise_multiplier) / count
    return mean, float(error)


def _release_quantiles(counted: CountedEpsilons, count: float, spec: ReleaseSpec, rng: GaussianDraws) -> Array:
    """Quantiles [levels] of the shares, in [0, 1], by noisy descent on the pinball loss (Andrew et al. 2021, eq. 1).

    Each step releases the number of shares up to each estimate and moves the estimate towards its quantile. The step
    size halves when the direction changes, so that the estimate settles wherever the quantile lies. All levels advance
    together, so that a step reads the shares once; the noise is drawn beforehand, level by level.
    """
    noise_multiplier, levels = spec.quantile_noise_multiplier, np.array(spec.quantiles)
    draws = [[rng.normal(0.0, noise_multiplier, (1,)) for _ in range(spec.quantile_steps)] for _ in spec.quantiles]
    noise = np.array(draws).reshape(len(levels), spec.quantile_steps)
    estimates, sizes, last = np.full(len(levels), 0.5), np.full(len(levels), 0.25), np.zeros(len(levels))
    for step in range(spec.quantile_steps if spec.quantiles else 0):
        below = _on_grid(counted.shares_up_to(estimates) + noise[:, step], noise_multiplier)
        gaps = np.sign(levels - below / max(count, 1.0))
        sizes = np.where(gaps * last < 0.0, sizes / 2.0, sizes)
        estimates, last = np.clip(estimates + sizes * gaps, 0.0, 1.0), gaps
    return estimates
