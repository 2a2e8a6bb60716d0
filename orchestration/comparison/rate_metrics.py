"""Metrics computed from counts of test examples: overall rates, rates by group and of the worst group, and gaps.

They are entries of `metrics.METRICS`, where callers look metrics up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from dpsweep.accounting.registry import lookup
from dpsweep.orchestration.comparison.entries import Better, GroupMetric, Metric, MetricTable
from dpsweep.orchestration.comparison.extremes import Extreme
from dpsweep.orchestration.comparison.formats import CORRELATION, COUNT, GAP, NUMBER, PERCENT, POINTS, Format
from dpsweep.orchestration.comparison.score_metrics import (
    SCORE_GROUP_METRICS,
    on_training_examples,
    on_training_examples_of_group,
)
from dpsweep.orchestration.comparison.tested import (
    Score,
    between_groups,
    by_group,
    calibration_error,
    change_by_group,
    log_loss,
    of_counts,
    of_two,
    over_groups,
    over_users,
    overall,
)
from dpsweep.orchestration.comparison.values import MAJORITY, Value, counted, gap_between_groups, in_training
from dpsweep.orchestration.store.published import PublishedTrial
from dpsweep.workers.evaluation import rates
from dpsweep.workers.tasks import MAIN_SCORES

_GAPS: tuple[tuple[str, Extreme, str, Format, Better, str], ...] = (
    (
        "accuracy_gap",
        Extreme("gap", ("accuracy",)),
        "Accuracy gap",
        GAP,
        "lower",
        "The best minus the worst accuracy of a group, in points.",
    ),
    (
        "demographic_parity_difference",
        Extreme("gap", ("selection_rate",)),
        "Demographic parity, difference",
        GAP,
        "lower",
        "The largest minus the smallest share of a group that is predicted as class 1. A model that predicts "
        "the same class for everybody has 0.",
    ),
    (
        "demographic_parity_ratio",
        Extreme("ratio", ("selection_rate",)),
        "Demographic parity, ratio",
        CORRELATION,
        "higher",
        "The smallest over the largest such share.",
    ),
    (
        "equalized_odds_difference",
        Extreme("gap", ("true_positive_rate", "false_positive_rate")),
        "Equalised odds, difference",
        GAP,
        "lower",
        "The larger of the gaps between groups in true and in false positive rate, in points.",
    ),
    (
        "equalized_odds_ratio",
        Extreme("ratio", ("true_positive_rate", "false_positive_rate")),
        "Equalised odds, ratio",
        CORRELATION,
        "higher",
        "The smaller of the ratios between groups of true and of false positive rate.",
    ),
    (
        "equal_opportunity_difference",
        Extreme("gap", ("true_positive_rate",)),
        "Equal opportunity, difference",
        GAP,
        "lower",
        "The largest minus the smallest true positive rate of a group, in points; the gap in false negative rate is "
        "the same.",
    ),
    (
        "equal_opportunity_ratio",
        Extreme("ratio", ("true_positive_rate",)),
        "Equal opportunity, ratio",
        CORRELATION,
        "higher",
        "",
    ),
    (
        "false_positive_rate_difference",
        Extreme("gap", ("false_positive_rate",)),
        "FPR, difference",
        GAP,
        "lower",
        "The largest minus the smallest false positive rate of a group, in points.",
    ),
)
"""Gaps between groups: name in `dpsweep.workers.evaluation.rates`, the extreme that it is, heading, format, direction,
meaning."""
_Rate = tuple[str, str, Score, Format, Better, str]
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
        calibration_error,
        PERCENT,
        "lower",
        "The difference between the probability of the predicted class and how often it is right, in 15 equal bins of "
        "that probability, averaged over test examples (Guo et al. 2017).",
    ),
)


def _rate(name: str, heading: str, score: Score, shown: Format, better: Better, meaning: str) -> Metric:
    return Metric(
        name,
        f"final/{name}",
        heading,
        lambda trial: counted(trial.quality.counts, score) if trial.quality else None,
        shown,
        meaning,
        frozenset({MetricTable.FAIRNESS}),
        of_model=True,
        better=better,
        measure=overall(score),
        task="classification",
    )


def _group_rate(name: str, heading: str, score: Score, shown: Format, better: Better, meaning: str) -> GroupMetric:
    value, measure = (lambda group: counted(group.counts, score)), by_group(score)
    return GroupMetric(name, heading, value, shown, better, measure, "classification")


def _fairness(name: str) -> Value:
    return lambda trial: trial.quality.fairness.get(name) if trial.quality else None


RATE_METRICS = (
    *(
        Metric(
            name,
            f"fairness/{name}",
            heading,
            _fairness(name),
            shown,
            meaning,
            frozenset({MetricTable.FAIRNESS}),
            of_model=True,
            better=better,
            measure=between_groups(name),
            task="classification",
            extreme=extreme,
        )
        for name, extreme, heading, shown, better, meaning in _GAPS
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
        measure=over_users(overall(of_counts(rates.accuracy))),
        task="classification",
    ),
    Metric(
        "user_accuracy_gap",
        "fairness/user_accuracy_gap",
        "Gap over users",
        gap_between_groups(lambda group: group.user_accuracy),
        GAP,
        "The best minus the worst accuracy over users of a group, in points.",
        frozenset({MetricTable.FAIRNESS}),
        of_model=True,
        better="lower",
        measure=over_users(over_groups(by_group(of_counts(rates.accuracy)), rates.gap)),
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
    on_training_examples("accuracy", "Training accuracy", PERCENT, "classification"),
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
        by_group(of_counts(rates.accuracy)),
        "classification",
    ),
    GroupMetric(
        "user_accuracy",
        "Accuracy over users",
        lambda group: group.user_accuracy,
        PERCENT,
        "higher",
        over_users(by_group(of_counts(rates.accuracy))),
        "classification",
    ),
    GroupMetric(
        "accuracy_change",
        "Change, points",
        lambda group: group.accuracy_change,
        POINTS,
        "higher",
        change_by_group,
        "classification",
    ),
    *(_group_rate(*each) for each in _RATES),
    *SCORE_GROUP_METRICS,
    GroupMetric("loss", "Loss", lambda group: group.loss, NUMBER, "lower"),
    *(_group_rate(*each) for each in _OF_PROBABILITIES),
    on_training_examples_of_group("accuracy", "Training accuracy", PERCENT, "classification"),
    GroupMetric("training_loss", "Training loss", in_training("losses"), NUMBER),
    GroupMetric("gradient_norm", "Gradient norm", in_training("norms"), NUMBER),
    GroupMetric("clipping_bias", "Clipping bias", in_training("biases"), NUMBER),
    GroupMetric("noise_error", "Noise", in_training("noises"), NUMBER),
)
"""Metrics of each group of the test data that is large enough to be shown."""


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
        "Worst-served group" if of.name in MAIN_SCORES else f"Worst {spoken(of)}",
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
    words = of.heading.removesuffix(", points")
    return words if words.isupper() else words[0].lower() + words[1:]


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
    return lookup({each.name: each for each in GROUP_METRICS}, name, "metric of groups")
