"""Metrics of tasks besides classification: every score of `dpsweep.workers.tasks`, over all examples and by group.

They are entries of `metrics.METRICS` and `rate_metrics.GROUP_METRICS`, where callers look metrics up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from dpsweep.orchestration.comparison.entries import GroupMetric, Metric, MetricTable
from dpsweep.orchestration.comparison.extremes import Extreme
from dpsweep.orchestration.comparison.formats import CHANGE, FIT, GAP, NUMBER, PERCENT, POINTS, Format
from dpsweep.orchestration.comparison.tested import (
    by_group,
    change_by_group_of,
    change_of,
    of_sums,
    over_groups,
    overall,
)
from dpsweep.orchestration.comparison.values import Value, gap_between_groups, on_training
from dpsweep.orchestration.store.published import PublishedGroup
from dpsweep.workers.evaluation import rates
from dpsweep.workers.tasks import TASKS, Score, Task, Unit

_FORMATS: Final[Mapping[Unit, Format]] = {"share": PERCENT, "number": NUMBER, "fit": FIT}


def _metrics(task: Task) -> Iterator[Metric]:
    for score in task.scores:
        is_main = score.name == task.main
        yield Metric(
            score.name,
            f"final/{score.name}",
            score.heading,
            _score(score.name),
            _FORMATS[score.unit],
            score.meaning + (_TESTED if is_main else ""),
            frozenset(MetricTable) if is_main else frozenset({MetricTable.SETTINGS, MetricTable.FAIRNESS}),
            of_model=True,
            better=score.better,
            measure=overall(of_sums(task.name, score.of)),
            task=task.name,
        )
        if is_main:
            yield from _compared(task, score)


_TESTED: Final = (
    " It, loss and groups are computed on held-out test data, which the guarantee does not cover: the models do not "
    "depend on it, this page does."
)


def on_training_examples(name: str, heading: str, shown: Format, task: str) -> Metric:
    """Return the metric for the main score of a task on training examples. name: name of the score on test examples."""
    return Metric(
        f"training_{name}",
        f"final/training_{name}",
        heading,
        on_training,
        shown,
        "The final model on its own training examples. The better than on test data, the more it tells who they are: "
        "guessing that an example was trained on if it is predicted right then succeeds more often (Yeom et al. 2018).",
        of_model=True,
        exact=True,
        task=task,
    )


def on_training_examples_of_group(name: str, heading: str, shown: Format, task: str) -> GroupMetric:
    """Return the group metric for the main score of a task on the group's training examples."""
    return GroupMetric(f"training_{name}", heading, lambda group: group.on_training, shown, task=task)


def _compared(task: Task, score: Score) -> Iterator[Metric]:
    """Metrics from the main score: change against the baseline, gap between groups, and value on training examples."""
    is_share, of = score.unit == "share", of_sums(task.name, score.of)
    points = ", points" if is_share else ""
    yield Metric(
        f"{score.name}_change",
        f"fairness/{score.name}_change",
        f"Change{points}",
        _score(f"{score.name}_change"),
        POINTS if is_share else CHANGE,
        f"Private minus non-private {score.heading}, same data, model and seed. No guarantee covers the non-private "
        "baseline, and therefore none covers this change.",
        frozenset({MetricTable.SETTINGS, MetricTable.TERMINAL}),
        of_model=True,
        better=score.better,
        measure=change_of(of),
        task=task.name,
    )
    yield Metric(
        f"{score.name}_gap",
        f"fairness/{score.name}_gap",
        f"{score.heading} gap{points}",
        gap_between_groups(_of_group(score.name)),
        GAP if is_share else NUMBER,
        "The best minus the worst of a group.",
        frozenset({MetricTable.FAIRNESS}),
        of_model=True,
        better="lower",
        measure=over_groups(by_group(of), rates.gap),
        task=task.name,
        extreme=Extreme("gap", (score.name,)),
    )
    yield on_training_examples(score.name, f"Training {score.heading}", _FORMATS[score.unit], task.name)


def _of_groups(task: Task) -> Iterator[GroupMetric]:
    for score in task.scores:
        of = of_sums(task.name, score.of)
        yield GroupMetric(
            score.name,
            score.heading,
            _of_group(score.name),
            _FORMATS[score.unit],
            score.better,
            by_group(of),
            task.name,
        )
        if score.name == task.main:
            heading, shown = f"Training {score.heading}", _FORMATS[score.unit]
            yield on_training_examples_of_group(score.name, heading, shown, task.name)
            is_share, name = score.unit == "share", f"{score.name}_change"
            heading = f"Change{', points' if is_share else ''}"
            shown = POINTS if is_share else CHANGE
            yield GroupMetric(name, heading, _of_group(name), shown, score.better, change_by_group_of(of), task.name)


def _score(name: str) -> Value:
    return lambda trial: trial.quality.scores.get(name) if trial.quality else None


def _of_group(name: str) -> Callable[[PublishedGroup], float | None]:
    return lambda group: group.scores.get(name)


SCORE_METRICS: Final = tuple(metric for task in TASKS.values() for metric in _metrics(task))
SCORE_GROUP_METRICS: Final = tuple(metric for task in TASKS.values() for metric in _of_groups(task))
