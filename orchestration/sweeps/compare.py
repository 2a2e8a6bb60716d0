"""The section ``compare`` of a sweep file: the metric by which settings are compared. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.registry import one_of
from dpsweep.orchestration.sweeps.fields import SweepSection
from dpsweep.orchestration.sweeps.text import shortly
from dpsweep.workers.evaluation import rates
from dpsweep.workers.tasks import TASKS, Task

_SHORT: Final[Mapping[object, str]] = {"tpr": "true_positive_rate", "fpr": "false_positive_rate"}


def _full_name(value: object) -> object:
    return _SHORT.get(value, value) if isinstance(value, str) else value


def _points(value: object) -> object:
    """Read ``3 points`` as 0.03; a number is a share."""
    text = value.split() if isinstance(value, str) else []
    if len(text) == 2 and text[1] in ("point", "points"):
        try:
            return float(text[0]) / 100.0
        except ValueError:
            pass
    if isinstance(value, str):
        raise InvalidInput(f"detect is {shortly(value)!r}; give percentage points, such as: 3 points")
    return value


class CompareSettings(SweepSection):
    """Metric by which settings are compared. A change of it trains nothing again."""

    worst_group: Annotated[
        Literal[
            "accuracy",
            "accuracy_change",
            "user_accuracy",
            "balanced_accuracy",
            "true_positive_rate",
            "false_positive_rate",
            "precision",
            "log_loss",
            "calibration_error",
            "r2",
            "r2_change",
            "mse",
            "mae",
            "micro_f1",
            "micro_f1_change",
            "macro_f1",
            "label_accuracy",
            "exact_match",
            "token_accuracy",
            "token_accuracy_change",
            "perplexity",
            "token_loss",
            "mean_iou",
            "mean_iou_change",
            "mean_dice",
            "pixel_accuracy",
        ]
        | None,
        BeforeValidator(_full_name),
    ] = None
    """Metric of groups; a setting is compared by its value for the group where it is worst. By default accuracy, or the
    main score of another task: r2, micro_f1, token_accuracy, mean_iou. ``tpr`` and ``fpr`` are short names."""
    detect: Annotated[float, Field(gt=0.0, lt=1.0), BeforeValidator(_points)] | None = None
    """Smallest difference in accuracy that the sweep should show, such as ``3 points``; `dpsweep plan` warns if the
    planned seeds and test examples cannot."""
    looks: Annotated[int, Field(ge=0, le=1000)] = 0
    """Number of times that verdicts were read to decide whether to add seeds; written by ``dpsweep run --until``."""


def _names(task: Task) -> tuple[str, ...]:
    return tuple(score.name for score in task.scores)


def require_defined(compare: CompareSettings, data: str, classes: int, task: str = "classification") -> None:
    """Check that ``compare.worst_group`` is defined for the data.

    data: name of the data, for errors. classes: number of classes. Raises: InvalidInput for a metric that the task does
    not have, or that is defined for two classes only.
    """
    name = compare.worst_group
    if name is None:
        return
    others = {
        score: each.name for each in TASKS.values() if each.scores for score in (*_names(each), f"{each.main}_change")
    }
    if others.get(name, "classification") != task:
        known = _names(TASKS[task]) if TASKS[task].scores else ("accuracy", "balanced_accuracy", "log_loss")
        raise InvalidInput(f"compare.worst_group is {name}, which {task} does not have; choose {one_of(known)}")
    if name in rates.OF_TWO_CLASSES and classes != 2:
        raise InvalidInput(
            f"compare.worst_group is {name}, which needs two classes, but {data} has {classes}; choose accuracy, "
            "balanced_accuracy, log_loss or calibration_error"
        )
