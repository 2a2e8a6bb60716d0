"""Predictions of a model for a split, and its evaluation from them.

Deterministic, without gradients, in bounded memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.data import Dataset, Preparation, Split, as_targets, dependent_rows
from dpsweep.workers.evaluation.rates import (
    ConfusionCounts,
    calibration_error,
    confusion_counts,
    mean_by_group,
    shares_of_users,
)
from dpsweep.workers.evaluation.scores import MIN_GROUP_SIZE, Evaluation, GroupEvaluation, fairness, shown_groups
from dpsweep.workers.gradients.checks import in_its_precision
from dpsweep.workers.gradients.modes import modes_kept
from dpsweep.workers.gradients.rows_at_once import rows_at_once
from dpsweep.workers.machine.devices import room_for_data
from dpsweep.workers.tasks import finite_numbers, labelled, task_called
from dpsweep.workers.tasks.losses import Loss

BATCH_SIZE = 1024
"""Largest number of examples that a model is evaluated on at once."""
_OUTPUTS_AT_ONCE: Final = 2**25
"""Largest number of output values of a model for one batch. Language models return one per position and token."""
T = TypeVar("T")


@dataclass(frozen=True)
class Predictions:
    """Predictions for the examples of a split, in order. losses: [n], training loss. kept: [n, m], of `Task.kept`."""

    losses: npt.NDArray[np.float64]
    kept: npt.NDArray[np.float64]

    @property
    def classes(self) -> npt.NDArray[np.int64]:
        """Predicted classes, [n]; classification only."""
        return self.kept[:, 0].astype(np.int64)

    @property
    def log_losses(self) -> npt.NDArray[np.float64]:
        """-ln p(label), in nats, [n]; classification only."""
        return self.kept[:, 1]

    @property
    def confidences(self) -> npt.NDArray[np.float64]:
        """p(predicted class), [n]; classification only."""
        return self.kept[:, 2]


def predict(
    model: nn.Module, split: Split, dataset: Dataset, loss: Loss, batches: Sequence[slice] | None = None
) -> Predictions:
    """Return predictions for every example of the split, or for those in ``batches`` (some of `batches_of`).

    The model keeps its device and its modes.
    """
    task = task_called(dataset.task)
    width = len(dataset.class_names)

    def read(outputs: Tensor, batch: slice) -> tuple[Tensor, Tensor]:
        labels = as_targets(split.labels[batch]).to(outputs.device)
        return loss(outputs, labels).double().cpu(), task.kept(first_columns(outputs, width), labels).cpu()

    chosen = batches_of(model, split, dataset) if batches is None else batches
    losses, kept = zip(*in_batches(model, split.features, dataset.prepare, read, chosen), strict=True)
    return Predictions(torch.cat(losses).numpy(), torch.cat(kept).numpy())


def first_columns(outputs: Tensor, width: int) -> Tensor:
    """Return the first ``width`` of outputs [b, m]: the task's, without the further heads of an own loss."""
    return outputs[:, :width] if outputs.ndim == 2 and outputs.shape[1] > width else outputs


def batches_of(model: nn.Module, split: Split, dataset: Dataset) -> list[slice]:
    """Return the batches in which a split is evaluated, each as large as is fast and outputs take less than hundreds of
    MB.

    Processes that share an evaluation take whole batches, so that results have the same bits as in one process.
    """
    outputs = math.prod(task_called(dataset.task).output_shape(split.labels, dataset.class_names))
    size = evaluation_batch_size(model, split.features, dataset.prepare)
    return slices(len(split), max(1, min(size, _OUTPUTS_AT_ONCE // outputs)))


def evaluation_batch_size(model: nn.Module, features: Tensor, prepare: Preparation) -> int:
    """Return the number of examples to evaluate at once: at most `BATCH_SIZE`, and on a CPU fewer where layers are
    wide.
    """
    if len(features) == 0:
        return BATCH_SIZE
    return min(rows_at_once(model, prepare(features[:1].to(_device_of(model)))), BATCH_SIZE)


def _device_of(model: nn.Module) -> torch.device:
    return next((each.device for each in model.parameters()), torch.device("cpu"))


def slices(count: int, size: int = BATCH_SIZE) -> list[slice]:
    """Return slices of ``size`` rows that cover ``count`` rows; the last may be shorter."""
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def in_batches(
    model: nn.Module,
    features: Tensor,
    prepare: Preparation,
    read: Callable[[Tensor, slice], T],
    batches: Sequence[slice],
) -> list[T]:
    """Return the results of ``read(logits, rows)`` for each of ``batches`` of the stored ``features``, in order.

    The model runs in evaluation mode and without gradients; afterwards its modes are restored.
    """
    device = _device_of(model)
    with modes_kept(model), torch.no_grad(), in_its_precision(model, device):
        model.eval()
        return [read(model(prepare(features[batch].to(device))), batch) for batch in batches]


Predict = Callable[[nn.Module, Split, Dataset, Loss], Predictions]
"""Signature of `predict`, which one process or several together may implement."""


def with_evaluated_on(device: torch.device, dataset: Dataset) -> Dataset:
    """Return the data set with test and public features, which every epoch evaluates, moved to the device if they
    fit.
    """

    def moved(split: Split) -> Split:
        fits = split.features.nbytes <= room_for_data(device)
        return replace(split, features=split.features.to(device)) if fits else split

    public = None if dataset.public is None else moved(dataset.public)
    return replace(dataset, test=moved(dataset.test), public=public)


def evaluate(
    model: nn.Module,
    split: Split,
    dataset: Dataset,
    loss: Loss,
    min_group_size: int = MIN_GROUP_SIZE,
    predicted_by: Predict = predict,
) -> Evaluation:
    """Evaluate ``model`` on ``split``: loss, accuracy or scores, and group fairness, without what `with_counts` adds.

    `shown_groups` leaves out groups with fewer than ``min_group_size`` examples.

    These are exact statistics without any privacy guarantee for the split: pass held-out or public examples.

    Raises: InvalidInput when the split has no examples.
    """
    if len(split) == 0:
        raise InvalidInput("cannot evaluate on a split without examples")
    return summary(predicted_by(model, split, dataset, loss), split, dataset, min_group_size)


def summary(predictions: Predictions, split: Split, dataset: Dataset, min_group_size: int) -> Evaluation:
    """Return the evaluation of ``predictions`` for ``split``, without what `with_counts` adds."""
    groups, task = split.groups.numpy(), task_called(dataset.task)
    size, sizes = dataset.num_groups, np.bincount(groups, minlength=dataset.num_groups)
    shown, has_loss = shown_groups(sizes, min_group_size), labelled(split.labels)
    known_losses = predictions.losses[has_loss]
    losses = mean_by_group(known_losses, groups[has_loss], size)
    accuracy, accuracies, between = None, dict[int, float](), dict[str, float]()
    overall, of_groups = dict[str, npt.NDArray[np.float64]](), dict[str, npt.NDArray[np.float64]]()
    if task.scores:
        sums = _sums(predictions, groups, size)
        overall, of_groups = ({score.name: score.of(each) for score in task.scores} for each in (sums.sum(0), sums))
    else:
        confusion = _confusion(predictions, split, dataset)
        accuracy = float(np.trace(confusion.sum(0)) / len(split))
        accuracies = {group: float(np.trace(confusion[group]) / sizes[group]) for group in shown}
        between = fairness(confusion[shown])
    return Evaluation(
        accuracy=accuracy,
        loss=float(known_losses.mean()) if len(known_losses) else math.nan,
        groups=tuple(
            GroupEvaluation(
                name=dataset.group_names[group],
                examples=int(sizes[group]),
                accuracy=accuracies.get(group),
                loss=float(losses[group]),
                scores=finite_numbers({name: values[group] for name, values in of_groups.items()}),
            )
            for group in shown
        ),
        fairness=between,
        scores=finite_numbers(overall),
        task=dataset.task,
    )


def _sums(predictions: Predictions, groups: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.float64]:
    """[G, m]: sums of the kept values of examples, by group."""
    found = np.zeros((size, predictions.kept.shape[1]))
    np.add.at(found, groups, predictions.kept)
    return found


def with_counts(evaluation: Evaluation, predictions: Predictions, split: Split, dataset: Dataset) -> Evaluation:
    """Return ``evaluation``, the `summary` of ``predictions``, with counts added (classification), or parts and the
    score of the best constant (other tasks).
    """
    task = task_called(dataset.task)
    if task.scores:
        parts = task.parts(predictions.kept.sum(0), dataset.class_names)
        return replace(
            evaluation,
            parts={name: dict(each) for name, each in parts.items()},
            constant=task.constant(split.labels, dataset.class_names),
        )
    groups, confusion = split.groups.numpy(), _confusion(predictions, split, dataset)
    correct = predictions.classes == split.labels.numpy()

    def scores(groups: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.float64]:
        log_losses = mean_by_group(predictions.log_losses, groups, size)
        return np.stack((log_losses, calibration_error(predictions.confidences, correct, groups, size)), 1)

    by_group, overall = scores(groups, dataset.num_groups), scores(np.zeros_like(groups), 1)[0]
    place = {name: group for group, name in enumerate(dataset.group_names)}
    shown = tuple(
        replace(
            group,
            counts=_counts(confusion[place[group.name]], *by_group[place[group.name]]),
            user_accuracy=_user_accuracy(correct, split, groups == place[group.name]),
        )
        for group in evaluation.groups
    )
    everyone = _user_accuracy(correct, split, np.ones(len(split), dtype=bool))
    return replace(evaluation, groups=shown, counts=_counts(confusion.sum(0), *overall), user_accuracy=everyone)


def _user_accuracy(correct: npt.NDArray[np.bool_], split: Split, members: npt.NDArray[np.bool_]) -> float | None:
    """Return the mean over users of the share of their rows among ``members`` [n] that is right; None without users."""
    if split.user_ids is None:
        return None
    users = dependent_rows(split.user_ids)[members]
    return float(np.average(correct[members], weights=shares_of_users(users, np.zeros_like(users))))


def _confusion(predictions: Predictions, split: Split, dataset: Dataset) -> npt.NDArray[np.int64]:
    shape = dataset.num_groups, dataset.num_classes
    return confusion_counts(split.labels.numpy(), predictions.classes, split.groups.numpy(), shape)


def _counts(confusion: npt.NDArray[np.int64], log_loss: float, calibration: float) -> ConfusionCounts:
    rows = tuple(tuple(row) if any(row) else () for row in confusion.tolist())
    return ConfusionCounts(rows, float(log_loss), float(calibration))
