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
    Measure,
    Tested,
    between_groups,
    by_group,
    calibration_error,
    change_by_group,
    gap_of,
    log_loss,
    of_two,
    over_users,
    overall,
)
from dpsweep.orchestration.comparison.tested import of_counts as rate_of
from dpsweep.orchestration.comparison.values import (
    counted,
    fairness,
    in_training,
    majority_rate,
    of_counts,
    of_two_classes,
    score,
    two_classes,
    user_accuracy,
    user_accuracy_gap,
)
from dpsweep.orchestration.store.published import PublishedTrial
from dpsweep.workers.evaluation import rates
from dpsweep.workers.evaluation.rates import Array
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
_OF_TWO_CLASSES: tuple[tuple[str, str, Better], ...] = (
    ("true_positive_rate", "TPR", "higher"),
    ("false_positive_rate", "FPR", "lower"),
    ("precision", "Precision", "higher"),
    ("selection_rate", "Selected", ""),
)
RATE_METRICS = (
    *(
        Metric(
            name,
            f"fairness/{name}",
            heading,
            fairness(name),
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
        user_accuracy,
        PERCENT,
        "The mean over users of the share of their test examples that is predicted right, so that everybody counts "
        "once; in a group, by their examples there.",
        frozenset({MetricTable.FAIRNESS}),
        of_model=True,
        better="higher",
        measure=over_users(overall(rate_of(rates.accuracy))),
        task="classification",
    ),
    Metric(
        "user_accuracy_gap",
        "fairness/user_accuracy_gap",
        "Gap over users",
        user_accuracy_gap,
        GAP,
        "The best minus the worst accuracy over users of a group, in points.",
        frozenset({MetricTable.FAIRNESS}),
        of_model=True,
        better="lower",
        measure=over_users(gap_of(rate_of(rates.accuracy))),
        task="classification",
        extreme=Extreme("gap", ("user_accuracy",)),
    ),
    Metric(
        "balanced_accuracy",
        "final/balanced_accuracy",
        "Balanced accuracy",
        of_counts(rates.balanced_accuracy),
        PERCENT,
        "The mean over classes of the share of their test examples that is predicted right; a constant prediction of K "
        "classes has 1/K.",
        frozenset({MetricTable.FAIRNESS}),
        of_model=True,
        better="higher",
        measure=overall(rate_of(rates.balanced_accuracy)),
        task="classification",
    ),
    *(
        Metric(
            name,
            f"final/{name}",
            heading,
            of_two_classes(name),
            PERCENT,
            places=frozenset({MetricTable.FAIRNESS}),
            of_model=True,
            better=better,
            measure=overall(of_two(name)),
            task="classification",
        )
        for name, heading, better in _OF_TWO_CLASSES
    ),
    Metric(
        "majority_class_rate",
        "final/majority_class_rate",
        "Majority class",
        of_counts(majority_rate),
        PERCENT,
        "The share of the most frequent class: the accuracy of a model that always predicts it.",
        frozenset({MetricTable.FAIRNESS}),
        of_model=True,
        measure=overall(rate_of(majority_rate)),
        task="classification",
    ),
    on_training_examples("accuracy", "Training accuracy", PERCENT, "classification"),
    Metric(
        "log_loss",
        "final/log_loss",
        "Log loss",
        score("log_loss"),
        NUMBER,
        places=frozenset({MetricTable.FAIRNESS}),
        of_model=True,
        better="lower",
        measure=overall(log_loss),
        task="classification",
    ),
    Metric(
        "calibration_error",
        "final/calibration_error",
        "Calibration error",
        score("calibration_error"),
        PERCENT,
        "The difference between the probability of the predicted class and how often it is right, in 15 equal bins of "
        "that probability, averaged over test examples (Guo et al. 2017).",
        frozenset({MetricTable.FAIRNESS}),
        of_model=True,
        better="lower",
        measure=overall(calibration_error),
        task="classification",
    ),
)
GROUP_METRICS = (
    GroupMetric("test_examples", "Examples", lambda group: group.test_examples, COUNT),
    GroupMetric(
        "accuracy",
        "Accuracy",
        lambda group: group.accuracy,
        PERCENT,
        "higher",
        by_group(rate_of(rates.accuracy)),
        "classification",
    ),
    GroupMetric(
        "user_accuracy",
        "Accuracy over users",
        lambda group: group.user_accuracy,
        PERCENT,
        "higher",
        over_users(by_group(rate_of(rates.accuracy))),
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
    GroupMetric(
        "balanced_accuracy",
        "Balanced accuracy",
        lambda group: counted(group.counts, rates.balanced_accuracy),
        PERCENT,
        "higher",
        by_group(rate_of(rates.balanced_accuracy)),
        "classification",
    ),
    *(
        GroupMetric(
            name,
            heading,
            lambda group, name=name: two_classes(name)(group.counts),  # type: ignore[misc]  # a lambda's default has no type
            PERCENT,
            better,
            by_group(of_two(name)),
            "classification",
        )
        for name, heading, better in _OF_TWO_CLASSES
    ),
    *SCORE_GROUP_METRICS,
    GroupMetric("loss", "Loss", lambda group: group.loss, NUMBER, "lower"),
    GroupMetric(
        "log_loss",
        "Log loss",
        lambda group: group.counts.log_loss if group.counts else None,
        NUMBER,
        "lower",
        by_group(log_loss),
        "classification",
    ),
    GroupMetric(
        "calibration_error",
        "Calibration error",
        lambda group: group.counts.calibration_error if group.counts else None,
        PERCENT,
        "lower",
        by_group(calibration_error),
        "classification",
    ),
    on_training_examples_of_group("accuracy", "Training accuracy", PERCENT, "classification"),
    GroupMetric("training_loss", "Training loss", in_training("losses"), NUMBER),
    GroupMetric("gradient_norm", "Gradient norm", in_training("norms"), NUMBER),
    GroupMetric("clipping_bias", "Clipping bias", in_training("biases"), NUMBER),
    GroupMetric("noise_error", "Noise", in_training("noises"), NUMBER),
)
"""Metrics of each group of the test data that is large enough to be shown."""


def _worst(of: GroupMetric) -> Metric:
    """Return the metric of a trial that is the worst value of a group metric over its groups."""

    def found(trial: PublishedTrial) -> tuple[float, str] | None:
        groups = trial.quality.groups if trial.quality else ()
        known = [
            (value, group.name) for group in groups if (value := of.value(group)) is not None and math.isfinite(value)
        ]
        worst = min if of.better == "higher" else max
        return worst(known, key=lambda pair: pair[0], default=None)

    def value(trial: PublishedTrial) -> float | None:
        return one[0] if (one := found(trial)) else None

    def whose(trial: PublishedTrial) -> str | None:
        return one[1] if (one := found(trial)) else None

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
        measure=_worst_measure(of),
        task=of.task,
        extreme=Extreme("lowest" if of.better == "higher" else "highest", (of.name,)),
    )


def _worst_measure(of: GroupMetric) -> Measure:
    worst = rates.lowest if of.better == "higher" else rates.highest

    def measure(tested: Tested) -> Array | None:
        values = of.measure(tested) if of.measure else None
        return None if values is None or values.shape[-1] == 0 else worst(values)

    return measure


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
