"""The number of independent units behind a rate: test examples, or users, in its denominator. Pure numpy.

A true positive rate of 300 examples with three positives is known as well as a share of three. Rows of one user are no
independent examples, so the user is the unit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

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
