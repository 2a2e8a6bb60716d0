"""Rates of predictions by group, and gaps between groups, from confusion matrices. Pure numpy.

``counts``: [..., K, K], number of examples by label (rows) and predicted class (columns), K classes. Class 1 is the
positive one. A rate with denominator 0 is NaN. Leading axes are free, so that many groups, or many resamples, are
computed at once. Definitions agree with scikit-learn and fairlearn, except that these define some such rates as 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Final

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, NonNegativeInt

from dpsweep.workers.tasks import share

Array = npt.NDArray[np.float64]
Rate = Callable[[Array], Array]
CALIBRATION_BINS: Final = 15
"""Number of equal bins of confidence in `calibration_error` (Guo et al. 2017)."""


def _square(rows: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Return the rows of a stored matrix. Raises: ValueError unless it is square, empty rows apart."""
    if not rows or {len(row) for row in rows} - {0, len(rows)}:
        raise ValueError("rows of a confusion matrix are as many as its columns")
    return rows


@dataclass(frozen=True)
class ConfusionCounts:
    """Aggregates of some test examples from which rates are computed; holds no value of a single example.

    confusion: for each label the number of examples by predicted class; () for a label without examples. log_loss:
    mean -ln p(label) in nats. calibration_error: value of the function `calibration_error`.
    """

    confusion: Annotated[tuple[tuple[NonNegativeInt, ...], ...], AfterValidator(_square)]
    log_loss: float
    calibration_error: float

    @property
    def matrix(self) -> Array:
        """The confusion matrix [K, K]."""
        size = len(self.confusion)
        return np.array([row or (0,) * size for row in self.confusion], dtype=np.float64)


def confusion_counts(
    labels: npt.NDArray[np.int64],
    predicted: npt.NDArray[np.int64],
    groups: npt.NDArray[np.int64],
    shape: tuple[int, int],
) -> npt.NDArray[np.int64]:
    """Return counts [G, K, K] by group, label and predicted class. shape: (G, K).

    >>> confusion_counts(np.array([0, 1, 1]), np.array([0, 1, 0]), np.array([0, 0, 0]), (1, 2)).tolist()
    [[[1, 0], [1, 1]]]
    """
    size, classes = shape
    cells = confusion_cells(labels, predicted, groups, classes)
    return np.bincount(cells, minlength=size * classes * classes).reshape(size, classes, classes)


def confusion_cells(
    labels: npt.NDArray[np.int64], predicted: npt.NDArray[np.int64], groups: npt.NDArray[np.int64], classes: int
) -> npt.NDArray[np.int64]:
    """Return [n]: index of each example's cell in the flattened `confusion_counts`."""
    return np.asarray((groups * classes + labels) * classes + predicted)


def shares_of_users(users: npt.NDArray[np.int64], groups: npt.NDArray[np.int64]) -> Array:
    """Return [n]: one over the number of rows that the owner of each example has in the example's group.

    Sums with these weights count everybody once in each group, however many rows they have.

    >>> shares_of_users(np.array([7, 7, 7, 8]), np.array([0, 0, 1, 0])).tolist()
    [0.5, 0.5, 1.0, 1.0]
    """
    _, places = np.unique(users, return_inverse=True)
    _, own, rows = np.unique(places * (groups.max() + 1) + groups, return_inverse=True, return_counts=True)
    return np.asarray(1.0 / rows[own])


def accuracy(counts: Array) -> Array:
    """Return the share of examples whose predicted class is their label."""
    return share(np.trace(counts, axis1=-2, axis2=-1), counts.sum((-2, -1)))


def recalls(counts: Array) -> Array:
    """Return [..., K]: recall of each class, the share of its examples that is predicted as this class."""
    return share(np.diagonal(counts, axis1=-2, axis2=-1), counts.sum(-1))


def balanced_accuracy(counts: Array) -> Array:
    """Return the mean of `recalls` over the classes that have examples."""
    found = recalls(counts)
    return share(np.nansum(found, axis=-1), np.isfinite(found).sum(-1))


def true_positive_rate(counts: Array) -> Array:
    """Return the share of the examples of class 1 that are predicted as class 1."""
    return share(counts[..., 1, 1], counts[..., 1, :].sum(-1))


def false_positive_rate(counts: Array) -> Array:
    """Return the share of the examples of class 0 that are predicted as class 1."""
    return share(counts[..., 0, 1], counts[..., 0, :].sum(-1))


def precision(counts: Array) -> Array:
    """Return the share of the examples predicted as class 1 that are of class 1."""
    return share(counts[..., 1, 1], counts[..., :, 1].sum(-1))


def selection_rate(counts: Array) -> Array:
    """Return the share of examples predicted as class 1."""
    return share(counts[..., :, 1].sum(-1), counts.sum((-2, -1)))


OF_ALL_TASKS: Final[Mapping[str, Rate]] = {"accuracy": accuracy, "balanced_accuracy": balanced_accuracy}
OF_TWO_CLASSES: Final[Mapping[str, Rate]] = {
    "true_positive_rate": true_positive_rate,
    "false_positive_rate": false_positive_rate,
    "precision": precision,
    "selection_rate": selection_rate,
}


def rates(counts: Array) -> dict[str, Array]:
    """Return every rate that the number of classes allows, by name, each [...]."""
    defined = {**OF_ALL_TASKS, **(OF_TWO_CLASSES if counts.shape[-1] == 2 else {})}
    return {name: rate(counts) for name, rate in defined.items()}


def lowest(values: Array) -> Array:
    """Return [..., G] -> [...]: smallest value over groups, ignoring NaN; NaN if all are."""
    return np.asarray(np.fmin.reduce(values, axis=-1))


def highest(values: Array) -> Array:
    """Return [..., G] -> [...]: largest value over groups, ignoring NaN; NaN if all are."""
    return np.asarray(np.fmax.reduce(values, axis=-1))


def gap(values: Array) -> Array:
    """Return [..., G] -> [...]: largest minus smallest value over groups; NaN if fewer than two groups have a value."""
    return _of_several(values, highest(values) - lowest(values))


def ratio(values: Array) -> Array:
    """Return [..., G] -> [...]: smallest divided by largest value over groups; NaN as in `gap`, and if the largest is
    0.
    """
    return _of_several(values, share(lowest(values), highest(values)))


def _of_several(values: Array, found: Array) -> Array:
    """``found`` where at least two of the values [..., G] are known, else NaN: one group alone is equal to itself."""
    return np.where((~np.isnan(values)).sum(-1) > 1, found, np.nan)


def _equalized_odds(between: Rate, worse: Rate) -> Rate:
    def measure(counts: Array) -> Array:
        found = between(true_positive_rate(counts)), between(false_positive_rate(counts))
        return worse(np.stack(found, axis=-1))

    return measure


GAPS: Final[Mapping[str, Rate]] = {
    "accuracy_gap": lambda counts: gap(accuracy(counts)),
    "worst_group_accuracy": lambda counts: lowest(accuracy(counts)),
    "worst_group_balanced_accuracy": lambda counts: lowest(balanced_accuracy(counts)),
}
"""Measures of differences between groups, by name: counts [..., G, K, K] -> [...]."""
PARITY: Final[Mapping[str, Rate]] = {
    "demographic_parity_difference": lambda counts: gap(selection_rate(counts)),
    "demographic_parity_ratio": lambda counts: ratio(selection_rate(counts)),
    "equalized_odds_difference": _equalized_odds(gap, highest),
    "equalized_odds_ratio": _equalized_odds(ratio, lowest),
    "equal_opportunity_difference": lambda counts: gap(true_positive_rate(counts)),
    "equal_opportunity_ratio": lambda counts: ratio(true_positive_rate(counts)),
    "false_positive_rate_difference": lambda counts: gap(false_positive_rate(counts)),
    "worst_group_true_positive_rate": lambda counts: lowest(true_positive_rate(counts)),
}
"""Further measures, for two classes and groups that are not the classes."""


def gaps(counts: Array, is_two_class: bool) -> dict[str, Array]:
    """Return every gap by name, each [...], from counts [..., G, K, K]. is_two_class: whether to include `PARITY`."""
    return {name: measure(counts) for name, measure in {**GAPS, **(PARITY if is_two_class else {})}.items()}


def calibration_error(
    confidence: Array, correct: npt.NDArray[np.bool_], groups: npt.NDArray[np.int64], size: int
) -> Array:
    """Return [G]: expected calibration error of each of ``size`` groups, |accuracy - confidence| averaged over equal
    bins.

    confidence: probability of the predicted class, [n]; correct, groups: [n]. NaN for a group without examples, and
    for a group with a NaN probability.
    """
    cells = groups * CALIBRATION_BINS + calibration_bins(confidence)
    off = np.bincount(cells, confidence - correct, size * CALIBRATION_BINS).reshape(size, CALIBRATION_BINS)
    return share(np.abs(off).sum(1), np.bincount(groups, minlength=size).astype(np.float64))


def calibration_bins(confidence: Array) -> npt.NDArray[np.int64]:
    """Return [n]: bin of each confidence; the first bin for NaN."""
    return np.clip(np.nan_to_num(confidence) * CALIBRATION_BINS, 0, CALIBRATION_BINS - 1).astype(np.int64)


def mean_by_group(values: Array, groups: npt.NDArray[np.int64], size: int) -> Array:
    """Return [G]: mean of the values [n] of each of ``size`` groups."""
    return share(np.bincount(groups, values, size), np.bincount(groups, minlength=size).astype(np.float64))
