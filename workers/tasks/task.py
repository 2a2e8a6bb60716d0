"""The base of tasks: the form of labels, the outputs of a model, and the scores computed on test examples.

Scores are functions of sums over examples. The same function therefore computes the score of a group, of all examples
and of a resample of the test examples, from values that are stored once for each example.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, Literal

import numpy as np
import numpy.typing as npt

from dpsweep.accounting.errors import InvalidInput, PrivateDetail

if TYPE_CHECKING:
    from torch import Tensor

Array = npt.NDArray[np.float64]
_ROWS: Final = 1024
IGNORED: Final = -100
"""Label of a token or pixel that is not counted."""
ScoreUnit = Literal["share", "number", "fit"]
"""Range of a score. ``share``: [0, 1]. ``number``: at least 0. ``fit``: at most 1, negative if a constant is better."""


@dataclass(frozen=True)
class Score:
    """A score of a set of examples.

    `of`: sums [..., m] of `Task.kept` over the examples -> score [...], NaN where it is not defined.
    `name`: unique among all tasks.
    `heading`: of its column.
    `meaning`: explanation for the report.
    """

    name: str
    heading: str
    better: Literal["higher", "lower"]
    unit: ScoreUnit
    of: Callable[[Array], Array]
    meaning: str = ""


class Task(ABC):
    """One task. names: of the model's outputs (classes, labels, targets or tokens). b: examples of a batch.

    main: the main score, by which models are compared first: ``accuracy`` or the name of a score. Higher is better.
    scores: computed from sums of `kept`; none for classification, whose rates are in
    `dpsweep.workers.evaluation.rates`. least_names: smallest number of names of outputs.
    """

    name: ClassVar[str]
    main: ClassVar[str]
    scores: ClassVar[tuple[Score, ...]] = ()
    least_names: ClassVar[int] = 2

    @abstractmethod
    def check_labels(self, what: str, labels: Tensor, names: tuple[str, ...]) -> None:
        """Raise InvalidInput unless ``labels`` [n, ...] have the form of this task. what: their name in errors."""

    def output_shape(self, labels: Tensor, names: tuple[str, ...]) -> tuple[int, ...]:
        """Return the shape of a model's output for one example of these labels."""
        return (len(names),)

    @abstractmethod
    def outputs(self, names: tuple[str, ...]) -> str:
        """Return a description, for errors, of the output that a model must return for each row."""

    @abstractmethod
    def kept(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return values to keep of each example, float64 [b, m]; for tasks with scores, the terms of their sums."""

    def constant(self, labels: Tensor, names: tuple[str, ...]) -> float | None:
        """Return the main score of the best constant prediction for ``labels`` [n, ...]; None for classification, whose
        counts say it.
        """
        return None

    def parts(self, sums: Array, names: tuple[str, ...]) -> Mapping[str, Mapping[str, float]]:
        """Return scores of each label or target by its name, from sums [m] of `kept`; empty if the task has none."""
        return {}


def wrong_form(what: str, labels: Tensor, takes: str) -> InvalidInput:
    """Return the error for labels of another form than a task ``takes``."""
    return InvalidInput(f"{what} have shape {tuple(labels.shape)} and type {labels.dtype}, but {takes}")


def require_indices(what: str, values: Tensor, names: tuple[str, ...]) -> None:
    """Raise InvalidInput unless the values [n] are indices of ``names``."""
    if len(values) and not 0 <= int(values.min()) <= int(values.max()) < len(names):
        raise InvalidInput(
            f"{what} must index its {len(names)} names: be whole numbers from 0 to {len(names) - 1}"
        ) from PrivateDetail(f"they range from {int(values.min())} to {int(values.max())}")


def labels_within(labels: Tensor, count: int) -> bool:
    """Return whether all labels are `IGNORED` or in 0 .. ``count`` - 1; read in blocks, as they may be
    memory-mapped.
    """
    return all(bool(((rows == IGNORED) | ((rows >= 0) & (rows < count))).all()) for rows in labels.split(_ROWS))


def occurrences(labels: Tensor, count: int) -> Array:
    """Return how often each of ``count`` labels occurs, [count], without `IGNORED`; read in blocks, as they may be
    memory-mapped.
    """
    found = np.zeros(count)
    for rows in labels.split(_ROWS):
        found += np.bincount(rows[rows != IGNORED].flatten().numpy(), minlength=count)
    return found


def labelled(labels: Tensor) -> npt.NDArray[np.bool_]:
    """Return which examples have a label that is counted, [n]; one without has no loss. labels: [n, ...]; read in
    blocks, as they may be memory-mapped.
    """
    if labels.ndim == 1 or labels.is_floating_point():
        return np.ones(len(labels), dtype=np.bool_)
    return np.concatenate([(rows != IGNORED).flatten(1).any(1).cpu().numpy() for rows in labels.split(_ROWS)])


def by_name(scores: Mapping[str, Array], names: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Return the `finite_numbers` scores of each name, from ``scores`` [names]."""
    return {
        name: finite_numbers({score: found[at] for score, found in scores.items()}) for at, name in enumerate(names)
    }


def finite_numbers(numbers: Mapping[str, Array]) -> dict[str, float]:
    """Return the numbers that are finite."""
    return {name: float(value) for name, value in numbers.items() if np.isfinite(value)}


def share(part: npt.ArrayLike, whole: npt.ArrayLike) -> Array:
    """Return part / whole, NaN where the whole is 0."""
    parts, wholes = np.broadcast_arrays(part, whole)
    found = np.full(parts.shape, np.nan)
    np.divide(parts, wholes, out=found, where=wholes != 0)
    return found


def mean_of_known(values: Array) -> Array:
    """Return [..., k] -> [...]: mean of the values that are not NaN; NaN if all are."""
    is_known = ~np.isnan(values)
    return share(np.where(is_known, values, 0.0).sum(-1), is_known.sum(-1).astype(np.float64))
