"""Multi-label classification: several binary labels for each example."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import numpy as np

from dpsweep.accounting.errors import InvalidInput, count_of
from dpsweep.workers.tasks.task import Array, Score, Task, by_name, mean_of_known, share, wrong_form

if TYPE_CHECKING:
    from torch import Tensor


def _blocks(sums: Array) -> tuple[Array, Array, Array, Array]:
    """Return the number of examples [..., 1], and counts [..., L] of true and false positives and false negatives."""
    positives, wrong, missed = np.split(sums[..., 2:], 3, axis=-1)
    return sums[..., :1], positives, wrong, missed


def _f1(positives: Array, wrong: Array, missed: Array) -> Array:
    return share(2.0 * positives, 2.0 * positives + wrong + missed)


def _over_all_labels(sums: Array) -> Array:
    _, *counts = _blocks(sums)
    positives, wrong, missed = (each.sum(-1) for each in counts)
    return _f1(positives, wrong, missed)


_LABEL_SCORES: Final[Mapping[str, Callable[[Array, Array, Array, Array], Array]]] = {
    "accuracy": lambda count, positives, wrong, missed: 1.0 - share(wrong + missed, count),
    "f1": lambda count, positives, wrong, missed: _f1(positives, wrong, missed),
    "precision": lambda count, positives, wrong, missed: share(positives, positives + wrong),
    "true_positive_rate": lambda count, positives, wrong, missed: share(positives, positives + missed),
    "false_positive_rate": lambda count, positives, wrong, missed: share(wrong, count - positives - missed),
}


class MultiLabel(Task):
    """Labels: int64 [n, L] of 0 and 1. Outputs: a logit for each of L labels; above 0 the label is predicted."""

    name = "multi_label"
    main = "micro_f1"
    least_names = 1
    scores = (
        Score(
            "micro_f1",
            "Micro F1",
            "higher",
            "share",
            _over_all_labels,
            "Twice the true positives over twice these plus false positives and false negatives, counted over all "
            "labels together: labels count by how often they occur.",
        ),
        Score(
            "macro_f1",
            "Macro F1",
            "higher",
            "share",
            lambda sums: mean_of_known(_f1(*_blocks(sums)[1:])),
            "The mean over labels of the F1 of each; a label that no example has, and none is given, is left out.",
        ),
        Score(
            "label_accuracy",
            "Label accuracy",
            "higher",
            "share",
            lambda sums: np.asarray(_LABEL_SCORES["accuracy"](*_blocks(sums)).mean(-1)),
            "The share of all labels of all examples that are predicted right, present or absent.",
        ),
        Score(
            "exact_match",
            "Exact match",
            "higher",
            "share",
            lambda sums: share(sums[..., 1], sums[..., 0]),
            "The share of examples all of whose labels are right.",
        ),
    )

    def check_labels(self, what: str, labels: Tensor, names: tuple[str, ...]) -> None:
        if labels.ndim != 2 or labels.shape[1] != len(names) or labels.is_floating_point():
            takes = f"multi_label takes int64 [n, {len(names)}]: 0 or 1 for each of {count_of(len(names), 'label')}"
            raise wrong_form(what, labels, takes)
        if not bool(((labels == 0) | (labels == 1)).all()):
            raise InvalidInput(f"{what} hold a number besides 0 and 1, which say whether an example has a label")

    def outputs(self, names: tuple[str, ...]) -> str:
        return f"one logit for each of {count_of(len(names), 'label')}"

    def kept(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return [b, 2 + 3 L]: 1, whether all labels are correct, then true positives, false positives and false
        negatives.

        The last three are 0 or 1 for each of L labels. A NaN logit predicts that the example lacks the label.
        """
        import torch  # late: sweep files do not need it

        has, predicted = labels == 1, outputs > 0
        right = (has == predicted).all(1, keepdim=True)
        return torch.cat(
            (torch.ones_like(right), right, has & predicted, ~has & predicted, has & ~predicted), 1
        ).double()

    def constant(self, labels: Tensor, names: tuple[str, ...]) -> float | None:
        """Return the micro F1 of the best set of labels for every example: those that occur most often."""
        positives = np.sort((labels == 1).sum(0).numpy())[::-1]
        predicted = len(labels) * np.arange(1, len(positives) + 1)
        return float((2.0 * positives.cumsum() / (predicted + positives.sum())).max())

    def parts(self, sums: Array, names: tuple[str, ...]) -> Mapping[str, Mapping[str, float]]:
        """Return scores of each label; precision, recall and false positive rate are left out where their denominator
        is 0.
        """
        return by_name({score: of(*_blocks(sums)) for score, of in _LABEL_SCORES.items()}, names)
