"""Each metric is the number that its name says, on a trial whose numbers are all different."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dpsweep.accounting.mechanism.units import UnitName
from dpsweep.orchestration.comparison.formats import GAP, POINTS
from dpsweep.orchestration.comparison.metric_types import GroupMetric, Metric
from dpsweep.orchestration.comparison.metrics import (
    METRICS,
    final_metrics,
    known_metrics,
    known_of_groups,
    metric,
    of_task,
)
from dpsweep.orchestration.comparison.rate_metrics import GROUP_METRICS, RATE_METRICS, WORST_GROUP_METRICS
from dpsweep.orchestration.comparison.settings import finished_settings, served_worst, shown_over_seeds
from dpsweep.orchestration.comparison.statistics import Spread, spread
from dpsweep.orchestration.comparison.values import further_numbers, worst_over_median
from dpsweep.orchestration.store.published import (
    EpsilonHistogram,
    GroupEpsilon,
    IndividualStatistics,
    PublishedCourse,
    PublishedEpoch,
    PublishedGroup,
    PublishedPrivacy,
    PublishedQuality,
    PublishedTrial,
    TrialState,
)
from dpsweep.workers.evaluation.rates import ConfusionCounts
from dpsweep.workers.tasks import TASKS
from tests.orchestration.report.pages import rendered
from tests.orchestration.sample_sweeps import sample_sweep

TRIAL = PublishedTrial(
    key="flat-0",
    labels={"clipping": "flat", "seed": 0},
    state=TrialState.FINISHED,
    privacy=PublishedPrivacy(3.0, 1e-5, "pld", group_epsilons={1: 3.0, 2: 7.0, 4: 16.0}),
    quality=PublishedQuality(
        0.81,
        0.62,
        -0.07,
        (
            PublishedGroup("a", 30, 0.9, 0.3, -0.02, training=PublishedCourse(90, (0.1,), (1.5,), (0.5,), (3.0,))),
            PublishedGroup("b", 10, 0.54, 1.1, -0.11, training=PublishedCourse(30, (0.9,), (3.25,), (2.25,), (9.0,))),
        ),
        {"accuracy_gap": 0.36},
    ),
    individuals=IndividualStatistics(
        "private", "estimate", mean=1.25, median=1.5, quantiles={0.9: 2.5}, release_epsilon=0.125
    ),
    history=(PublishedEpoch(0, 10, 2.25), PublishedEpoch(1, 20, 1.75)),
    started=1000.0,
    ended=1090.0,
)


OF_COUNTS = {
    metric.name for metric in (*RATE_METRICS, *WORST_GROUP_METRICS.values()) if metric.task == "classification"
} - {
    "accuracy_gap",
    "worst_group_accuracy",
    "worst_group_accuracy_change",
}


def test_a_heading_says_when_its_numbers_are_points() -> None:
    """Percentages carry their sign; differences of shares are bare numbers."""
    every: list[Metric | GroupMetric] = [*METRICS, *GROUP_METRICS]
    in_points = {each.name for each in every if each.format in (POINTS, GAP)}
    assert {each.name for each in every if each.heading.endswith(", points")} == in_points
    assert {"accuracy_gap", "worst_group_accuracy_change", "false_positive_rate_difference"} <= in_points


def test_rates_follow_from_counts() -> None:
    assert TRIAL.quality is not None
    counts = ConfusionCounts(((40, 10), (20, 30)), 0.7, 0.2)
    groups = (PublishedGroup("a", 100, 0.7, 0.3, -0.02, counts), *TRIAL.quality.groups[1:])
    trial = replace(TRIAL, quality=replace(TRIAL.quality, groups=groups, counts=counts))
    expected = {
        "balanced_accuracy": 0.7,
        "true_positive_rate": 0.6,
        "false_positive_rate": 0.2,
        "precision": 0.75,
        "selection_rate": 0.4,
        "log_loss": 0.7,
        "calibration_error": 0.2,
    }
    found, group = known_metrics(trial), known_of_groups(trial)["a"]
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert {name: group[name] for name in expected} == pytest.approx(expected)
    assert found["majority_class_rate"] == 0.5
    assert (group["test_examples"], group["loss"], group["accuracy_change"]) == (100, 0.3, -0.02)
    assert known_of_groups(trial)["b"]["precision"] is None
    assert further_numbers(trial)["final/recall_of_class_0"] == 0.8
    assert further_numbers(trial)["final/recall_of_class_1"] == 0.6


def test_what_training_did_to_a_group_is_that_of_its_last_epoch_and_missing_where_it_is_withheld() -> None:
    names = ("training_loss", "gradient_norm", "clipping_bias", "noise_error")
    found = known_of_groups(TRIAL)
    assert [found["b"][name] for name in names] == [0.9, 3.25, 2.25, 9.0]
    assert TRIAL.quality is not None
    withheld = tuple(replace(group, training=None) for group in TRIAL.quality.groups)
    trial = replace(TRIAL, quality=replace(TRIAL.quality, groups=withheld))
    assert [known_of_groups(trial)["b"][name] for name in names] == [None] * 4
    assert (known_metrics(trial)["clipping_bias_gap"], known_metrics(trial)["noise_error_gap"]) == (None, None)
    assert not [name for name in final_metrics(trial) if "bias" in name or "noise" in name]


@pytest.mark.parametrize(("unit", "said"), [("example", "3.00"), ("user", "3.00 per user")])
def test_an_epsilon_of_users_says_so_in_every_table(unit: UnitName, said: str) -> None:
    """A table of several sweeps would set it beside one of rows as its equal."""
    assert TRIAL.privacy is not None
    (setting,) = finished_settings([replace(TRIAL, privacy=replace(TRIAL.privacy, unit=unit))])
    assert shown_over_seeds(metric("epsilon"), setting) == said
    assert shown_over_seeds(metric("delta"), setting) == shown_over_seeds(
        metric("delta"), finished_settings([TRIAL])[0]
    )


@pytest.mark.parametrize("task", TASKS)
def test_no_two_numbers_of_a_task_read_alike(task: str) -> None:
    """Even where a heading is abbreviated: the squared error of noise is not that of a regression."""
    headings = [each.heading.replace("sq.", "squared") for each in of_task(task)]
    assert len({*headings}) == len(headings)


@pytest.mark.parametrize(
    ("accuracies", "worst"),
    [((0.9, 0.5, 0.5), ("1", "2")), ((0.9, 0.5, 0.7), ("1",)), ((0.5,) * 3, ()), ((0.5,), ("0",))],
)
def test_groups_that_tie_are_served_worst_together_and_all_alike_none_is(
    accuracies: tuple[float, ...], worst: tuple[str, ...]
) -> None:
    groups = tuple(PublishedGroup(str(index), 10, accuracy, 0.3) for index, accuracy in enumerate(accuracies))
    assert TRIAL.quality is not None
    tied = replace(TRIAL, quality=replace(TRIAL.quality, groups=groups))
    assert WORST_GROUP_METRICS["accuracy"].whose(tied) == worst
    words = served_worst(WORST_GROUP_METRICS["accuracy"], finished_settings([tied])[0])
    assert words == (" or ".join(f"group {name}" for name in worst) or "every group alike")


def test_results_json_holds_every_metric_under_its_name() -> None:
    assert {name: value for name, value in known_metrics(TRIAL).items() if name not in OF_COUNTS} == {
        "epsilon": 3.0,
        "composed_epsilon": 3.0,
        "advantage": None,
        "tpr_at_fpr_1pct": None,
        "delta": 1e-5,
        "initial_noise_multiplier": 2.25,
        "mean_squared_error": None,
        "max_squared_error": None,
        "release_epsilon": 0.125,
        "mean_example_epsilon": 1.25,
        "median_example_epsilon": 1.5,
        "loss_correlation": None,
        "exposure": None,
        "accuracy": 0.81,
        "loss": 0.62,
        "accuracy_change": -0.07,
        "worst_group_accuracy": 0.54,
        "worst_group_accuracy_change": -0.11,
        "unequal_cost": pytest.approx(0.09),
        "accuracy_gap": 0.36,
        "epsilon_gap": None,
        "clipping_bias_gap": 1.75,
        "noise_error_gap": 6.0,
        "seconds": 90.0,
        "peak_memory": None,
        "gpu_utilization": None,
    }
    assert not any(known_metrics(TRIAL)[name] for name in OF_COUNTS), "without counts"
    assert worst_over_median(TRIAL) == 2.0


def test_mlflow_holds_every_finite_one() -> None:
    assert final_metrics(TRIAL) == {
        "final/accuracy": 0.81,
        "final/loss": 0.62,
        "final/wall_seconds": 90.0,
        "fairness/accuracy_change": -0.07,
        "fairness/worst_group_accuracy": 0.54,
        "fairness/worst_group_accuracy_change": -0.11,
        "fairness/unequal_cost": pytest.approx(0.09),
        "fairness/accuracy_gap": 0.36,
        "fairness/clipping_bias_gap": 1.75,
        "fairness/noise_error_gap": 6.0,
        "fairness/accuracy_of_a": 0.9,
        "fairness/accuracy_of_b": 0.54,
        "privacy/epsilon": 3.0,
        "privacy/composed_epsilon": 3.0,
        "privacy/delta": 1e-5,
        "privacy/release_epsilon": 0.125,
        "privacy/mean_epsilon_i": 1.25,
        "privacy/median_epsilon_i": 1.5,
        "privacy/epsilon_group_of_2": 7.0,
        "privacy/epsilon_group_of_4": 16.0,
        "privacy/epsilon_i_quantile_0.9": 2.5,
    }


def test_mlflow_can_chart_what_a_few_groups_pay_and_get() -> None:
    assert TRIAL.individuals is not None
    paid = replace(
        TRIAL, individuals=replace(TRIAL.individuals, groups=(GroupEpsilon("a", 1.0), GroupEpsilon("b", 2.0)))
    )
    found = final_metrics(paid)
    assert [found[f"privacy/mean_epsilon_i_of_{name}"] for name in "ab"] == [1.0, 2.0]
    assert TRIAL.quality is not None
    others = tuple(PublishedGroup(str(index), 10, 0.5, 0.3) for index in range(21))
    many = final_metrics(replace(paid, quality=replace(TRIAL.quality, groups=others)))
    assert not [name for name in many if "_of_" in name and "epsilon_group_of" not in name]


def test_of_a_stopped_trial_only_the_cost_is_final() -> None:
    found = final_metrics(replace(TRIAL, state=TrialState.STOPPED))
    assert found["privacy/epsilon"] == 3.0
    assert {name.split("/")[0] for name in found} == {"privacy", "final"}
    assert [name for name in found if name.startswith("final/")] == ["final/wall_seconds"]


def test_an_infinite_epsilon_is_no_number() -> None:
    baseline = replace(TRIAL, privacy=PublishedPrivacy(math.inf, 1e-5, "none"), individuals=None)
    found = known_metrics(baseline)
    assert (found["epsilon"], found["delta"], found["initial_noise_multiplier"]) == (None, None, None)
    assert not [name for name in final_metrics(baseline) if name.startswith("privacy/")]


def test_a_median_is_published_released_or_read_off_the_histogram() -> None:
    assert TRIAL.individuals is not None
    histogram = EpsilonHistogram((0.0, 1.0, 2.0, 4.0), (10.0, -3.0, 30.0))
    found = [
        known_metrics(replace(TRIAL, individuals=individuals))["median_example_epsilon"]
        for individuals in (
            replace(TRIAL.individuals, median=None, quantiles={0.5: 1.75}, histogram=histogram),
            replace(TRIAL.individuals, median=None, histogram=histogram),
            replace(TRIAL.individuals, median=None),
        )
    ]
    assert found == [1.75, pytest.approx(2.0 + 2.0 / 3.0), None], "10 of 40 examples lie below 2, 20 below the median"


def test_a_spread_is_that_of_the_finite_values() -> None:
    found = spread([1.0, None, 2.0, math.inf, 6.0, math.nan])
    assert found == Spread(3.0, pytest.approx(math.sqrt(7.0)), 1.0, 6.0, 3)  # type: ignore[arg-type]  # stands for a number
    assert spread([None, math.inf]) is None
    assert spread([4.0]) == Spread(4.0, 0.0, 4.0, 4.0, 1)


def test_worst_case_and_groups_are_metrics() -> None:
    trial = next(trial for trial in sample_sweep().trials if trial.privacy and trial.privacy.risks)
    assert trial.privacy is not None
    risks, shown = trial.privacy.risks, final_metrics(trial)
    assert known_metrics(trial)["advantage"] == shown["privacy/advantage"] == risks[1].advantage.upper
    assert (
        known_metrics(trial)["tpr_at_fpr_1pct"]
        == shown["privacy/tpr_at_fpr_1pct"]
        == risks[1].true_positive_rates[1].upper
    )
    assert shown["privacy/advantage_group_of_4"] == risks[4].advantage.upper > risks[1].advantage.upper
    assert shown["privacy/tpr_at_fpr_1pct_group_of_8"] == risks[8].true_positive_rates[1].upper


def test_the_report_shows_them_rounded_up() -> None:
    page = rendered("raw")
    assert "Advantage at most" in page
    assert "TPR at 1% FPR at most" in page
    assert "<small>advantage " in page
