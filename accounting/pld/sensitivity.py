"""Random sensitivities of one round: how far a group of examples may move the noisy sum, with what probability.

A `SensitivityMixture` is the scalar mixture-of-Gaussians mechanism (paper B, Definition 2.8) in units of the noise's
standard deviation: ``Q = N(0, 1)`` without the group, ``P = sum_j p_j N(a_j, 1)`` with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, assert_never

import numpy as np
import numpy.typing as npt

from dpsweep.accounting.errors import InvalidInput, UnsupportedMechanism, require_finite, require_numbers
from dpsweep.accounting.mechanism.rounds import require_group_size
from dpsweep.accounting.mechanism.samplings import Draws, Sampling

Array = npt.NDArray[np.float64]

_MOST_UNITS = 10**8  # largest sum of contributions on a grid, in grid spacings
_NEGLIGIBLE = 1e-290  # probabilities below this are dropped: doubles lose precision there
_SMALL = 1 / 64  # contributions below this share of the largest get a finer grid
_SUMS = 1024  # distinct sums of large and small contributions that are kept
_SUMS_OF_SMALL = 32  # distinct sums of small contributions that are kept for each sum of large ones


@dataclass(frozen=True)
class SensitivityMixture:
    """Sensitivity ``sensitivities[j]`` (in noise standard deviations) with probability ``probabilities[j]``.

    Sensitivities ascend strictly and are at least 0; probabilities are positive and sum to 1 - ``missing``.
    ``missing`` is the probability of larger sensitivities, which were cut off.
    """

    sensitivities: tuple[float, ...]
    probabilities: tuple[float, ...]
    missing: float = 0.0

    def __post_init__(self) -> None:
        for field in ("sensitivities", "probabilities"):
            object.__setattr__(self, field, tuple(require_numbers(field, getattr(self, field), 1).tolist()))
        if not self.sensitivities or len(self.sensitivities) != len(self.probabilities):
            raise InvalidInput(
                f"a mixture has {len(self.sensitivities)} sensitivities and {len(self.probabilities)} probabilities; "
                "give at least one, and equally many of both"
            )
        require_finite("the smallest sensitivity of a mixture", self.sensitivities[0], at_least=0.0)
        require_finite("the largest sensitivity of a mixture", self.sensitivities[-1])
        if not np.all(np.diff(self.sensitivities) > 0):
            raise InvalidInput("the sensitivities of a mixture must ascend strictly; merge equal ones and sort")
        require_finite("the smallest probability of a mixture", min(self.probabilities), above=0.0)
        require_finite("the missing probability of a mixture", self.missing, at_least=0.0, below=1.0)
        total = sum(self.probabilities) + self.missing
        require_finite("the sum of a mixture's probabilities", total, at_least=1 - 1e-9, at_most=1 + 1e-9)

    @property
    def zero_probability(self) -> float:
        """Probability that the round does not depend on the group at all."""
        return self.probabilities[0] if self.sensitivities[0] == 0.0 else 0.0

    @cached_property
    def log_zero_probability(self) -> float:
        """log of `zero_probability`; where that is near 1, by its complement, which alone has all its digits."""
        if not self.zero_probability:
            return -math.inf
        positive = math.fsum((*self.probabilities[1:], self.missing))
        return math.log1p(-positive) if positive < 0.5 else math.log(self.zero_probability)

    @property
    def is_gaussian(self) -> bool:
        """Return whether the round is a plain Gaussian mechanism: one sensitivity, nothing missing."""
        return len(self.sensitivities) == 1 and self.missing == 0.0

    def scaled(self, factor: float) -> SensitivityMixture:
        """Return the mixture with every sensitivity times ``factor``."""
        factor = require_finite("factor", factor, above=0.0)
        return SensitivityMixture(tuple(a * factor for a in self.sensitivities), self.probabilities, self.missing)

    def truncated(self, tail: float) -> SensitivityMixture:
        """Return the mixture without its largest sensitivities, of total probability below ``tail``."""
        kept, dropped = self._split(tail)
        if not dropped:
            return self
        return SensitivityMixture(self.sensitivities[:kept], self.probabilities[:kept], self.missing + dropped)

    def rounded_down(self, tail: float) -> SensitivityMixture:
        """Return a mixture that this one dominates: the probability that `truncated` drops moves to the largest one
        kept.
        """
        kept, dropped = self._split(tail)
        if not dropped + self.missing:
            return self
        probabilities = (*self.probabilities[: kept - 1], self.probabilities[kept - 1] + dropped + self.missing)
        return SensitivityMixture(self.sensitivities[:kept], probabilities)

    def pooled(self, limit: int, bound: Literal["upper", "lower"]) -> SensitivityMixture:
        """Return the mixture with at most ``limit`` + 1 sensitivities: neighbours are merged at their largest or
        smallest.

        With "upper" (largest) the result dominates this mixture; with "lower" (smallest) this mixture dominates it.
        """
        if len(self.sensitivities) <= limit:
            return self
        values = np.asarray(self.sensitivities)
        firsts = _cells(values, limit)
        shared = {"upper": np.append(firsts[1:], len(values)) - 1, "lower": firsts}[bound]
        probabilities = np.add.reduceat(np.asarray(self.probabilities), firsts)
        return SensitivityMixture(tuple(values[shared].tolist()), tuple(probabilities.tolist()), self.missing)

    def _split(self, tail: float) -> tuple[int, float]:
        from_the_top = np.cumsum(self.probabilities[::-1])
        fewest = min(
            1 + (self.sensitivities[0] == 0.0), len(self.probabilities)
        )  # at least one positive sensitivity is kept
        drop = min(int(np.searchsorted(from_the_top, tail)), len(self.probabilities) - fewest)
        return len(self.probabilities) - drop, float(from_the_top[drop - 1]) if drop else 0.0


@dataclass(frozen=True)
class AllocatedRound:
    """A block of ``steps`` steps of random allocation; in the one that an example joins it moves the sum by ``shift``
    noise standard deviations (`dpsweep.accounting.pld.allocation`).
    """

    shift: float
    steps: int


@dataclass(frozen=True)
class RoundLaw:
    """The sensitivity of one round: by a public draw that does not depend on the data, one of several mixtures.

    cases: (probability, mixture); the probabilities sum to 1 - ``dropped``. A round without a draw has one case. The
    loss of the round has the law of the case drawn: the pair reveals the draw, which has the same law on both sides.
    """

    cases: tuple[tuple[float, SensitivityMixture], ...]
    dropped: float = 0.0

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.cases, self.dropped))

    @staticmethod
    def certain(mixture: SensitivityMixture) -> RoundLaw:
        """Return the law of a round that is always ``mixture``."""
        return RoundLaw(((1.0, mixture),))

    @property
    def is_gaussian(self) -> bool:
        """Return whether the round is a plain Gaussian mechanism."""
        return len(self.cases) == 1 and not self.dropped and self.cases[0][1].is_gaussian

    @property
    def largest(self) -> float:
        """The largest sensitivity of any case."""
        return max(mixture.sensitivities[-1] for _, mixture in self.cases)

    @property
    def atoms(self) -> int:
        """The largest number of sensitivities of a case."""
        return max(len(mixture.sensitivities) for _, mixture in self.cases)

    @property
    def missing(self) -> float:
        """The probability that was left out: rare cases, and the largest sensitivities of the others."""
        return self.dropped + math.fsum(probability * mixture.missing for probability, mixture in self.cases)

    def truncated(self, tail: float) -> RoundLaw:
        """Return the law without cases of probability up to ``tail``, and each other case without as much of its
        largest.
        """
        kept, dropped = self._split(tail)
        return RoundLaw(tuple((p, mixture.truncated(tail / p)) for p, mixture in kept), dropped)

    def rounded_down(self, tail: float) -> RoundLaw:
        """Return a law that this one dominates, where missing mass counts as a loss of -infinity."""
        kept, dropped = self._split(tail)
        return RoundLaw(tuple((p, mixture.rounded_down(tail / p)) for p, mixture in kept), dropped)

    def pooled(self, limit: int, bound: Literal["upper", "lower"]) -> RoundLaw:
        """Return the law with every case `SensitivityMixture.pooled`."""
        return RoundLaw(tuple((p, mixture.pooled(limit, bound)) for p, mixture in self.cases), self.dropped)

    def _split(self, tail: float) -> tuple[tuple[tuple[float, SensitivityMixture], ...], float]:
        if len(self.cases) == 1:
            return self.cases, self.dropped
        kept = tuple(case for case in self.cases if case[0] > tail) or (max(self.cases, key=lambda case: case[0]),)
        return kept, self.dropped + math.fsum(case[0] for case in self.cases if case not in kept)


def _cells(values: Array, limit: int) -> npt.NDArray[np.intp]:
    """Start indices of cells of equal width among ascending ``values``; the first value is its own cell.

    The width is the smallest, to a part in 2^40, that gives at most limit + 1 occupied cells.
    """
    span = float(values[-1] - values[0])
    fine, coarse = 0.0, span / limit
    for _ in range(40):
        width = (fine + coarse) / 2 or coarse
        occupied = 1 + int(np.count_nonzero(np.diff(np.ceil((values - values[0]) / width))))
        fine, coarse = (width, coarse) if occupied > limit + 1 else (fine, width)
    changes = np.diff(np.ceil((values - values[0]) / coarse))
    return np.asarray(np.concatenate(([0], np.flatnonzero(changes) + 1)), dtype=np.intp)


def mixture_from_log_weights(
    sensitivities: npt.NDArray[np.floating], log_weights: npt.NDArray[np.floating]
) -> SensitivityMixture:
    """Return the mixture with probabilities proportional to exp(log_weights); both arrays have shape [atoms]."""
    weights = np.exp(log_weights - np.max(log_weights))
    probabilities = weights / weights.sum()
    kept = probabilities > _NEGLIGIBLE
    lost = _NEGLIGIBLE * np.count_nonzero(~kept)
    return SensitivityMixture(tuple(sensitivities[kept].tolist()), tuple(probabilities[kept].tolist()), float(lost))


def group_law(sampling: Sampling, group_size: int) -> SensitivityMixture:
    """Return the law of the number of group members in a round of ``sampling``: the group's sensitivity in clipping
    bounds.

    Binomial for Poisson batches, hypergeometric for fixed ones (paper B, Theorems 3.1 and 3.3, before its factor 2).
    """
    return mixture_from_log_weights(*sampling.members_drawn(require_group_size(group_size)))


def examples_law(sampling: Sampling, contributions: Sequence[float], spacing: float) -> SensitivityMixture:
    """Return the law of the sum of the contributions of the members in a round, each rounded up to a multiple of
    ``spacing``. Where all members are in every round, it is their sum, not rounded.

    Rounding up is stochastic dominance, so the mixture dominates the group's rounds (docs/group-proof.md, Theorem 1,
    and Theorem 2 before its factor 2).
    """
    members = require_numbers("contributions", contributions, 1).tolist()
    for contribution in members:
        require_finite("the contribution of a group member", contribution, at_least=0.0)
    require_group_size(len(members))
    spacing = require_finite("spacing", spacing, above=0.0)
    match sampling.draws:
        case Draws.INDEPENDENT | Draws.SUBSET | Draws.EPOCH if sampling.sample_rate == 1.0:
            return SensitivityMixture((math.fsum(members),), (1.0,))
        case Draws.INDEPENDENT:
            return _independent(members, sampling.sample_rate, spacing)
        case Draws.IN_TURN | Draws.ALLOCATED:
            raise UnsupportedMechanism(f"no law of the members of a group is known in {sampling.words}")
        case Draws.SUBSET | Draws.EPOCH:
            return _subset(members, *sampling.members_drawn(len(members)), spacing)
        case unknown:
            assert_never(unknown)


def _independent(contributions: Sequence[float], sample_rate: float, spacing: float) -> SensitivityMixture:
    """Return the sum of c_j B_j over independent B_j ~ Bernoulli(q), each c_j rounded up to a multiple of ``spacing``.

    Contributions below `_SMALL` times the largest have their own, proportionally finer grid. The sum of both kinds is
    rounded up again if it takes too many values.
    """
    smallest = _SMALL * max(contributions)
    small = [c for c in contributions if 0.0 < c < smallest]
    large = [c for c in contributions if not 0.0 < c < smallest]
    if not small:
        return _poisson_on_grid(contributions, sample_rate, spacing)
    coarse = _poisson_on_grid(large, sample_rate, spacing)
    finer = max(spacing * max(small) / max(large), math.ulp(0.0))
    fine = _independent(small, sample_rate, finer)
    limit = max(_SUMS, len(coarse.sensitivities))
    beside = max(_SUMS_OF_SMALL, limit // len(coarse.sensitivities))
    return _sum(coarse, fine.pooled(beside, "upper"), limit)


def _poisson_on_grid(contributions: Sequence[float], sample_rate: float, spacing: float) -> SensitivityMixture:
    probabilities = np.ones(1)
    for units in _round_up(contributions, spacing):
        moved = np.zeros(len(probabilities) + units)
        moved[: len(probabilities)] += (1.0 - sample_rate) * probabilities
        moved[units:] += sample_rate * probabilities
        probabilities = moved
    return _on_grid(probabilities, spacing)


def _sum(first: SensitivityMixture, second: SensitivityMixture, limit: int) -> SensitivityMixture:
    """Return the law of the sum of two independent sensitivities, rounded up to at most ``limit`` + 1 values."""
    sums = np.add.outer(first.sensitivities, second.sensitivities).ravel()
    order = np.argsort(sums)
    values, weights = sums[order], np.outer(first.probabilities, second.probabilities).ravel()[order]
    firsts = _cells(values, limit) if len(values) > limit else np.flatnonzero(np.diff(values, prepend=-1.0))
    shared = values[np.append(firsts[1:], len(values)) - 1]
    with np.errstate(divide="ignore"):
        return mixture_from_log_weights(shared, np.log(np.add.reduceat(weights, firsts)))


def _subset(contributions: Sequence[float], counts: Array, log_weights: Array, spacing: float) -> SensitivityMixture:
    """Return the sum of c_j over the members drawn, each c_j rounded up to the grid, given the law of their number.
    Entry ``subsets[h, s]`` is the share of the h-subsets of the first members whose contributions sum to s grid units;
    the law is the mixture of its rows in the end.
    """
    units = _round_up(contributions, spacing)
    size = len(units)
    drawn = mixture_from_log_weights(counts, log_weights)
    rows = np.asarray(drawn.sensitivities, dtype=np.int64)
    fewest, most = int(rows[0]), int(rows[-1])
    subsets = np.zeros((most + 1, int(np.sort(units)[size - most :].sum()) + 1))
    subsets[0, 0] = 1.0
    for members, unit in enumerate(units.tolist(), start=1):
        least = max(1, fewest - (size - members))  # no row below leads to one that is drawn
        for row in range(min(members, most), least - 1, -1):
            share = row / members  # a random h-subset of m members holds the last: h / m
            subsets[row] *= 1.0 - share
            subsets[row, unit:] += share * subsets[row - 1, : subsets.shape[1] - unit]
    sums = np.zeros(subsets.shape[1])
    for row, probability in zip(rows, drawn.probabilities, strict=True):
        sums += probability * subsets[row]
    return _on_grid(sums, spacing)


def _round_up(contributions: Sequence[float], spacing: float) -> npt.NDArray[np.int64]:
    values = np.array(contributions)
    with np.errstate(over="ignore"):
        units, total = np.ceil(values / spacing * (1.0 - 1e-15)), values.sum()
    if not units.sum() <= _MOST_UNITS:
        raise InvalidInput(
            f"contributions add up to {total:g}, more than {_MOST_UNITS} times the spacing {spacing:g}; "
            "give a larger spacing"
        )
    return units.astype(np.int64)


def _on_grid(probabilities: Array, spacing: float) -> SensitivityMixture:
    with np.errstate(divide="ignore"):
        return mixture_from_log_weights(np.arange(len(probabilities)) * spacing, np.log(probabilities))
