"""Metrics of test examples: the scores of every task, rates, those by group and of the worst group, and gaps.

They are entries of `metrics.METRICS`, where callers look metrics up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from dpsweep.accounting.registry import lookup
from dpsweep.orchestration.comparison.extremes import Extreme
from dpsweep.orchestration.comparison.formats import (
    CHANGE,
    CORRELATION,
    COUNT,
    FIT,
    GAP,
    NUMBER,
    PERCENT,
    POINTS,
    Format,
    in_a_sentence,
)
from dpsweep.orchestration.comparison.metric_types import Better, GroupMetric, Metric, MetricTable
from dpsweep.orchestration.comparison.tallies import (
    ACCURACY,
    Statistic,
    between_groups,
    by_group,
    change,
    log_loss,
    of_counts,
    of_sums,
    of_two,
    over_groups,
    over_users,
    overall,
    tested_calibration_error,
)
from dpsweep.orchestration.comparison.values import (
    MAJORITY,
    Value,
    gap_between_groups,
    in_training,
    on_training,
    score_of_counts,
)
from dpsweep.orchestration.store.published import PublishedGroup, PublishedTrial, task_of
from dpsweep.workers.evaluation import rates
from dpsweep.workers.tasks import MAIN_SCORES, TASKS, Score, ScoreUnit, Task

_FORMATS: Final[Mapping[ScoreUnit, Format]] = {"share": PERCENT, "number": NUMBER, "fit": FIT}


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


def _on_training(name: str, heading: str, shown: Format, task: str) -> Metric:
    """Return the metric for the main score of a task on training examples. name: name of the score on test examples."""
    return Metric(
        f"training_{name}",
        f"final/training_{name}",
        heading,
        lambda trial: on_training(trial) if task_of([trial]) == task else None,
        shown,
        "The final model on its own training examples. The better than on test data, the more it tells who they are: "
        "guessing that an example was trained on if it is predicted right then succeeds more often (Yeom et al. 2018).",
        of_model=True,
        exact=True,
        task=task,
    )


def _on_training_of_group(name: str, heading: str, shown: Format, task: str) -> GroupMetric:
    """Return the group metric for the main score of a task on the group's training examples."""
    return GroupMetric(f"training_{name}", heading, lambda group: group.on_training, shown, task=task)


def _compared(task: Task, score: Score) -> Iterator[Metric]:
    """Yield metrics of a main score: its change, its gap between groups, and its value on training examples."""
    of, (heading, shown) = of_sums(task.name, score.of), _as_change(score)
    yield Metric(
        f"{score.name}_change",
        f"fairness/{score.name}_change",
        heading,
        _score(f"{score.name}_change"),
        shown,
        f"Private minus non-private {in_a_sentence(score.heading)}, same data, model and seed. No guarantee covers the "
        "non-private baseline, and therefore none covers this change.",
        frozenset({MetricTable.SETTINGS, MetricTable.TERMINAL}),
        of_model=True,
        better=score.better,
        measure=change(overall(of)),
        task=task.name,
    )
    yield Metric(
        f"{score.name}_gap",
        f"fairness/{score.name}_gap",
        f"{score.heading} gap{heading.removeprefix('Change')}",
        gap_between_groups(_of_group(score.name)),
        GAP if shown is POINTS else NUMBER,
        "The best minus the worst of a group.",
        frozenset({MetricTable.FAIRNESS}),
        of_model=True,
        better="lower",
        measure=over_groups(by_group(of), rates.gap),
        task=task.name,
        extreme=Extreme("gap", (score.name,)),
    )
    yield _on_training(score.name, f"Training {in_a_sentence(score.heading)}", _FORMATS[score.unit], task.name)


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
            heading = f"Training {in_a_sentence(score.heading)}"
            yield _on_training_of_group(score.name, heading, _FORMATS[score.unit], task.name)
            name, (heading, shown) = f"{score.name}_change", _as_change(score)
            yield GroupMetric(name, heading, _of_group(name), shown, score.better, change(by_group(of)), task.name)


def _as_change(score: Score) -> tuple[str, Format]:
    """Return heading and format of changes of a score."""
    return ("Change, points", POINTS) if score.unit == "share" else ("Change", CHANGE)


def _score(name: str) -> Value:
    return lambda trial: trial.quality.scores.get(name) if trial.quality else None


def _of_group(name: str) -> Callable[[PublishedGroup], float | None]:
    return lambda group: group.scores.get(name)


SCORE_METRICS: Final = tuple(metric for task in TASKS.values() for metric in _metrics(task))
SCORE_GROUP_METRICS: Final = tuple(metric for task in TASKS.values() for metric in _of_groups(task))


def _between_groups(name: str, heading: str, extreme: Extreme, meaning: str = "") -> Metric:
    """Return the metric for a gap or ratio between groups, called ``name`` in `dpsweep.workers.evaluation.rates`."""
    is_gap = extreme.kind == "gap"
    return Metric(
        name,
        f"fairness/{name}",
        heading,
        lambda trial: trial.quality.fairness.get(name) if trial.quality else None,
        GAP if is_gap else CORRELATION,
        meaning,
        frozenset({MetricTable.FAIRNESS}),
        of_model=True,
        better="lower" if is_gap else "higher",
        measure=between_groups(name),
        task="classification",
        extreme=extreme,
    )


_Rate = tuple[str, str, Statistic, Format, Better, str]
_RATES: tuple[_Rate, ...] = (
    (
        "balanced_accuracy",
        "Balanced accuracy",
        of_counts(rates.balanced_accuracy),
        PERCENT,
        "higher",
        "The mean over classes of the share of their test examples that is predicted right; a constant prediction of K "
        "classes has 1/K.",
    ),
    ("true_positive_rate", "TPR", of_two("true_positive_rate"), PERCENT, "higher", ""),
    ("false_positive_rate", "FPR", of_two("false_positive_rate"), PERCENT, "lower", ""),
    ("precision", "Precision", of_two("precision"), PERCENT, "higher", ""),
    ("selection_rate", "Selected", of_two("selection_rate"), PERCENT, "", ""),
)
"""Rates of all test examples, and of each group: name, heading, the rate itself, format, direction, meaning."""
_OF_PROBABILITIES: tuple[_Rate, ...] = (
    ("log_loss", "Log loss", log_loss, NUMBER, "lower", ""),
    (
        "calibration_error",
        "Calibration error",
        tested_calibration_error,
        PERCENT,
        "lower",
        "The difference between the probability of the predicted class and how often it is right, in 15 equal bins of "
        "that probability, averaged over test examples (Guo et al. 2017).",
    ),
)


def _rate(name: str, heading: str, score: Statistic, shown: Format, better: Better, meaning: str) -> Metric:
    return Metric(
        name,
        f"final/{name}",
        heading,
        lambda trial: score_of_counts(trial.quality.counts, score) if trial.quality else None,
        shown,
        meaning,
        frozenset({MetricTable.FAIRNESS}),
        of_model=True,
        better=better,
        measure=overall(score),
        task="classification",
    )


def _group_rate(name: str, heading: str, score: Statistic, shown: Format, better: Better, meaning: str) -> GroupMetric:
    value, measure = (lambda group: score_of_counts(group.counts, score)), by_group(score)
    return GroupMetric(name, heading, value, shown, better, measure, "classification")


_ODDS: Final = ("true_positive_rate", "false_positive_rate")

RATE_METRICS = (
    _between_groups(
        "accuracy_gap",
        "Accuracy gap, points",
        Extreme("gap", ("accuracy",)),
        "The best minus the worst accuracy of a group, in points.",
    ),
    _between_groups(
        "demographic_parity_difference",
        "Demographic parity, difference, points",
        Extreme("gap", ("selection_rate",)),
        "The largest minus the smallest share of a group that is predicted as class 1. A model that predicts "
        "the same class for everybody has 0.",
    ),
    _between_groups(
        "demographic_parity_ratio",
        "Demographic parity, ratio",
        Extreme("ratio", ("selection_rate",)),
        "The smallest over the largest such share.",
    ),
    _between_groups(
        "equalized_odds_difference",
        "Equalised odds, difference, points",
        Extreme("gap", _ODDS),
        "The larger of the gaps between groups in true and in false positive rate, in points.",
    ),
    _between_groups(
        "equalized_odds_ratio",
        "Equalised odds, ratio",
        Extreme("ratio", _ODDS),
        "The smaller of the ratios between groups of true and of false positive rate.",
    ),
    _between_groups(
        "equal_opportunity_difference",
        "Equal opportunity, difference, points",
        Extreme("gap", ("true_positive_rate",)),
        "The largest minus the smallest true positive rate of a group, in points; the gap in false negative rate is "
        "the same.",
    ),
    _between_groups("equal_opportunity_ratio", "Equal opportunity, ratio", Extreme("ratio", ("true_positive_rate",))),
    _between_groups(
        "false_positive_rate_difference",
        "FPR, difference, points",
        Extreme("gap", ("false_positive_rate",)),
        "The largest minus the smallest false positive rate of a group, in points.",
    ),
    Metric(
        "user_accuracy",
        "final/user_accuracy",
        "Accuracy over users",
        lambda trial: trial.quality.user_accuracy if trial.quality else None,
        PERCENT,
        "The mean over users of the share of their test examples that is predicted right, so that everybody counts "
        "once; in a group, by their examples there.",
        frozenset({MetricTable.FAIRNESS}),
        of_model=True,
        better="higher",
        measure=over_users(overall(ACCURACY)),
        task="classification",
    ),
    Metric(
        "user_accuracy_gap",
        "fairness/user_accuracy_gap",
        "Gap over users, points",
        gap_between_groups(lambda group: group.user_accuracy),
        GAP,
        "The best minus the worst accuracy over users of a group, in points.",
        frozenset({MetricTable.FAIRNESS}),
        of_model=True,
        better="lower",
        measure=over_users(over_groups(by_group(ACCURACY), rates.gap)),
        task="classification",
        extreme=Extreme("gap", ("user_accuracy",)),
    ),
    *(_rate(*each) for each in _RATES),
    _rate(
        "majority_class_rate",
        "Majority class",
        MAJORITY,
        PERCENT,
        "",
        "The share of the most frequent class: the accuracy of a model that always predicts it.",
    ),
    _on_training("accuracy", "Training accuracy", PERCENT, "classification"),
    *(_rate(*each) for each in _OF_PROBABILITIES),
)
GROUP_METRICS = (
    GroupMetric("test_examples", "Examples", lambda group: group.test_examples, COUNT),
    GroupMetric(
        "accuracy",
        "Accuracy",
        lambda group: group.accuracy,
        PERCENT,
        "higher",
        by_group(ACCURACY),
        "classification",
    ),
    GroupMetric(
        "user_accuracy",
        "Accuracy over users",
        lambda group: group.user_accuracy,
        PERCENT,
        "higher",
        over_users(by_group(ACCURACY)),
        "classification",
    ),
    GroupMetric(
        "accuracy_change",
        "Change, points",
        lambda group: group.accuracy_change,
        POINTS,
        "higher",
        change(by_group(ACCURACY)),
        "classification",
    ),
    *(_group_rate(*each) for each in _RATES),
    *SCORE_GROUP_METRICS,
    GroupMetric("loss", "Loss", lambda group: group.loss, NUMBER, "lower"),
    *(_group_rate(*each) for each in _OF_PROBABILITIES),
    _on_training_of_group("accuracy", "Training accuracy", PERCENT, "classification"),
    GroupMetric("training_loss", "Training loss", in_training("losses"), NUMBER),
    GroupMetric("gradient_norm", "Gradient norm", in_training("norms"), NUMBER),
    GroupMetric("clipping_bias", "Clipping bias", in_training("biases"), NUMBER),
    GroupMetric("noise_error", "Noise", in_training("noises"), NUMBER),
)
"""Metrics of each group of the test data that is large enough to be shown."""
_BY_NAME: Final = {each.name: each for each in GROUP_METRICS}


def _worst(of: GroupMetric) -> Metric:
    """Return the metric of a trial that is the worst value of a group metric over its groups."""
    is_least = of.better == "higher"

    def known(trial: PublishedTrial) -> dict[str, float]:
        found = {group.name: of.value(group) for group in (trial.quality.groups if trial.quality else ())}
        return {name: value for name, value in found.items() if value is not None and math.isfinite(value)}

    def value(trial: PublishedTrial) -> float | None:
        return (min if is_least else max)(known(trial).values(), default=None)

    def whose(trial: PublishedTrial) -> tuple[str, ...]:
        found, worst = known(trial), value(trial)
        names = tuple(name for name, each in found.items() if each == worst)
        return names if len(names) < len(found) or len(found) == 1 else ()

    return Metric(
        f"worst_group_{of.name}",
        f"fairness/worst_group_{of.name}",
        "Worst-served group" if of.name in MAIN_SCORES else f"Worst {spoken(of)}{', points' * (of.format is POINTS)}",
        value,
        of.format,
        f"The group of the test data with the lowest {spoken(of)}, and that {spoken(of)}."
        if of.name in MAIN_SCORES
        else "",
        frozenset({MetricTable.FAIRNESS}),
        of_model=True,
        whose=whose,
        better=of.better,
        measure=of.measure and over_groups(of.measure, rates.lowest if is_least else rates.highest, least=1),
        task=of.task,
        extreme=Extreme("lowest" if is_least else "highest", (of.name,)),
    )


def spoken(of: GroupMetric) -> str:
    """Return the heading of a group metric inside a sentence."""
    return in_a_sentence(of.heading)


WORST_GROUP_METRICS: Final[Mapping[str, Metric]] = {
    each.name: _worst(each) for each in GROUP_METRICS if each.better and each.measure is not None
}
"""Worst value over groups, by name of the group metric. ``compare.worst_group`` of a sweep names the one that compares
its settings."""


def spoken_worst(of: Metric) -> str:
    """Return the group metric behind a metric of `WORST_GROUP_METRICS`, inside a sentence: "accuracy", "TPR"."""
    return next(spoken(group_metric(name)) for name, each in WORST_GROUP_METRICS.items() if each is of)


def group_metric(name: str) -> GroupMetric:
    """Return the group metric called ``name``. Raises: InvalidInput naming the nearest."""
    return lookup(_BY_NAME, name, "metric of groups")
