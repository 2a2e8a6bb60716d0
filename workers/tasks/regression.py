"""Regression: one or several real numbers for each example."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import numpy as np

from dpsweep.accounting.errors import InvalidInput, count_of
from dpsweep.workers.tasks.task import Array, Score, Task, by_name, mean_of_known, share, wrong_form

if TYPE_CHECKING:
    from torch import Tensor

_CONSTANT_SHARE: Final = 1e-12
"""Targets whose variance is at most this share of their mean square are treated as constant up to rounding."""


def _blocks(sums: Array) -> tuple[Array, Array, Array, Array, Array]:
    """Return the number of examples [..., 1], and sums [..., T] of squared errors, absolute errors, targets and
    squares.
    """
    count, rest = sums[..., :1], sums[..., 1:]
    squared, absolute, targets, squares = np.split(rest, 4, axis=-1)
    return count, squared, absolute, targets, squares


def _explained(sums: Array) -> Array:
    """Return R^2: 1 - squared errors over squared deviations from the mean; NaN for constant targets."""
    count, squared, _, targets, squares = _blocks(sums)
    deviations = squares - share(targets**2, count)
    return 1.0 - share(squared, np.where(deviations > _CONSTANT_SHARE * squares, deviations, 0.0))


_TARGET_SCORES: Final[Mapping[str, Callable[[Array], Array]]] = {
    "r2": _explained,
    "mse": lambda sums: share(_blocks(sums)[1], sums[..., :1]),
    "mae": lambda sums: share(_blocks(sums)[2], sums[..., :1]),
}


class Regression(Task):
    """Labels: float32 [n, T], finite. Outputs: a number for each of T targets."""

    name = "regression"
    main = "r2"
    least_names = 1
    scores = (
        Score(
            "r2",
            "R²",
            "higher",
            "fit",
            lambda sums: mean_of_known(_explained(sums)),
            "One minus the squared errors over those of always predicting the mean of the examples it is computed on, "
            "a group's own for a group; the mean over targets. 0 for that constant, negative for worse.",
        ),
        Score(
            "mse",
            "Mean squared error",
            "lower",
            "number",
            lambda sums: np.asarray(_TARGET_SCORES["mse"](sums).mean(-1)),
            "In squared units of the target, scaled to [0, 1] where it has a range; the mean over targets.",
        ),
        Score(
            "mae",
            "Mean absolute error",
            "lower",
            "number",
            lambda sums: np.asarray(_TARGET_SCORES["mae"](sums).mean(-1)),
            "In units of the target, scaled to [0, 1] where it has a range; the mean over targets.",
        ),
    )

    def check_labels(self, what: str, labels: Tensor, names: tuple[str, ...]) -> None:
        if labels.ndim != 2 or labels.shape[1] != len(names) or not labels.is_floating_point():
            takes = f"regression takes float32 [n, {len(names)}]: a number for each of {', '.join(names)}"
            raise wrong_form(what, labels, takes)
        if not bool(labels.isfinite().all()):
            raise InvalidInput(f"{what} hold a number that is not finite; leave such examples out, or correct them")

    def outputs(self, names: tuple[str, ...]) -> str:
        return f"one number for each of {count_of(len(names), 'target')}"

    def kept(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return [b, 1 + 4 T]: 1, then squared errors, absolute errors, targets and squared targets, each for T
        targets.
        """
        import torch  # late: sweep files do not need it

        targets, errors = labels.double(), outputs.double() - labels.double()
        return torch.cat((torch.ones_like(errors[:, :1]), errors**2, errors.abs(), targets, targets**2), 1)

    def constant(self, labels: Tensor, names: tuple[str, ...]) -> float | None:
        """Return 0, which is R² of the mean by definition."""
        return 0.0

    def parts(self, sums: Array, names: tuple[str, ...]) -> Mapping[str, Mapping[str, float]]:
        """Return scores of each target if there are several; empty for one."""
        if len(names) == 1:
            return {}
        return by_name({score: of(sums) for score, of in _TARGET_SCORES.items()}, names)
