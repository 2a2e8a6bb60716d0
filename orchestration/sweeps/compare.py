"""What settings are compared by. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator

from accounting.errors import InvalidInput
from accounting.registry import one_of
from orchestration.sweeps.fields import SweepSection
from workers import rates
from workers.tasks import TASKS, Task

_SHORT: Final[Mapping[object, str]] = {"tpr": "true_positive_rate", "fpr": "false_positive_rate"}


def _full_name(value: object) -> object:
    return _SHORT.get(value, value) if isinstance(value, str) else value


class CompareSettings(SweepSection):
    """What settings are compared by, besides accuracy or the main score of another task. It changes no trial: another
    one needs no training."""

    worst_group: Annotated[
        Literal[
            "accuracy",
            "accuracy_change",
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
    """A metric of groups; the group for which it is worst stands for the setting. ``tpr`` and ``fpr`` are short for the
    true and the false positive rate. By default accuracy, or what stands in its place for the task of the data: r2,
    micro_f1, token_accuracy."""


def _names(task: Task) -> tuple[str, ...]:
    return tuple(score.name for score in task.scores)


def require_defined(compare: CompareSettings, data: str, classes: int, task: str = "classification") -> None:
    """Raises: InvalidInput for a metric that data of this task, or with so many classes, do not have."""
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
