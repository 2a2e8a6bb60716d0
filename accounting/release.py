"""What may leave the private folder: owner reports and differentially private statistics of the epsilons.

Why these releases are accounted for simply (paper A, Section 3.4). epsilon_i is computed from example i and from the
released iterates alone. Conditioned on the iterates, which the training cost has paid for, replacing one example by a
null record or removing it changes that example's epsilon and no other. So a sum over examples of a bounded function
of epsilon_i has sensitivity one times the bound, and its Gaussian release adds to the cost of training like one more
step of adaptive composition. Putting ``ReleaseSpec.releases()`` into the planned trace pays for it in advance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri

from accounting.errors import InvalidInput, keep_whole, require_finite, require_numbers, require_whole
from accounting.estimates import Kind, PrivacyEstimate
from accounting.keyed import KeyedStream
from accounting.mechanism import GaussianRelease
from accounting.records.shards import Epsilons
from accounting.rounding import release_grid
from accounting.samplings import Adjacency

Array = NDArray[np.float64]

_MOST = 10**6
"""Bins, steps or groups of one release."""


@dataclass(frozen=True)
class ReleaseSpec:
    """Which statistics are released, with how much noise: each multiplier is noise std over L2 sensitivity.

    The histogram has ``bins`` equal bins over [0, epsilon_bound]. quantiles are found by ``quantile_steps`` noisy
    steps each (Andrew et al. 2021), whose multipliers are those of one step.
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
        """The cost of `release_statistics`, for the planned trace."""
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
    """Released about one group; standard errors are those of the noise, by the delta method for the mean."""

    group: int
    examples: float
    examples_standard_error: float
    mean_epsilon: float
    mean_standard_error: float


@dataclass(frozen=True)
class ReleasedStatistics:
    """Public once released. histogram has one noisy count per bin between neighbouring edges."""

    edges: tuple[float, ...]
    histogram: tuple[float, ...]
    histogram_standard_error: float
    groups: tuple[GroupStatistics, ...]
    mean_epsilon: float
    mean_standard_error: float
    quantiles: dict[float, float]


class GaussianDraws(Protocol):
    """Independent normal draws; `numpy.random.Generator` is one, for research."""

    def normal(self, loc: float, scale: float, size: tuple[int, ...]) -> Array: ...


class SecretDraws:
    """From a key of the operating system that nobody keeps: the noise of a real release must not be reproducible."""

    def __init__(self) -> None:
        self._stream = KeyedStream.from_os()

    def normal(self, loc: float, scale: float, size: tuple[int, ...]) -> Array:
        """By the inverse of the distribution function, at the middles of 2^52 equal parts of (0, 1)."""
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
    """Noisy histogram, per-group counts and means, overall mean and quantiles of epsilons [examples].

    Guarantee: the mechanisms of ``spec.releases()``, composed, under adding, removing or blanking one example. That
    needs ``num_groups`` and ``epsilon_bound`` to be public; the worst-case epsilon of the planned trace is a bound.
    Values above it are counted as the bound. generator: seeded in research; None draws
    from a fresh secret key, and then the guarantee is against those who cannot break SHAKE-256 (`KeyedStream`).

    Raises: InvalidInput for NaN, for group labels outside [0, num_groups), and for a bound that is not positive.
    """
    epsilon_bound = require_finite("epsilon_bound", epsilon_bound, above=0.0)
    num_groups = require_whole("num_groups", num_groups, at_least=1, at_most=_MOST)
    shares = _shares(epsilons, epsilon_bound)
    groups = _labels(groups, len(shares), num_groups)
    rng = SecretDraws() if generator is None else generator
    bins = np.minimum((shares * spec.bins).astype(np.int64), spec.bins - 1)
    histogram = _noisy(np.bincount(bins, minlength=spec.bins), spec.histogram_noise_multiplier, rng)
    counts = _noisy(np.bincount(groups, minlength=num_groups), spec.group_count_noise_multiplier, rng)
    sums = _noisy(np.bincount(groups, shares, num_groups), spec.group_sum_noise_multiplier, rng)
    overall = _mean(sums.sum(), counts.sum(), num_groups**0.5, spec)
    return ReleasedStatistics(
        edges=tuple(np.linspace(0.0, epsilon_bound, spec.bins + 1).tolist()),
        histogram=tuple(histogram.tolist()),
        histogram_standard_error=spec.histogram_noise_multiplier,
        groups=tuple(
            GroupStatistics(
                group,
                float(counts[group]),
                spec.group_count_noise_multiplier,
                *(epsilon_bound * value for value in _mean(sums[group], counts[group], 1.0, spec)),
            )
            for group in range(num_groups)
        ),
        mean_epsilon=epsilon_bound * overall[0],
        mean_standard_error=epsilon_bound * overall[1],
        quantiles={
            quantile: epsilon_bound * _release_quantile(shares, quantile, float(counts.sum()), spec, rng)
            for quantile in spec.quantiles
        },
    )


@dataclass(frozen=True)
class OwnerReport:
    """What the owner of one example, and nobody else, may be told.

    Claim, of strength ``kind``: output-specific individual (epsilon, delta)-DP of that example under ``adjacency``.
    method: the individual accounting that gave it, or the accountant of the worst case where that is lower.
    """

    example_id: int
    epsilon: float
    delta: float
    adjacency: Adjacency
    kind: Kind
    method: str
    worst_case_epsilon: float


def owner_report(epsilons: Epsilons, example_id: int, worst_case: PrivacyEstimate) -> OwnerReport:
    """epsilon_i for the owner of example i: the lower of its own and the worst case, which holds for it, too.

    It costs nobody privacy: only the owner sees it, and it says nothing of other examples beyond the released
    iterates (paper A, Section 3.4). The caller must know that it speaks to the owner.

    Raises: InvalidInput for an unknown example, and for a worst case at another delta.
    """
    if worst_case.delta != epsilons.delta:
        raise InvalidInput(
            f"the epsilons are at delta {epsilons.delta:g}, but the worst case at {worst_case.delta:g}; account again"
        )
    found = np.flatnonzero(epsilons.example_ids == example_id)
    if len(found) != 1:
        raise InvalidInput(f"example {example_id} is not in the training data of this trial")
    own = PrivacyEstimate(
        float(epsilons.upper[found[0]]), epsilons.delta, worst_case.adjacency, epsilons.method, epsilons.kind
    )
    lowest = min(own, worst_case, key=lambda estimate: estimate.epsilon)
    return OwnerReport(
        example_id, lowest.epsilon, own.delta, own.adjacency, lowest.kind, lowest.accountant, worst_case.epsilon
    )


def _shares(epsilons: ArrayLike, bound: float) -> Array:
    """epsilons [examples] over their bound, at most 1."""
    values = require_numbers("epsilons", epsilons, 1)
    if not (values >= 0.0).all():
        raise InvalidInput("an epsilon is negative or NaN; account for the trial again")
    return np.asarray(np.minimum(values, bound) / bound)


def _labels(groups: ArrayLike, examples: int, num_groups: int) -> NDArray[np.int64]:
    """Group labels [examples] as integers."""
    labels = require_numbers("groups", groups, 1)
    if len(labels) != examples or not ((labels >= 0) & (labels < num_groups) & (labels == np.floor(labels))).all():
        raise InvalidInput(f"every example needs a group in [0, {num_groups}); the groups are public configuration")
    return labels.astype(np.int64)


def _noisy(values: NDArray[Any], noise_multiplier: float, rng: GaussianDraws) -> Array:
    """values of sensitivity 1 plus Gaussian noise, on the public grid."""
    grid = release_grid(noise_multiplier)
    noisy: Array = np.round((values + rng.normal(0.0, noise_multiplier, values.shape)) / grid) * grid
    return noisy


def _mean(total: float, count: float, width: float, spec: ReleaseSpec) -> tuple[float, float]:
    """A released sum over a released count, and its standard error; width scales the noise of both.

    The count is taken to be at least one, and the mean in [0, 1]: post-processing, free of cost.
    """
    count = max(count, 1.0)
    mean = min(max(total / count, 0.0), 1.0)
    error = np.hypot(spec.group_sum_noise_multiplier, mean * spec.group_count_noise_multiplier) * width / count
    return mean, float(error)


def _release_quantile(shares: Array, quantile: float, count: float, spec: ReleaseSpec, rng: GaussianDraws) -> float:
    """A quantile of shares [examples] in [0, 1] by noisy descent on the pinball loss (Andrew et al. 2021, eq. 1).

    Each step releases the number of shares below the estimate and moves the estimate against the gap. The step halves
    when the gap changes sign, so that ``quantile_steps`` steps settle wherever the quantile lies.
    """
    estimate, step, last = 0.5, 0.25, 0.0
    for _ in range(spec.quantile_steps):
        below = _noisy((shares <= estimate).sum(keepdims=True), spec.quantile_noise_multiplier, rng)
        gap = np.sign(quantile - float(below[0]) / max(count, 1.0))
        step = step / 2.0 if gap * last < 0.0 else step
        estimate, last = float(np.clip(estimate + step * gap, 0.0, 1.0)), gap
    return estimate
