"""Accuracy, loss and fairness of a model by group. Deterministic, without gradients, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from accounting.errors import InvalidInput
from workers.data import Dataset, Preparation, Split
from workers.gradients import modes_kept
from workers.losses import Loss
from workers.rates import Counts, calibration_error, confusion_counts, gaps, mean_by_group

BATCH_SIZE = 1024
MIN_GROUP_SIZE = 10
"""Examples that a group of test data must have to be shown: accuracy and loss of two people are nearly their own."""
T = TypeVar("T")


@dataclass(frozen=True)
class GroupEvaluation:
    """Number of examples of one group in the split, and their mean accuracy and loss.

    counts: None for an evaluation after an epoch, and for what an earlier version stored.
    """

    name: str
    examples: int
    accuracy: float
    loss: float
    counts: Counts | None = None


@dataclass(frozen=True)
class Evaluation:
    """Mean accuracy and loss, overall and per group, on one split.

    groups has an entry for each group that is large enough in the split, in the order of the group names. fairness:
    `workers.rates.gaps` of these groups; one that is not defined is left out. counts: as in `GroupEvaluation`.
    """

    accuracy: float
    loss: float
    groups: tuple[GroupEvaluation, ...]
    fairness: dict[str, float]
    counts: Counts | None = None


@dataclass(frozen=True)
class Predictions:
    """Per example, in the order of the split, each [n].

    classes: predicted, int64. losses: of training. log_losses: -ln p(label), in nats. confidences: p(predicted class).
    """

    classes: npt.NDArray[np.int64]
    losses: npt.NDArray[np.float64]
    log_losses: npt.NDArray[np.float64]
    confidences: npt.NDArray[np.float64]


def predict(model: nn.Module, split: Split, dataset: Dataset, loss: Loss, batch_size: int = BATCH_SIZE) -> Predictions:
    """What the model predicts of every example. The model keeps its device and its modes."""

    def read(logits: Tensor, batch: slice) -> tuple[Tensor, ...]:
        labels, decided = split.labels[batch].to(logits.device), _decide(logits)
        logs = _log_probabilities(logits.double())
        sure = logs.gather(1, decided[:, None])[:, 0].exp()
        found = decided, loss(logits, labels).double(), -logs.gather(1, labels[:, None])[:, 0], sure
        return tuple(values.cpu() for values in found)

    columns = zip(*in_batches(model, split.features, dataset.prepare, read, batch_size), strict=True)
    classes, *scores = (torch.cat(parts).numpy() for parts in columns)
    return Predictions(classes, *scores)


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


def _log_probabilities(logits: Tensor) -> Tensor:
    """ln p of each class, [n, K]; a single logit is that of class 1 against class 0."""
    both = logits if logits.shape[1] > 1 else torch.cat((torch.zeros_like(logits), logits), 1)
    return both.log_softmax(1)


def evaluate(
    model: nn.Module, split: Split, dataset: Dataset, loss: Loss, min_group_size: int = MIN_GROUP_SIZE
) -> Evaluation:
    """Accuracy, loss and group fairness of ``model`` on ``split``, of groups with at least ``min_group_size`` examples.

    These are exact statistics without any privacy guarantee for the split: pass held-out or public examples.

    Raises: InvalidInput when the split has no examples.
    """
    if len(split) == 0:
        raise InvalidInput("cannot evaluate on a split without examples")
    return summary(predict(model, split, dataset, loss), split, dataset, min_group_size)


def summary(predictions: Predictions, split: Split, dataset: Dataset, min_group_size: int) -> Evaluation:
    """The evaluation of predictions of ``split``, without counts."""
    groups = split.groups.numpy()
    size, sizes = dataset.num_groups, np.bincount(groups, minlength=dataset.num_groups)
    confusion = _confusion(predictions, split, dataset)
    losses = mean_by_group(predictions.losses, groups, size)
    shown = shown_groups(sizes, min_group_size)
    return Evaluation(
        accuracy=float(np.trace(confusion.sum(0)) / len(split)),
        loss=float(predictions.losses.mean()),
        groups=tuple(
            GroupEvaluation(
                name=dataset.group_names[group],
                examples=int(sizes[group]),
                accuracy=float(np.trace(confusion[group]) / sizes[group]),
                loss=float(losses[group]),
            )
            for group in shown
        ),
        fairness=fairness(confusion[shown]),
    )


def counted(evaluation: Evaluation, predictions: Predictions, split: Split, dataset: Dataset) -> Evaluation:
    """The `summary` of predictions of ``split`` together with its counts."""
    groups, confusion = split.groups.numpy(), _confusion(predictions, split, dataset)
    correct = predictions.classes == split.labels.numpy()

    def scores(groups: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.float64]:
        log_losses = mean_by_group(predictions.log_losses, groups, size)
        return np.stack((log_losses, calibration_error(predictions.confidences, correct, groups, size)), 1)

    by_group, overall = scores(groups, dataset.num_groups), scores(np.zeros_like(groups), 1)[0]
    place = {name: group for group, name in enumerate(dataset.group_names)}
    shown = tuple(
        replace(group, counts=_counts(confusion[place[group.name]], *by_group[place[group.name]]))
        for group in evaluation.groups
    )
    return replace(evaluation, groups=shown, counts=_counts(confusion.sum(0), *overall))


def _confusion(predictions: Predictions, split: Split, dataset: Dataset) -> npt.NDArray[np.int64]:
    shape = dataset.num_groups, dataset.num_classes
    return confusion_counts(split.labels.numpy(), predictions.classes, split.groups.numpy(), shape)


def _counts(confusion: npt.NDArray[np.int64], log_loss: float, calibration: float) -> Counts:
    rows = tuple(tuple(row) if any(row) else () for row in confusion.tolist())
    return Counts(rows, float(log_loss), float(calibration))


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


def fairness(confusion: npt.NDArray[np.int64]) -> dict[str, float]:
    """`workers.rates.gaps` between groups, from counts [G, K, K] by group, label and prediction; empty without groups.

    Parity means something for two classes only, and where the groups are not the classes.

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
    """Delta_k: accuracy of the private model minus that of the baseline, by group name (Xu et al. 2021, Sec. 5.1).

    That paper calls training fair when Delta_k is equal for all groups. Groups missing from either are left out.
    """
    before = {group.name: group.accuracy for group in baseline.groups}
    return {group.name: group.accuracy - before[group.name] for group in private.groups if group.name in before}
