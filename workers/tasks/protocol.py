"""A task: how labels look, what a model predicts of them, and which numbers are computed of test examples.

Numbers are functions of sums over examples, so that those of a group, of everybody and of a resample of the test
examples are computed by the same function, from what is stored of each example once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

Array = npt.NDArray[np.float64]
_ROWS: Final = 1024
IGNORED: Final = -100
"""Label of a token or pixel that is not counted."""
Unit = Literal["share", "number", "fit"]
"""``share``: in [0, 1]. ``number``: at least 0. ``fit``: at most 1, and below 0 where a constant does better."""


@dataclass(frozen=True)
class Score:
    """A number of some examples. of: sums [..., m] of what a task keeps of each -> [...], NaN where it is not defined.

    name: unique among all tasks. heading: of its column. meaning: its explanation in the report.
    """

    name: str
    heading: str
    better: Literal["higher", "lower"]
    unit: Unit
    of: Callable[[Array], Array]
    meaning: str = ""


class Task(Protocol):
    """One task. Methods take tensors of one batch of b examples; names are those of its outputs."""

    @property
    def name(self) -> str: ...

    @property
    def main(self) -> str:
        """The number by which models are compared first: ``accuracy``, or the name of a score. Higher is better."""
        ...

    @property
    def scores(self) -> tuple[Score, ...]:
        """Numbers from sums of `kept`; none for classification, whose rates come from counts (`workers.rates`)."""
        ...

    @property
    def least_names(self) -> int:
        """The least number of names of outputs."""
        ...

    def check_labels(self, what: str, labels: Tensor, names: tuple[str, ...]) -> None:
        """Raises: InvalidInput, with ``what`` they are labels of, unless the labels [n, ...] are of this task."""
        ...

    def output_shape(self, labels: Tensor, names: tuple[str, ...]) -> tuple[int, ...]:
        """Shape of a model's output for one example of these labels."""
        ...

    def outputs(self, names: tuple[str, ...]) -> str:
        """In words, what a model returns for each row."""
        ...

    def kept(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """What is kept of each example, float64 [b, m]: of scores, the terms of their sums."""
        ...

    def parts(self, sums: Array, names: tuple[str, ...]) -> Mapping[str, Mapping[str, float]]:
        """Numbers of single labels or targets, by their name, from sums [m] of `kept`; empty if there are none."""
        ...


def within(labels: Tensor, count: int) -> bool:
    """Whether all are `IGNORED` or from 0 to ``count`` - 1; read in blocks, as they may be memory-mapped."""
    return all(bool(((rows == IGNORED) | ((rows >= 0) & (rows < count))).all()) for rows in labels.split(_ROWS))


def known(numbers: Mapping[str, Array]) -> dict[str, float]:
    """The numbers that are finite."""
    return {name: float(value) for name, value in numbers.items() if np.isfinite(value)}


def share(part: Array, whole: Array) -> Array:
    """part / whole, NaN where the whole is 0."""
    parts, wholes = np.broadcast_arrays(part, whole)
    found = np.full(parts.shape, np.nan)
    np.divide(parts, wholes, out=found, where=wholes != 0)
    return found


def mean_of_known(values: Array) -> Array:
    """[..., k] -> [...]: mean of the values that are not NaN; NaN if all are."""
    is_known = ~np.isnan(values)
    return share(np.where(is_known, values, 0.0).sum(-1), is_known.sum(-1).astype(np.float64))
