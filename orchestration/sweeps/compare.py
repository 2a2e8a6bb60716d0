"""What settings are compared by. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator

from accounting.errors import InvalidInput
from orchestration.sweeps.fields import Settings
from workers import rates

_SHORT: Final[Mapping[object, str]] = {"tpr": "true_positive_rate", "fpr": "false_positive_rate"}


def _full_name(value: object) -> object:
    return _SHORT.get(value, value) if isinstance(value, str) else value


class CompareSettings(Settings):
    """What settings are compared by, besides accuracy. It changes no trial: another one needs no training."""

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
        ],
        BeforeValidator(_full_name),
    ] = "accuracy"
    """A metric of groups; the group for which it is worst stands for the setting. ``tpr`` and ``fpr`` are short for the
    true and the false positive rate."""


def require_defined(compare: CompareSettings, data: str, classes: int) -> None:
    """Raises: InvalidInput for a metric that data with so many classes do not have."""
    name = compare.worst_group
    if name in rates.OF_TWO_CLASSES and classes != 2:
        raise InvalidInput(
            f"compare.worst_group is {name}, which needs two classes, but {data} has {classes}; choose accuracy, "
            "balanced_accuracy, log_loss or calibration_error"
        )
