"""Accuracy, loss and fairness of a model by group. Deterministic, without gradients, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from accounting.errors import InvalidInput
from workers.data import Dataset, Preparation, Split
from workers.gradients import modes_kept
from workers.losses import Loss

BATCH_SIZE = 1024
MIN_GROUP_SIZE = 10
"""Examples that a group of test data must have to be shown: accuracy and loss of two people are nearly their own."""
T = TypeVar("T")


@dataclass(frozen=True)
class GroupEvaluation:
    """Number of examples of one group in the split, and their mean accuracy and loss."""

    name: str
    examples: int
    accuracy: float
    loss: float


@dataclass(frozen=True)
class Evaluation:
    """Mean accuracy and loss, overall and per group, on one split.

    groups has an entry for each group that is large enough in the split, in the order of the group names. fairness, of
    these groups: accuracy_gap (best minus worst group) and worst_group_accuracy; for two-class tasks whose groups are
    not the classes also demographic_parity_difference and equalized_odds_difference.
    """

    accuracy: float
    loss: float
    groups: tuple[GroupEvaluation, ...]
    fairness: dict[str, float]


@dataclass(frozen=True)
class Predictions:
    """Per example, in the order of the split: predicted class, int64 [n], and loss, float64 [n]."""

    classes: npt.NDArray[np.int64]
    losses: npt.NDArray[np.float64]


def predict(model: nn.Module, split: Split, dataset: Dataset, loss: Loss, batch_size: int = BATCH_SIZE) -> Predictions:
    """Predicted class and loss of every example. The model keeps its device and its modes."""

    def read(logits: Tensor, batch: slice) -> tuple[Tensor, Tensor]:
        return _decide(logits).cpu(), loss(logits, split.labels[batch].to(logits.device)).double().cpu()

    classes, losses = zip(*in_batches(model, split.features, dataset.prepare, read, batch_size), strict=True)
    return Predictions(torch.cat(classes).numpy(), torch.cat(losses).numpy())


def in_batches(
    model: nn.Module,
    features: Tensor,
    prepare: Preparation,
    read: Callable[[Tensor, slice], T],
    batch_size: int = BATCH_SIZE,
) -> list[T]:
    """Call ``read(logits, rows)`` for each batch of the stored ``features``, and return the results in order.

    The model runs in evaluation mode and without gradients; afterwards its modes are restored.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with modes_kept(model), torch.no_grad():
        model.eval()
        return [
            read(model(prepare(features[batch].to(device))), batch)
            for batch in (slice(start, start + batch_size) for start in range(0, len(features), batch_size))
        ]


def _decide(logits: Tensor) -> Tensor:
    return logits.argmax(1) if logits.shape[1] > 1 else (logits[:, 0] > 0).long()


def evaluate(
    model: nn.Module, split: Split, dataset: Dataset, loss: Loss, min_group_size: int = MIN_GROUP_SIZE
) -> Evaluation:
    """Accuracy, loss and group fairness of ``model`` on ``split``, of groups with at least ``min_group_size`` examples.

    These are exact statistics without any privacy guarantee for the split: pass held-out or public examples.

    Raises: InvalidInput when the split has no examples.
    """
    if len(split) == 0:
        raise InvalidInput("cannot evaluate on a split without examples")
    predictions = predict(model, split, dataset, loss)
    labels, groups = split.labels.numpy(), split.groups.numpy()
    correct = predictions.classes == labels
    shown = shown_groups(np.bincount(groups), min_group_size)
    present = [(group, np.flatnonzero(groups == group)) for group in shown]
    among = np.isin(groups, shown)
    return Evaluation(
        accuracy=float(correct.mean()),
        loss=float(predictions.losses.mean()),
        groups=tuple(
            GroupEvaluation(
                name=dataset.group_names[group],
                examples=len(members),
                accuracy=float(correct[members].mean()),
                loss=float(predictions.losses[members].mean()),
            )
            for group, members in present
        ),
        fairness=fairness(labels[among], predictions.classes[among], groups[among], dataset.num_classes),
    )


def shown_groups(sizes: npt.NDArray[np.int64], least: int) -> npt.NDArray[np.int64]:
    """The groups whose measures may be shown: those with at least ``least`` of the ``sizes``, by number.

    A total shows what the groups beside it leave out, so those left out have together at least as many examples: where
    they have fewer, the smallest of the others join them.
    """
    ascending = np.argsort(sizes, kind="stable")
    ascending = ascending[sizes[ascending] > 0]
    left_out = int((sizes[ascending] < least).sum())
    while left_out < len(ascending) and 0 < sizes[ascending[:left_out]].sum() < least:
        left_out += 1
    return np.sort(ascending[left_out:])


def fairness(
    labels: npt.NDArray[np.int64], predicted: npt.NDArray[np.int64], groups: npt.NDArray[np.int64], num_classes: int
) -> dict[str, float]:
    """Group fairness measures of `Evaluation`; those of two-class tasks are computed by fairlearn. Empty without rows.

    labels, predicted, groups: class and group indices [n].

    >>> labels, predicted, groups = np.array([0, 1, 1, 0]), np.array([0, 1, 0, 0]), np.array([0, 0, 1, 1])
    >>> fairness(labels, predicted, groups, num_classes=3)
    {'accuracy_gap': 0.5, 'worst_group_accuracy': 0.5}
    """
    if len(groups) == 0:
        return {}
    sizes = np.bincount(groups)
    accuracies = np.bincount(groups, weights=labels == predicted)[sizes > 0] / sizes[sizes > 0]
    measures = {"accuracy_gap": accuracies.max() - accuracies.min(), "worst_group_accuracy": accuracies.min()}
    if num_classes == 2 and not np.array_equal(labels, groups):
        measures |= _parity(labels, predicted, groups)
    return {name: float(value) for name, value in measures.items()}


def _parity(
    labels: npt.NDArray[np.int64], predicted: npt.NDArray[np.int64], groups: npt.NDArray[np.int64]
) -> dict[str, float]:
    from fairlearn.metrics import (  # late: importing it takes seconds
        demographic_parity_difference,
        equalized_odds_difference,
    )

    arguments = {"y_true": labels, "y_pred": predicted, "sensitive_features": groups}
    return {
        "demographic_parity_difference": demographic_parity_difference(**arguments),
        "equalized_odds_difference": equalized_odds_difference(**arguments),
    }


def cost_of_privacy(private: Evaluation, baseline: Evaluation) -> Mapping[str, float]:
    """Delta_k: accuracy of the private model minus that of the baseline, by group name (Xu et al. 2021, Sec. 5.1).

    That paper calls training fair when Delta_k is equal for all groups. Groups missing from either are left out.
    """
    before = {group.name: group.accuracy for group in baseline.groups}
    return {group.name: group.accuracy - before[group.name] for group in private.groups if group.name in before}
