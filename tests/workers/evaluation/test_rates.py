"""Rates and gaps against fairlearn's MetricFrame and scikit-learn."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from fairlearn import metrics as fairlearn
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, balanced_accuracy_score, precision_score, recall_score

from dpsweep.workers.data.tabular import intersected, intersected_indices
from dpsweep.workers.evaluation import rates

Labels = npt.NDArray[np.int64]


def drawn(seed: int, classes: int = 2, groups: int = 3, size: int = 400) -> tuple[Labels, Labels, Labels]:
    """Labels, predictions that are right more often than not, and groups; every group has every class."""
    draw = np.random.default_rng(seed)
    labels, group = np.arange(size) % classes, draw.permutation(np.repeat(np.arange(groups), size // groups + 1)[:size])
    right = draw.random(size) < 0.4 + 0.2 * group
    return labels, np.where(right, labels, draw.integers(0, classes, size)), group


def counts_of(labels: Labels, predicted: Labels, groups: Labels, classes: int = 2) -> rates.Array:
    return rates.confusion_counts(labels, predicted, groups, (int(groups.max()) + 1, classes)).astype(np.float64)


@given(st.integers(0, 10**6))
@settings(max_examples=5, deadline=None)
def test_every_rate_by_group_is_that_of_metric_frame(seed: int) -> None:
    labels, predicted, groups = drawn(seed)
    frame = fairlearn.MetricFrame(
        metrics={
            "accuracy": accuracy_score,
            "balanced_accuracy": balanced_accuracy_score,
            "true_positive_rate": fairlearn.true_positive_rate,
            "false_positive_rate": fairlearn.false_positive_rate,
            "precision": precision_score,
            "selection_rate": fairlearn.selection_rate,
        },
        y_true=labels,
        y_pred=predicted,
        sensitive_features=groups,
    )
    counts = counts_of(labels, predicted, groups)
    found, overall = rates.rates(counts), rates.rates(counts.sum(0))
    assert set(found) == set(frame.by_group.columns)
    for name, values in found.items():
        np.testing.assert_allclose(values, frame.by_group[name], rtol=0.0, atol=1e-12)
        assert overall[name] == pytest.approx(frame.overall[name], abs=1e-12)


@pytest.mark.long
@given(st.integers(0, 10**6))
@settings(max_examples=5, deadline=None)
def test_gaps_are_those_of_fairlearn(seed: int) -> None:
    labels, predicted, groups = drawn(seed)
    given_to = {"y_true": labels, "y_pred": predicted, "sensitive_features": groups}
    accuracies = fairlearn.MetricFrame(metrics=accuracy_score, **given_to)
    balanced = fairlearn.MetricFrame(metrics=balanced_accuracy_score, **given_to)
    positive = fairlearn.MetricFrame(metrics=fairlearn.true_positive_rate, **given_to)
    found = rates.gaps(counts_of(labels, predicted, groups), is_two_class=True)
    assert found == pytest.approx(
        {
            "accuracy_gap": accuracies.difference(),
            "worst_group_accuracy": accuracies.group_min(),
            "worst_group_balanced_accuracy": balanced.group_min(),
            "worst_group_true_positive_rate": positive.group_min(),
            "demographic_parity_difference": fairlearn.demographic_parity_difference(**given_to),
            "demographic_parity_ratio": fairlearn.demographic_parity_ratio(**given_to),
            "equalized_odds_difference": fairlearn.equalized_odds_difference(**given_to),
            "equalized_odds_ratio": fairlearn.equalized_odds_ratio(**given_to),
            "equal_opportunity_difference": fairlearn.equal_opportunity_difference(**given_to),
            "equal_opportunity_ratio": fairlearn.equal_opportunity_ratio(**given_to),
            "false_positive_rate_difference": fairlearn.MetricFrame(
                metrics=fairlearn.false_positive_rate, **given_to
            ).difference(),
        },
        abs=1e-12,
    )


def test_recalls_of_many_classes_are_those_of_scikit_learn() -> None:
    labels, predicted, groups = drawn(3, classes=7)
    counts = counts_of(labels, predicted, groups, 7).sum(0)
    np.testing.assert_allclose(rates.recalls(counts), recall_score(labels, predicted, average=None), atol=1e-12)
    assert set(rates.rates(counts)) == {"accuracy", "balanced_accuracy"}, "others need two classes"


def test_a_rate_without_examples_is_unknown_and_takes_part_in_no_gap() -> None:
    """fairlearn calls the true positive rate of a group without positives 0, which is a gap that nobody suffers."""
    counts = np.array([[[5.0, 5.0], [2.0, 8.0]], [[10.0, 0.0], [0.0, 0.0]], [[5.0, 5.0], [4.0, 6.0]]])
    np.testing.assert_array_equal(rates.true_positive_rate(counts), [0.8, np.nan, 0.6])
    assert rates.gaps(counts, is_two_class=True)["equal_opportunity_difference"] == pytest.approx(0.2)
    nobody = np.array([[[5.0, 0.0], [5.0, 0.0]]] * 2)
    assert np.isnan(rates.gaps(nobody, is_two_class=True)["demographic_parity_ratio"])
    assert np.isnan(rates.precision(nobody)).all()


def test_one_group_with_a_value_has_no_gap_and_no_ratio() -> None:
    values = np.array([[0.8, np.nan, 0.6], [np.nan, np.nan, 0.6]])
    np.testing.assert_allclose(rates.gap(values), [0.2, np.nan])
    np.testing.assert_allclose(rates.ratio(values), [0.75, np.nan])
    np.testing.assert_array_equal(rates.lowest(values), [0.6, 0.6])


def test_many_resamples_are_computed_at_once() -> None:
    labels, predicted, groups = drawn(5)
    counts = counts_of(labels, predicted, groups)
    found = rates.gaps(np.stack([counts, 2.0 * counts]), is_two_class=True)
    assert all(values.shape == (2,) and values[0] == pytest.approx(values[1]) for values in found.values())


def test_the_calibration_error_is_that_of_its_definition() -> None:
    draw = np.random.default_rng(0)
    confidence, groups = draw.uniform(0.3, 1.0, 500), draw.integers(0, 2, 500)
    correct = draw.random(500) < confidence**2
    for group in (0, 1):
        mine, error = groups == group, 0.0
        for low in np.arange(15) / 15:
            inside = mine & (confidence >= low) & (confidence < low + 1 / 15)
            if inside.any():
                error += inside.sum() / mine.sum() * abs(correct[inside].mean() - confidence[inside].mean())
        assert rates.calibration_error(confidence, correct, groups, 2)[group] == pytest.approx(error, abs=1e-12)
    assert np.isnan(rates.calibration_error(confidence, correct, groups, 3)[2])


def test_counts_keep_no_row_for_a_label_without_examples() -> None:
    stored = rates.ConfusionCounts(((), (1, 2)), 0.5, 0.1)
    np.testing.assert_array_equal(stored.matrix, [[0.0, 0.0], [1.0, 2.0]])


@given(st.integers(0, 10**6))
@settings(max_examples=5, deadline=None)
def test_every_rate_of_an_intersection_is_that_of_metric_frame(seed: int) -> None:
    labels, predicted, sex = drawn(seed)
    race = np.random.default_rng(seed).integers(0, 3, len(labels))
    names = {"sex": tuple(map(str, np.unique(sex))), "race": ("0", "1", "2")}
    rows = pa.table({"sex": [str(each) for each in sex], "race": [str(each) for each in race]})
    groups = intersected_indices(rows, names)
    frame = fairlearn.MetricFrame(
        metrics={
            "accuracy": accuracy_score,
            "true_positive_rate": fairlearn.true_positive_rate,
            "false_positive_rate": fairlearn.false_positive_rate,
            "selection_rate": fairlearn.selection_rate,
        },
        y_true=labels,
        y_pred=predicted,
        sensitive_features={name: rows[name].to_pylist() for name in names},
    )
    found = rates.rates(counts_of(labels, predicted, groups))
    for place, group in enumerate(intersected(names)):
        for name in frame.by_group.columns:
            expected = frame.by_group[name][tuple(group.split(" × "))]
            assert found[name][place] == pytest.approx(expected, abs=1e-12)
