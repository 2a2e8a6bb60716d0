"""Extremes over groups, such as the worst-served group, and gaps and ratios between groups, with intervals and bias.

The lowest of noisy numbers is too low, and a gap between them too large, the more groups there are. Bounds on an
extreme therefore follow from bounds on every group, or on every pair of groups. Let t = min_g t_g, and g* the group
with t_g* = t. Then t >= L_g* >= min_g L_g with a lower bound L_g that is wrong with probability a for each g (g* is
fixed). And t <= min_g U_g if all upper bounds U_g hold at once, each wrong with probability a / G (Bonferroni).

The denominator of a rate is the number of independent units behind it. A true positive rate of 300 examples with three
positives is known as well as a share of three. Rows of one user are no independent examples, so the user is the unit.
Pure numpy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, assert_never

import numpy as np
import numpy.typing as npt

from dpsweep.orchestration.comparison.formats import listed
from dpsweep.orchestration.comparison.intervals import Array, Moments, bounds, deviations, singles
from dpsweep.orchestration.store.published import PublishedTrial, TrialState
from dpsweep.workers.evaluation.outcomes import AnyOutcomes, Outcomes

Mask = npt.NDArray[np.bool_]


def _everybody(found: Outcomes) -> Mask:
    return np.ones(len(found.labels), dtype=bool)


_OF_PREDICTIONS: Final[Mapping[str, Callable[[Outcomes], Mask]]] = {
    "accuracy": _everybody,
    "accuracy_change": _everybody,
    "user_accuracy": _everybody,
    "selection_rate": _everybody,
    "majority_class_rate": _everybody,
    "true_positive_rate": lambda found: found.labels == 1,
    "false_positive_rate": lambda found: found.labels == 0,
    "precision": lambda found: found.predicted == 1,
}
"""The examples in the denominator of a rate, by the name of its metric."""


def units_behind(found: AnyOutcomes, name: str, members: Mask, is_share: bool) -> float:
    """Return the number of units behind a metric of the examples ``members`` [n]; 0 for numbers that are not rates.

    `is_share`: whether the metric has values in [0, 1] or, as a change, in [-1, 1]. The mean of the recalls of K
    classes with n_k examples each varies as a share of K^2 / sum(1 / n_k) examples does.
    """
    if not isinstance(found, Outcomes):
        return _count(found, members) if is_share else 0.0
    if name == "balanced_accuracy":
        sizes = [_count(found, members & (found.labels == label)) for label in np.unique(found.labels[members])]
        return float(len(sizes) ** 2 / sum(1.0 / size for size in sizes)) if sizes else 0.0
    return _count(found, members & _OF_PREDICTIONS[name](found)) if name in _OF_PREDICTIONS else 0.0


def _count(found: AnyOutcomes, members: Mask) -> float:
    return float(members.sum() if found.users is None else len(np.unique(found.users[members])))


ExtremeKind = Literal["lowest", "highest", "gap", "ratio"]
_MOST_PAIRS: Final = 400
"""With more pairs of groups, a difference of gaps follows from the interval of each gap."""
_DRAWS: Final = 2000
_NOISE_SEED: Final = 20


@dataclass(frozen=True)
class Extreme:
    """An extreme over groups of the numbers called ``of``, names of group metrics; of several, the worse extreme.

    `kind`: the lowest or highest value, the gap between these, or the ratio of the lowest to the highest.
    """

    kind: ExtremeKind
    of: tuple[str, ...]

    @property
    def is_between_groups(self) -> bool:
        """Return whether it takes two groups, as a gap does."""
        match self.kind:
            case "lowest" | "highest":
                return False
            case "gap" | "ratio":
                return True
            case _:
                assert_never(self.kind)

    @property
    def is_too_low(self) -> bool:
        """Return whether the extreme of noisy numbers is too low, as the lowest of them; otherwise too high."""
        match self.kind:
            case "lowest" | "ratio":
                return True
            case "highest" | "gap":
                return False
            case _:
                assert_never(self.kind)

    def value(self, cells: Array) -> Array:
        """Return the extreme of cells [..., len(of) * G], metric by metric."""
        parts = cells.reshape(*cells.shape[:-1], len(self.of), -1)
        lowest, highest = parts.min(-1), parts.max(-1)
        match self.kind:
            case "lowest":
                return np.asarray(lowest.min(-1))
            case "highest":
                return np.asarray(highest.max(-1))
            case "gap":
                return np.asarray((highest - lowest).max(-1))
            case "ratio":
                is_defined = highest > 0.0
                return np.asarray(np.where(is_defined, lowest / np.where(is_defined, highest, 1.0), 1.0).min(-1))
            case _:
                assert_never(self.kind)

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


def extreme_bounds(extreme: Extreme, found: Moments, tail: float) -> tuple[float, float]:
    """Return the bounds on the extreme of one setting, each wrong with probability ``tail``."""
    count = len(found.value)
    match extreme.kind:
        case "lowest":
            return float(singles(found, tail)[0].min()), float(singles(found, tail / count)[1].min())
        case "highest":
            return float(singles(found, tail / count)[0].max()), float(singles(found, tail)[1].max())
        case "gap":
            pairs = extreme.pairs(count)
            least = float(bounds(found, pairs, tail / len(pairs))[0].max())
            return max(least, 0.0), float(bounds(found, pairs, tail)[1].max())
        case "ratio":
            low, high = (np.clip(each, 0.0, 1.0).reshape(len(extreme.of), -1) for each in singles(found, tail / count))
            ratios = low.min(-1) / np.maximum(high.max(-1), 1e-300)
            most = np.minimum(high.min(-1) / np.maximum(low.max(-1), 1e-300), 1.0)
            return float(ratios.min()), float(most.min())
        case _:
            assert_never(extreme.kind)


def extreme_difference_bounds(
    extreme: Extreme, pair: Moments, tail: float, alone: Sequence[Moments]
) -> tuple[float, float]:
    """Return the bounds on the extreme of one setting minus that of another, each wrong with probability ``tail``.

    `pair`: moments of both settings; `alone`: of each. With g* the worst group of the first, min_g a_g - min_h b_h is
    at least a_g* - b_h for every h. So it is at least min_g max_h L_gh if for the fixed g* all L_gh hold at once.
    """
    count = len(pair.value) // 2
    match extreme.kind:
        case "lowest":
            low, high = _differences(pair, np.eye(count), tail)
            return float(low.max(1).min()), float(high.min(0).max())
        case "highest":  # with h* the second's group of the highest value, max_g a_g - b_h* >= a_g - b_h* for every g
            low, high = _differences(pair, np.eye(count), tail)
            return float(low.max(0).min()), float(high.min(1).max())
        case "gap" if len(pairs := extreme.pairs(count)) <= _MOST_PAIRS:
            low, high = _differences(pair, pairs, tail)
            return float(low.max(0).min()), float(high.min(1).max())
        case "gap" | "ratio":
            (low_one, high_one), (low_other, high_other) = (extreme_bounds(extreme, each, tail / 2.0) for each in alone)
            return low_one - high_other, high_one - low_other
        case _:
            assert_never(extreme.kind)


def _differences(pair: Moments, weights: Array, tail: float) -> tuple[Array, Array]:
    """Return bounds [n, n] on the numbers p of the first setting minus q of the second, by their ``weights`` [n, G]."""
    size = len(weights)
    both = np.concatenate((np.repeat(weights, size, axis=0), -np.tile(weights, (size, 1))), axis=1)
    low, high = bounds(pair, both, tail / size)
    return low.reshape(size, size), high.reshape(size, size)


def corrected(extreme: Extreme, found: Moments) -> float:
    """Return the extreme of the means without the bias of choosing it among noisy numbers.

    The bias is found by a parametric bootstrap around the estimates of James and Stein: the same noise, around means
    that are as different as the measured ones are beyond noise. The lowest value is at most any mean over groups: the
    mean over all examples limits it, or where values are no shares, the mean by precision.
    """
    noise, value = deviations(found), found.value
    parts = value.reshape(len(extreme.of), -1)
    centre = np.repeat(parts.mean(-1), parts.shape[1])
    apart, expected = np.ones(len(parts)), np.zeros(len(parts))
    if parts.shape[1] > 1:
        apart, expected = parts.var(-1, ddof=1), (noise**2).reshape(parts.shape).mean(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        kept = np.where(apart > 0.0, np.clip(1.0 - expected / apart, 0.0, 1.0), 0.0)
    means = centre + np.repeat(kept, parts.shape[1]) * (value - centre)
    draws = np.random.default_rng(_NOISE_SEED).normal(size=(_DRAWS, len(value)))
    bias = float(extreme.value(means + noise * draws).mean() - extreme.value(means))
    found_value = float(extreme.value(value)) - bias
    units, precision = found.units.reshape(parts.shape), 1.0 / np.maximum(noise, 1e-9).reshape(parts.shape) ** 2
    weights = np.where(units.min(-1, keepdims=True) > 0.0, units, precision)
    limits = (weights * parts).sum(-1) / weights.sum(-1)
    match extreme.kind:
        case "lowest":
            return min(found_value, float(limits.min()))
        case "highest":
            return max(found_value, float(limits.max()))
        case "gap" | "ratio":
            return found_value
        case _:
            assert_never(extreme.kind)


_NAMED: Final = 8
"""Most groups that are named; intersections of several attributes may hide hundreds."""


def hidden_groups_note(trials: Iterable[PublishedTrial]) -> tuple[str, ...]:
    """Return a sentence that names the groups that finished trials do not show, without their sizes; nothing if all are
    shown.

    Data with a single group need no such sentence.
    """
    evaluated = [
        (trial, trial.quality) for trial in trials if trial.state is TrialState.FINISHED and trial.quality is not None
    ]
    hidden = list(dict.fromkeys(name for _, quality in evaluated for name in quality.hidden))
    shown = {group.name for _, quality in evaluated for group in quality.groups}
    bounds = {bound for trial, _ in evaluated if (bound := trial.params.get("spec.min_group_size")) is not None}
    where = " in some trials" if shown.intersection(hidden) else ""
    sentence = groups_not_shown(hidden, len(shown.union(hidden)), sorted(map(str, bounds)), where)
    return (sentence,) if sentence else ()


def groups_not_shown(hidden: Sequence[str], count: int, bounds: Sequence[str], where: str = "") -> str:
    """Return that these of ``count`` groups are not shown, why, and what shows them; "" where none is hidden.

    `bounds`: values of min_group_size.
    """
    if not hidden or count < 2:
        return ""
    named = listed([*hidden[:_NAMED], *([f"{len(hidden) - _NAMED} more"] if len(hidden) > _NAMED else [])])
    least = f" = {listed(bounds)}" if bounds else ""
    verb, they, them = ("is", "It has", "it") if len(hidden) == 1 else ("are", "They have", "them")
    return (
        f"{len(hidden)} of {count} groups {verb} not shown{where}: {named}. {they} fewer than min_group_size{least} "
        f"test examples, or would give another group away; raise test_fraction or lower min_group_size to see {them}."
    )
