"""Segmentation: a class for each pixel of a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import numpy as np

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.tasks.task import (
    IGNORED,
    Array,
    Score,
    Task,
    by_name,
    labels_within,
    mean_of_known,
    occurrences,
    share,
    wrong_form,
)

if TYPE_CHECKING:
    from torch import Tensor


def _blocks(sums: Array) -> tuple[Array, Array, Array]:
    """Return numbers [..., K] of correct, predicted and labelled pixels of each class."""
    right, predicted, labelled = np.split(sums, 3, axis=-1)
    return right, predicted, labelled


def _iou(right: Array, predicted: Array, labelled: Array) -> Array:
    return share(right, predicted + labelled - right)


def _dice(right: Array, predicted: Array, labelled: Array) -> Array:
    return share(2.0 * right, predicted + labelled)


def _pixel_accuracy(sums: Array) -> Array:
    right, _, labelled = _blocks(sums)
    return share(right.sum(-1), labelled.sum(-1))


_CLASS_SCORES: Final[Mapping[str, Callable[[Array, Array, Array], Array]]] = {
    "iou": _iou,
    "dice": _dice,
    "precision": lambda right, predicted, labelled: share(right, predicted),
    "true_positive_rate": lambda right, predicted, labelled: share(right, labelled),
}


class Segmentation(Task):
    """Labels: integers [n, height, width], the class of each pixel, or `IGNORED` if it is not counted.

    Outputs: [K, height, width], a logit for each of K classes at every pixel. Volumes have one more axis.
    """

    name = "segmentation"
    main = "mean_iou"
    scores = (
        Score(
            "mean_iou",
            "Mean IoU",
            "higher",
            "share",
            lambda sums: mean_of_known(_iou(*_blocks(sums))),
            "The mean over classes of the pixels rightly predicted as one over those predicted or labelled so, in all "
            "pictures; a class that neither occurs nor is predicted is left out.",
        ),
        Score(
            "mean_dice",
            "Mean Dice",
            "higher",
            "share",
            lambda sums: mean_of_known(_dice(*_blocks(sums))),
            "The mean over classes of twice the pixels rightly predicted as one over those predicted so plus those "
            "labelled so: the F1 of pixels, over classes as of mean IoU.",
        ),
        Score(
            "pixel_accuracy",
            "Pixel accuracy",
            "higher",
            "share",
            _pixel_accuracy,
            "The share of counted pixels that are predicted right: classes count by how many pixels they have.",
        ),
    )

    def check_labels(self, what: str, labels: Tensor, names: tuple[str, ...]) -> None:
        if labels.ndim < 3 or labels.is_floating_point():
            raise wrong_form(
                what,
                labels,
                "segmentation takes whole numbers [n, height, width]: a class for each pixel, "
                f"{IGNORED} where it is not counted",
            )
        if not labels_within(labels, len(names)):
            raise InvalidInput(f"{what} must be classes from 0 to {len(names) - 1}, or {IGNORED} where none is counted")

    def output_shape(self, labels: Tensor, names: tuple[str, ...]) -> tuple[int, ...]:
        return len(names), *labels.shape[1:]

    def outputs(self, names: tuple[str, ...]) -> str:
        return f"one logit for each of {len(names)} classes at every pixel"

    def kept(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return [b, 3 K]: for each class, numbers of counted pixels that are correct, that are predicted, and labelled
        so.
        """
        import torch  # late: sweep files do not need it

        ignored = torch.full_like(labels, IGNORED)
        predicted = torch.where(labels == IGNORED, ignored, outputs.argmax(1).to(labels))
        right = torch.where(predicted == labels, labels, ignored)
        classes = range(outputs.shape[1])
        counts = [(found == each).flatten(1).sum(1) for found in (right, predicted, labels) for each in classes]
        return torch.stack(counts, 1).double()

    def constant(self, labels: Tensor, names: tuple[str, ...]) -> float | None:
        """Return the mean IoU of one class for every pixel: that of the others which occur is 0."""
        counts = occurrences(labels, len(names))
        return float(counts.max() / counts.sum() / np.count_nonzero(counts)) if counts.any() else None

    def parts(self, sums: Array, names: tuple[str, ...]) -> Mapping[str, Mapping[str, float]]:
        """Return the defined scores of each class; a class that neither occurs nor is predicted is left out."""
        return by_name({score: of(*_blocks(sums)) for score, of in _CLASS_SCORES.items()}, names)
