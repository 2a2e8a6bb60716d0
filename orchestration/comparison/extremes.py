"""Extremes over groups: the worst-served group, gaps and ratios between groups, with intervals and bias. Pure numpy.

The lowest of noisy numbers is too low, and a gap between them too large, the more groups there are. Bounds on an
extreme therefore follow from bounds on every group, or on every pair of groups. Let t = min_g t_g, and g* the group
with t_g* = t. Then t >= L_g* >= min_g L_g with a lower bound L_g that is wrong with probability a for each g (g* is
fixed). And t <= min_g U_g if all upper bounds U_g hold at once, each wrong with probability a / G (Bonferroni).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from dpsweep.orchestration.comparison.intervals import Array, Moments, bounds, deviations, singles

Kind = Literal["lowest", "highest", "gap", "ratio"]
_MOST_PAIRS: Final = 400
"""With more pairs of groups, a difference of gaps follows from the interval of each gap."""
_DRAWS: Final = 2000
_NOISE_SEED: Final = 20


@dataclass(frozen=True)
class Extreme:
    """An extreme over groups of the numbers called ``of``, names of group metrics; of several, the worse extreme.

    `kind`: the lowest or highest value, the gap between these, or the ratio of the lowest to the highest.
    """

    kind: Kind
    of: tuple[str, ...]

    @property
    def is_between_groups(self) -> bool:
        """Return whether it takes two groups, as a gap does."""
        return self.kind in ("gap", "ratio")

    def value(self, cells: Array) -> Array:
        """Return the extreme of cells [..., len(of) * G], metric by metric."""
        parts = cells.reshape(*cells.shape[:-1], len(self.of), -1)
        lowest, highest = parts.min(-1), parts.max(-1)
        return _OF_PARTS[self.kind](lowest, highest)

    def pairs(self, cells: int) -> Array:
        """Return [P, cells]: the differences of two groups in one metric."""
        groups = cells // len(self.of)
        unit = np.eye(cells)
        rows = [
            unit[part * groups + one] - unit[part * groups + other]
            for part in range(len(self.of))
            for one, other in itertools.permutations(range(groups), 2)
        ]
        return np.array(rows).reshape(-1, cells)


_OF_PARTS: Final[Mapping[Kind, Callable[[Array, Array], Array]]] = {
    "lowest": lambda lowest, highest: lowest.min(-1),
    "highest": lambda lowest, highest: highest.max(-1),
    "gap": lambda lowest, highest: (highest - lowest).max(-1),
    "ratio": lambda lowest, highest: np.where(highest > 0.0, lowest / np.where(highest > 0.0, highest, 1.0), 1.0).min(
        -1
    ),
}


def extreme_bounds(extreme: Extreme, found: Moments, tail: float) -> tuple[float, float]:
    """Return the bounds on the extreme of one setting, each wrong with probability ``tail``."""
    count = len(found.value)
    if extreme.kind in ("lowest", "highest"):
        (low, high), (all_low, all_high) = singles(found, tail), singles(found, tail / count)
        if extreme.kind == "lowest":
            return float(low.min()), float(all_high.min())
        return float(all_low.max()), float(high.max())
    if extreme.kind == "gap":
        pairs = extreme.pairs(count)
        return max(float(bounds(found, pairs, tail / len(pairs))[0].max()), 0.0), float(
            bounds(found, pairs, tail)[1].max()
        )
    all_low, all_high = (np.clip(each, 0.0, 1.0) for each in singles(found, tail / count))
    parts = [each.reshape(len(extreme.of), -1) for each in (all_low, all_high)]
    least = parts[0].min(-1) / np.maximum(parts[1].max(-1), 1e-300)
    most = np.minimum(parts[1].min(-1) / np.maximum(parts[0].max(-1), 1e-300), 1.0)
    return float(least.min()), float(most.min())


def extreme_difference_bounds(
    extreme: Extreme, pair: Moments, tail: float, alone: Sequence[Moments]
) -> tuple[float, float]:
    """Return the bounds on the extreme of one setting minus that of another, each wrong with probability ``tail``.

    `pair`: moments of both settings; `alone`: of each. With g* the worst group of the first, min_g a_g - min_h b_h is
    at least a_g* - b_h for every h. So it is at least min_g max_h L_gh if for the fixed g* all L_gh hold at once.
    """
    count = len(pair.value) // 2
    if extreme.kind in ("lowest", "highest"):
        return _of_lowest(pair, tail, count) if extreme.kind == "lowest" else _of_highest(pair, tail, count)
    pairs = extreme.pairs(count)
    if extreme.kind == "gap" and len(pairs) <= _MOST_PAIRS:
        size = len(pairs)
        one = np.repeat(pairs, size, axis=0)  # pair of groups p of the first and q of the second, at p * size + q
        other = np.tile(pairs, (size, 1))
        low, high = bounds(pair, np.concatenate((one, -other), axis=1), tail / size)
        return float(low.reshape(size, size).max(0).min()), float(high.reshape(size, size).min(1).max())
    (low_one, high_one), (low_other, high_other) = (extreme_bounds(extreme, each, tail / 2.0) for each in alone)
    return low_one - high_other, high_one - low_other


def _of_lowest(pair: Moments, tail: float, count: int) -> tuple[float, float]:
    unit = np.eye(count)
    weights = np.concatenate((np.repeat(unit, count, axis=0), -np.tile(unit, (count, 1))), axis=1)
    low, high = (each.reshape(count, count) for each in bounds(pair, weights, tail / count))
    return float(low.max(1).min()), float(high.min(0).max())


def _of_highest(pair: Moments, tail: float, count: int) -> tuple[float, float]:
    """With h* the group of the second with its highest value, max_g a_g - b_h* >= a_g - b_h* for every g."""
    unit = np.eye(count)
    weights = np.concatenate((np.repeat(unit, count, axis=0), -np.tile(unit, (count, 1))), axis=1)
    low, high = (each.reshape(count, count) for each in bounds(pair, weights, tail / count))
    return float(low.max(0).min()), float(high.min(1).max())


def corrected(extreme: Extreme, found: Moments) -> float:
    """Return the extreme of the means without the bias of choosing it among noisy numbers.

    The bias is found by a parametric bootstrap around the estimates of James and Stein: the same noise, around means
    that are as different as the measured ones are beyond noise. The lowest value is at most any mean over groups; the
    mean by precision limits it.
    """
    noise, value = deviations(found), found.value
    parts = value.reshape(len(extreme.of), -1)
    centre = np.repeat(parts.mean(-1), parts.shape[1])
    apart, expected = (
        (parts.var(-1, ddof=1), (noise**2).reshape(parts.shape).mean(-1))
        if parts.shape[1] > 1
        else (
            np.ones(len(parts)),
            np.zeros(len(parts)),
        )
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        kept = np.where(apart > 0.0, np.clip(1.0 - expected / apart, 0.0, 1.0), 0.0)
    means = centre + np.repeat(kept, parts.shape[1]) * (value - centre)
    draws = np.random.default_rng(_NOISE_SEED).normal(size=(_DRAWS, len(value)))
    bias = float(extreme.value(means + noise * draws).mean() - extreme.value(means))
    found_value = float(extreme.value(value)) - bias
    weights = 1.0 / np.maximum(noise, 1e-9).reshape(parts.shape) ** 2
    limits = (weights * parts).sum(-1) / weights.sum(-1)
    if extreme.kind == "lowest":
        return min(found_value, float(limits.min()))
    return max(found_value, float(limits.max())) if extreme.kind == "highest" else found_value
