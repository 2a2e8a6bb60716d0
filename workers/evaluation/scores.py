"""Evaluations of models as data, loss, accuracy or scores, and fairness, overall and by group;
`dpsweep.workers.evaluation.predictions` computes them. Imports no torch, because commands that compare trials read
evaluations only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, FiniteFloat, PositiveInt

from dpsweep.workers.evaluation.rates import ConfusionCounts, gaps
from dpsweep.workers.tasks import main_score, task_called

MIN_GROUP_SIZE = 10
"""Smallest number of test examples for which a group is shown: measures of two people nearly reveal each one's."""


@dataclass(frozen=True)
class GroupEvaluation:
    """Number of examples of one group in the split, and their mean loss, with accuracy or scores.

    loss: of examples with a label that is counted; NaN without any.
    accuracy: for classification; None for other tasks.
    scores: for other tasks, the defined `Task.scores` by name.
    counts: None for an evaluation after an epoch, and for tasks other than classification.
    user_accuracy: mean over users of the share of their rows that is predicted right; None where counts are, and where
    the data name no users.
    """

    name: str
    examples: PositiveInt
    accuracy: FiniteFloat | None
    loss: float
    counts: ConfusionCounts | None = None
    scores: dict[str, float] = field(default_factory=dict)
    user_accuracy: FiniteFloat | None = None

    @property
    def main(self) -> float:
        """As `Evaluation.main`."""
        return _or_nan(main_score(self.accuracy, self.scores))


@dataclass(frozen=True)
class Evaluation:
    """Mean loss, with accuracy or scores, overall and per group, on one split.

    groups: one entry for each group that is large enough in the split, in the order of the group names.
    fairness: the defined `dpsweep.workers.evaluation.rates.gaps` between these groups; empty for tasks other than
    classification.
    accuracy, scores, counts, user_accuracy: as in `GroupEvaluation`.
    task: of the data.
    parts: scores of each label or target, by its name.
    constant: `Task.constant` of the split's labels, once training has ended.
    """

    accuracy: FiniteFloat | None
    loss: float
    groups: tuple[GroupEvaluation, ...]
    fairness: dict[str, float]
    counts: ConfusionCounts | None = None
    scores: dict[str, float] = field(default_factory=dict)
    task: Annotated[str, AfterValidator(lambda name: task_called(name).name)] = "classification"
    parts: dict[str, dict[str, float]] = field(default_factory=dict)
    user_accuracy: FiniteFloat | None = None
    constant: float | None = None

    @property
    def main(self) -> float:
        """The main measure of the task, `Task.main`, by which models are compared first; NaN if it is not defined."""
        return _or_nan(main_score(self.accuracy, self.scores))


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def shown_groups(sizes: npt.NDArray[np.int64], least: int) -> npt.NDArray[np.int64]:
    """Return the indices of the groups whose measures may be shown, ascending: those with at least ``least`` examples.

    The total minus the shown groups reveals the measures of the groups that are left out, so these must have together
    at least ``least`` examples as well. If they have fewer, the smallest of the other groups are left out too.
    """
    ascending = np.argsort(sizes, kind="stable")
    ascending = ascending[sizes[ascending] > 0]
    left_out = int((sizes[ascending] < least).sum())
    while left_out < len(ascending) and 0 < sizes[ascending[:left_out]].sum() < least:
        left_out += 1
    return np.sort(ascending[left_out:])


def fairness(confusion: npt.NDArray[np.int64]) -> dict[str, float]:
    """Return the defined `dpsweep.workers.evaluation.rates.gaps` between groups; only the worst group's for one group,
    empty without any.

    confusion: counts [G, K, K] by group, label and prediction. Parity measures are included only for two classes, and
    only if the groups are not the classes.

    >>> fairness(np.array([[[1, 0], [0, 1]], [[1, 0], [1, 0]]]))["worst_group_accuracy"]
    0.5
    """
    if len(confusion) == 0:
        return {}
    has_label = confusion.sum(2) > 0
    groups_are_classes = (has_label.sum(1) <= 1).all() and (has_label.sum(0) <= 1).all()
    found = gaps(confusion.astype(np.float64), confusion.shape[-1] == 2 and not groups_are_classes)
    return {name: float(value) for name, value in found.items() if np.isfinite(value)}


def cost_of_privacy(private: Evaluation, baseline: Evaluation) -> Mapping[str, float]:
    """Change of accuracy by group name: private model minus baseline (Delta_k of Xu et al. 2021, Sec. 5.1).

    That paper calls training fair when Delta_k is equal for all groups. Groups missing from either are left out. Tasks
    other than classification use their main measure instead; groups for which it is not defined are left out.
    """
    before = {group.name: group.main for group in baseline.groups}
    found = {group.name: group.main - before[group.name] for group in private.groups if group.name in before}
    return {name: change for name, change in found.items() if not math.isnan(change)}
