"""The metrics of test data that follow from counts: rates over all examples, gaps between groups, and rates by group.

They are entries of `metrics.METRICS`, in which everything is looked up.
"""

from __future__ import annotations

from orchestration.comparison.entries import Better, GroupMetric, Metric, Place
from orchestration.comparison.formats import CORRELATION, COUNT, GAP, NUMBER, PERCENT, POINTS, Format
from orchestration.comparison.tested import between_groups, overall, overall_of_two
from orchestration.comparison.values import counted, fairness, majority_rate, of_counts, of_two, of_two_classes, score
from workers import rates

_GAPS: tuple[tuple[str, str, Format, Better, str], ...] = (
    ("accuracy_gap", "Accuracy gap", GAP, "lower", "The best minus the worst accuracy of a group, in points."),
    ("worst_group_balanced_accuracy", "Worst balanced accuracy", PERCENT, "higher", ""),
    ("worst_group_true_positive_rate", "Worst TPR", PERCENT, "higher", ""),
    (
        "demographic_parity_difference",
        "Demographic parity, difference",
        GAP,
        "lower",
        "The largest minus the smallest share of a group that is predicted as class 1. A model that predicts "
        "the same class for everybody has 0.",
    ),
    (
        "demographic_parity_ratio",
        "Demographic parity, ratio",
        CORRELATION,
        "higher",
        "The smallest over the largest such share.",
    ),
    (
        "equalized_odds_difference",
        "Equalised odds, difference",
        GAP,
        "lower",
        "The larger of the gaps between groups in true and in false positive rate, in points.",
    ),
    (
        "equalized_odds_ratio",
        "Equalised odds, ratio",
        CORRELATION,
        "higher",
        "The smaller of the ratios between groups of true and of false positive rate.",
    ),
    (
        "equal_opportunity_difference",
        "Equal opportunity, difference",
        GAP,
        "lower",
        "The largest minus the smallest true positive rate of a group, in points.",
    ),
    ("equal_opportunity_ratio", "Equal opportunity, ratio", CORRELATION, "higher", ""),
)
"""Gaps between groups: name in `workers.rates`, heading, format, direction, meaning."""
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
            frozenset({Place.FAIRNESS}),
            of_model=True,
            better=better,
            measure=between_groups(name),
        )
        for name, heading, shown, better, meaning in _GAPS
    ),
    Metric(
        "balanced_accuracy",
        "final/balanced_accuracy",
        "Balanced accuracy",
        of_counts(rates.balanced_accuracy),
        PERCENT,
        "The mean over classes of the share of their test examples that is predicted right; a constant prediction of K "
        "classes has 1/K.",
        frozenset({Place.FAIRNESS}),
        of_model=True,
        better="higher",
        measure=overall(rates.balanced_accuracy),
    ),
    *(
        Metric(
            name,
            f"final/{name}",
            heading,
            of_two_classes(name),
            PERCENT,
            places=frozenset({Place.FAIRNESS}),
            of_model=True,
            better=better,
            measure=overall_of_two(name),
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
        frozenset({Place.FAIRNESS}),
        of_model=True,
        measure=overall(majority_rate),
    ),
    Metric(
        "log_loss",
        "final/log_loss",
        "Log loss",
        score("log_loss"),
        NUMBER,
        places=frozenset({Place.FAIRNESS}),
        of_model=True,
        better="lower",
        measure=lambda tested: tested.log_loss,
    ),
    Metric(
        "calibration_error",
        "final/calibration_error",
        "Calibration error",
        score("calibration_error"),
        PERCENT,
        "The difference between the probability of the predicted class and how often it is right, in 15 equal bins of "
        "that probability, averaged over test examples (Guo et al. 2017).",
        frozenset({Place.FAIRNESS}),
        of_model=True,
        better="lower",
        measure=lambda tested: tested.calibration_error,
    ),
)
GROUP_METRICS = (
    GroupMetric("test_examples", "Examples", lambda group: group.test_examples, COUNT),
    GroupMetric("accuracy", "Accuracy", lambda group: group.accuracy, PERCENT, "higher", rates.accuracy),
    GroupMetric("accuracy_change", "Change, points", lambda group: group.accuracy_change, POINTS, "higher"),
    GroupMetric(
        "balanced_accuracy",
        "Balanced accuracy",
        lambda group: counted(group.counts, rates.balanced_accuracy),
        PERCENT,
        "higher",
        rates.balanced_accuracy,
    ),
    *(
        GroupMetric(
            name,
            heading,
            lambda group, name=name: of_two(name)(group.counts),  # type: ignore[misc]  # a lambda's default has no type
            PERCENT,
            better,
            rates.OF_TWO_CLASSES[name],
        )
        for name, heading, better in _OF_TWO_CLASSES
    ),
    GroupMetric("loss", "Loss", lambda group: group.loss, NUMBER, "lower"),
    GroupMetric("log_loss", "Log loss", lambda group: group.counts.log_loss if group.counts else None, NUMBER, "lower"),
    GroupMetric(
        "calibration_error",
        "Calibration error",
        lambda group: group.counts.calibration_error if group.counts else None,
        PERCENT,
        "lower",
    ),
)
"""What is known of each group of the test data that is large enough to be shown."""
