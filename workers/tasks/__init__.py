"""Learning tasks by name. A new task is one file and one line of `TASKS`; importing this does not load torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dpsweep.accounting.registry import lookup
from dpsweep.workers.tasks.classification import Classification
from dpsweep.workers.tasks.language_modelling import LanguageModelling
from dpsweep.workers.tasks.multi_label import MultiLabel
from dpsweep.workers.tasks.regression import Regression
from dpsweep.workers.tasks.segmentation import Segmentation
from dpsweep.workers.tasks.task import IGNORED, Score, ScoreUnit, Task, finite_numbers, labelled, require_indices, share

TASKS: Final[Mapping[str, Task]] = {
    "classification": Classification(),
    "language_modelling": LanguageModelling(),
    "multi_label": MultiLabel(),
    "regression": Regression(),
    "segmentation": Segmentation(),
}
"""Tasks by name."""
MAIN_SCORES: Final = tuple(task.main for task in TASKS.values())
"""Name of the main score of each task, by which its models are compared first; no two tasks share a score name."""


def task_called(name: str) -> Task:
    """Return the task called ``name``. Raises: InvalidInput naming the nearest valid name."""
    return lookup(TASKS, name, "task")


def main_score(accuracy: float | None, scores: Mapping[str, float]) -> float | None:
    """Return the main score of some examples, given their accuracy and other scores; None if it is not defined.

    >>> main_score(None, {"mse": 4.0, "r2": 0.5})
    0.5
    """
    if accuracy is not None:
        return accuracy
    return next((scores[name] for name in MAIN_SCORES if name in scores), None)


__all__ = [
    "IGNORED",
    "MAIN_SCORES",
    "TASKS",
    "Score",
    "ScoreUnit",
    "Task",
    "finite_numbers",
    "labelled",
    "losses",
    "main_score",
    "require_indices",
    "share",
    "task_called",
]
