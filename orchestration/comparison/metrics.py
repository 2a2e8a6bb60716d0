"""The metrics of a trial, each defined once; the report, MLflow, results.json and the terminal read this table. Pure.

To add a metric, add one entry to `METRICS`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Final

from dpsweep.accounting.registry import lookup
from dpsweep.orchestration.comparison.extremes import Extreme
from dpsweep.orchestration.comparison.formats import (
    AT_MOST,
    CORRELATION,
    EPSILON,
    GAP,
    NUMBER,
    PERCENT,
    POINTS,
    PRECISE,
    SECONDS,
)
from dpsweep.orchestration.comparison.ledger import composed_epsilon
from dpsweep.orchestration.comparison.metric_types import Metric, MetricTable
from dpsweep.orchestration.comparison.rate_metrics import (
    GROUP_METRICS,
    RATE_METRICS,
    SCORE_METRICS,
    WORST_GROUP_METRICS,
    spoken,
)
from dpsweep.orchestration.comparison.tallies import ACCURACY, by_group, change, over_groups, overall
from dpsweep.orchestration.comparison.values import (
    advantage,
    delta,
    epsilon,
    epsilon_gap,
    finite,
    further_numbers,
    gap_between_groups,
    in_training,
    loss_correlation,
    median_epsilon,
    peak_memory,
    squared_error,
    tpr_at_fpr_1pct,
    utilization,
)
from dpsweep.orchestration.store.published import PublishedTrial, TrialState, has_groups, task_of
from dpsweep.workers.evaluation import rates
from dpsweep.workers.tasks import task_called

METRICS = (
    Metric(
        "epsilon",
        "privacy/epsilon",
        "Worst-case ε",
        epsilon,
        EPSILON,
        "With δ, bounds what the published model can reveal about any one training record, whoever it belongs to and "
        "whatever an attacker knows. A guarantee, unless its row says estimate. It covers one trial: all trials train "
        "on the same records, so publishing several costs more, as the composed ε says.",
        frozenset(MetricTable),
        better="lower",
    ),
    Metric(
        "composed_epsilon",
        "privacy/composed_epsilon",
        "ε of all attempts",
        composed_epsilon,
        EPSILON,
        "Of the trial, of every earlier start of it whose folder was deleted, and of the candidates of an unaccounted "
        "tuning: what these had shown stays part of the cost.",
        frozenset({MetricTable.TRIALS}),
    ),
    Metric("delta", "privacy/delta", "δ", delta, NUMBER),
    Metric(
        "advantage",
        "privacy/advantage",
        "Advantage at most",
        advantage,
        AT_MOST,
        "The largest true minus false positive rate with which any attack can tell whether one given record was "
        "trained on, even if it sees every step and knows all other data. It needs no δ, and is a guarantee unless its "
        "row says estimate.",
        frozenset({MetricTable.SETTINGS}),
    ),
    Metric(
        "tpr_at_fpr_1pct",
        "privacy/tpr_at_fpr_1pct",
        "TPR at 1% FPR at most",
        tpr_at_fpr_1pct,
        AT_MOST,
        "The share of members that any such attack can recognise while it accuses at most 1% of non-members; guessing "
        "reaches 1%.",
        frozenset({MetricTable.SETTINGS}),
    ),
    Metric(
        "initial_noise_multiplier",
        None,
        "Initial σ",
        lambda trial: trial.history[0].noise_multiplier if trial.history and not trial.is_baseline else None,
        PRECISE,
        places=frozenset({MetricTable.TRIALS}),
    ),
    Metric(
        "mean_squared_error",
        "privacy/noise_mean_squared_error",
        "Mean sq. noise error",
        lambda trial: squared_error(trial, 0),
        PRECISE,
        "Squared error per weight of the sum of all gradients up to a step, in squared clipping bounds, averaged over "
        "the steps. Compare noise that is correlated over the steps by it, not by σ. Unknown where σ changes.",
        frozenset({MetricTable.TRIALS}),
        better="lower",
    ),
    Metric(
        "max_squared_error",
        "privacy/noise_max_squared_error",
        "Max sq. noise error",
        lambda trial: squared_error(trial, 1),
        PRECISE,
        better="lower",
    ),
    Metric(
        "release_epsilon",
        "privacy/release_epsilon",
        "ε of the release",
        lambda trial: trial.individuals.release_epsilon if trial.individuals else None,
        EPSILON,
    ),
    Metric(
        "mean_example_epsilon",
        "privacy/mean_epsilon_i",
        "Mean εᵢ",
        lambda trial: trial.individuals.mean if trial.individuals else None,
        NUMBER,
    ),
    Metric(
        "median_example_epsilon",
        "privacy/median_epsilon_i",
        "Median εᵢ",
        median_epsilon,
        NUMBER,
        "εᵢ is the same bound for record i alone, given this run: records with small gradients pay less than the worst "
        "case. Output-specific, so conditional on the models of this run, where contributions were known at every step "
        "(or clipped individually); an estimate where norms were refreshed less often; a guarantee where a filter "
        "enforced a budget, the same for all. It is private: tell it only to the owner of record i.",
        frozenset({MetricTable.SETTINGS, MetricTable.TERMINAL}),
    ),
    Metric(
        "loss_correlation",
        "privacy/loss_correlation",
        "Pearson’s r of εᵢ and log loss",
        loss_correlation,
        CORRELATION,
        "Whether training examples that the model fits badly paid more. The loss is that of record i when norms were "
        "last taken, before the model was final; records without a positive, finite loss are left out.",
        exact=True,
    ),
    Metric(
        "exposure",
        "privacy/exposure",
        "Exposure of secrets in bits",
        lambda trial: trial.exposure.mean if trial.exposure else None,
        NUMBER,
        "The mean over random secrets of log2 R − log2 of the rank of a secret's loss among R that the model was not "
        "trained on: how many bits it gives away of one. Guessing gives 1.4.",
        exact=True,
    ),
    Metric(
        "accuracy",
        "final/accuracy",
        "Test accuracy",
        lambda trial: trial.quality.accuracy if trial.quality else None,
        PERCENT,
        "Accuracy, loss and groups are computed on held-out test data, which the guarantee does not cover: the models "
        "do not depend on it, this page does.",
        frozenset(MetricTable),
        of_model=True,
        better="higher",
        measure=overall(ACCURACY),
        task="classification",
    ),
    Metric(
        "loss",
        "final/loss",
        "Loss",
        lambda trial: trial.quality.loss if trial.quality else None,
        NUMBER,
        places=frozenset({MetricTable.TRIALS}),
        of_model=True,
        better="lower",
    ),
    Metric(
        "accuracy_change",
        "fairness/accuracy_change",
        "Change, points",
        lambda trial: trial.quality.accuracy_change if trial.quality else None,
        POINTS,
        "Private minus non-private accuracy, same data, model and seed, in percentage points. No guarantee covers the "
        "non-private baseline, and therefore none covers this change.",
        frozenset({MetricTable.SETTINGS, MetricTable.TERMINAL}),
        of_model=True,
        better="higher",
        measure=change(overall(ACCURACY)),
        task="classification",
    ),
    *SCORE_METRICS,
    *WORST_GROUP_METRICS.values(),
    Metric(
        "unequal_cost",
        "fairness/unequal_cost",
        "Unequal cost, points",
        gap_between_groups(lambda group: group.accuracy_change),
        GAP,
        "The largest minus the smallest change of a group's accuracy against the baseline. Privacy is fair, in the "
        "sense of equal cost, when all groups change alike.",
        frozenset({MetricTable.SETTINGS}),
        of_model=True,
        better="lower",
        measure=over_groups(change(by_group(ACCURACY)), rates.gap),
        task="classification",
        extreme=Extreme("gap", ("accuracy_change",)),
    ),
    *RATE_METRICS,
    Metric(
        "epsilon_gap",
        "fairness/epsilon_gap",
        "Gap of mean εᵢ",
        epsilon_gap,
        NUMBER,
        "The largest minus the smallest mean εᵢ of a group of training examples, as published.",
        better="lower",
    ),
    Metric(
        "clipping_bias_gap",
        "fairness/clipping_bias_gap",
        "Gap of clipping bias",
        gap_between_groups(in_training("biases")),
        NUMBER,
        "Clipping bias is the mean norm of what clipping takes off the gradients of a group’s training examples, in "
        "the last epoch; the gap is the largest minus the smallest of a group (Xu et al. 2021, Section 4.2). Groups "
        "with large gradients are clipped most.",
        of_model=True,
        exact=True,
        better="lower",
    ),
    Metric(
        "noise_error_gap",
        "fairness/noise_error_gap",
        "Gap of noise",
        gap_between_groups(in_training("noises")),
        NUMBER,
        "Noise of a group is σ S √d over the number of its examples expected in a batch, with sensitivity S and d "
        "parameters: the root mean square norm of the noise in the mean gradient of the group, in the last epoch. "
        "Clipping bias and noise together bound the error of that mean (Xu et al. 2021, Section 4.2). Small groups "
        "have the most noise.",
        of_model=True,
        exact=True,
        better="lower",
    ),
    Metric(
        "seconds",
        "final/wall_seconds",
        "Time",
        lambda trial: trial.wall_seconds,
        SECONDS,
        "Seconds from the start of training to its end; of a trial that was interrupted, those of its last attempt.",
        places=frozenset({MetricTable.TRIALS, MetricTable.TERMINAL}),
    ),
    Metric(
        "peak_memory",
        "system/peak_memory_mib",
        "Peak memory, MiB",
        peak_memory,
        NUMBER,
        "Of the device that trained the trial, in its last attempt: on a GPU of what torch had allocated, on a CPU of "
        "the process.",
    ),
    Metric(
        "gpu_utilization",
        "system/gpu_utilization",
        "GPU utilization",
        utilization,
        PERCENT,
        "Mean share of time in which the GPU computed, by NVIDIA's management library (nvidia-ml-py), where there is "
        "one.",
    ),
)
_BY_NAME = {each.name: each for each in METRICS}
SECTIONS = ("final/", "fairness/", "privacy/", "audit/", "system/")
"""Sections of metrics in MLflow, in the order of logging; MLflow's comparison page opens with the first metric."""


def of_task(task: str | None) -> tuple[Metric, ...]:
    """Return the metrics that trials of a task have, in the order of `METRICS`; of None, those of every task."""
    return tuple(metric for metric in METRICS if metric.task in (None, task))


def meanings_of(task: str | None) -> dict[str, str]:
    """Return the meanings of the metrics of a task by their headings, which metrics of several tasks share."""
    return {each.heading: each.meaning for each in of_task(task) if each.meaning}


def main_metric(task: str) -> Metric:
    """Return the metric of the task's main score, such as accuracy."""
    return metric(task_called(task).main)


def measured(accuracy: float | None, scores: Mapping[str, float]) -> str:
    """Return the main score of a trial on test data as text: its accuracy, or the score of another task.

    A status file of another version may have scores that no metric is called after: they keep their names.

    >>> measured(0.9876, {}), measured(None, {"r2": 0.5321}), measured(None, {"mean_iou": 0.5321})
    ('accuracy 98.8%', 'R² 0.532', 'mean IoU 53.2%')
    """
    found: Mapping[str, float | None] = scores or {"accuracy": accuracy}
    known = {each.name: each for each in GROUP_METRICS if each.name in found}
    return ", ".join(
        f"{spoken(known[name])} {known[name].format.one(value)}" if name in known else f"{name} {NUMBER.one(value)}"
        for name, value in found.items()
    )


def columns(place: MetricTable, worst_group: str, trials: Collection[PublishedTrial]) -> tuple[Metric, ...]:
    """Return the metrics with a column in ``place`` of a table of these trials, in the order of `METRICS`.

    `worst_group`: the worst-group metric that compares settings; it is in every table. If no trial has several groups,
    no extreme or gap has a column.

    >>> [metric.name for metric in columns(MetricTable.TERMINAL, "worst_group_accuracy", ())][:2]
    ['epsilon', 'median_example_epsilon']
    """
    compares = has_groups(trials)
    return tuple(
        metric
        for metric in of_task(task_of(trials))
        if (place in metric.places or metric.name == worst_group) and (compares or metric.extreme is None)
    )


def metric(name: str) -> Metric:
    """Return the metric called ``name``. Raises: InvalidInput naming the nearest."""
    return lookup(_BY_NAME, name, "metric")


def known_of_groups(trial: PublishedTrial) -> dict[str, dict[str, float | None]]:
    """Return all metrics of the trial's task, by group and name of the metric; None if unknown or infinite."""
    if trial.quality is None:
        return {}
    shown = [each for each in GROUP_METRICS if each.task in (None, trial.quality.task)]
    return {group.name: {each.name: finite(each.value(group)) for each in shown} for group in trial.quality.groups}


def known_metrics(trial: PublishedTrial) -> dict[str, float | None]:
    """Return all metrics of the trial's task by their names in results.json; None if unknown or infinite."""
    return {metric.name: finite(metric.value(trial)) for metric in of_task(task_of([trial]))}


def final_metrics(trial: PublishedTrial) -> dict[str, float]:
    """Return the finite scalars of a trial by their names in MLflow, section by section.

    An infinite epsilon is recorded as the tag ``private=false`` instead. For a stopped trial, metrics of the model are
    left out (its series show them), but costs are included.
    """
    found = dict(_tracked(trial))
    return {
        name: value
        for section in SECTIONS
        for name, value in found.items()
        if name.startswith(section) and value is not None and math.isfinite(value)
    }


def _tracked(trial: PublishedTrial) -> Iterator[tuple[str, float | None]]:
    finished = trial.state is TrialState.FINISHED
    for metric in METRICS:
        if metric.tracked is not None and (finished or not metric.of_model):
            yield metric.tracked, metric.value(trial)
    yield from further_numbers(trial).items()
    if finished:
        yield from _of_groups(trial)


_MOST_GROUPS: Final = 20
"""Number of groups up to which each has metrics of its own in MLflow, which draws no charts of its table of groups."""


def _of_groups(trial: PublishedTrial) -> Iterator[tuple[str, float | None]]:
    """Yield main score and mean epsilon_i of each group, if there are several but few."""
    shown = known_of_groups(trial)
    if trial.quality is None or not 1 < len(shown) <= _MOST_GROUPS:
        return
    main, paid = task_called(trial.quality.task).main, trial.individuals.groups if trial.individuals else ()
    yield from ((f"fairness/{main}_of_{name}", values.get(main)) for name, values in shown.items())
    yield from ((f"privacy/mean_epsilon_i_of_{each.name}", each.mean) for each in paid if each.name in shown)
