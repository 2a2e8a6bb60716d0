"""The metrics of a trial, each defined once; the report, MLflow, results.json and the terminal read this table.

To add a metric, add one entry to `METRICS`. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from accounting.curves import FALSE_POSITIVE_RATES
from orchestration.comparison.formats import (
    AT_MOST,
    CORRELATION,
    GAP,
    NUMBER,
    PERCENT,
    POINTS,
    PRECISE,
    SECONDS,
    Format,
)
from orchestration.comparison.ledger import composed_epsilon
from orchestration.records.published import Histogram, PublishedGroup, PublishedTrial
from orchestration.records.states import TrialState

Value = Callable[[PublishedTrial], float | None]
"""A number of a trial; None if it is unknown, infinite if there is no bound."""


class Place(Enum):
    """A table in which a metric can have a column; results.json holds every metric, MLflow every tracked one."""

    SETTINGS = auto()
    """The report's table of settings, averaged over seeds."""
    TRIALS = auto()
    """The report's table of all trials."""
    TERMINAL = auto()
    """The table that ``dpsweep run`` and ``dpsweep report`` print."""


@dataclass(frozen=True)
class Metric:
    """One number of a trial, and how it is shown.

    name: in results.json. tracked: its name in MLflow, with the section (``final/``, ``fairness/``, ``privacy/``); None
    if a parameter of the run has the same value. heading: of its column. meaning: its explanation in the report, "" if
    the heading suffices. of_model: describes the final model; not recorded as a final value for a stopped trial.
    exact: computed from training examples without noise; known only where exact statistics are shown. whose: the
    group that the number belongs to, or None.
    """

    name: str
    tracked: str | None
    heading: str
    value: Value
    format: Format
    meaning: str = ""
    places: frozenset[Place] = frozenset()
    of_model: bool = False
    exact: bool = False
    whose: Callable[[PublishedTrial], str | None] = lambda trial: None


@dataclass(frozen=True)
class Family:
    """Numbers whose names depend on the trial, such as one per group size; MLflow only. of_model: as in `Metric`."""

    values: Callable[[PublishedTrial], Mapping[str, float | None]]
    of_model: bool = False


def worst_group(trial: PublishedTrial) -> PublishedGroup | None:
    """The group of the test data with the lowest accuracy."""
    groups = [group for group in trial.quality.groups if math.isfinite(group.accuracy)] if trial.quality else []
    return min(groups, key=lambda group: group.accuracy, default=None)


def worst_group_name(trial: PublishedTrial) -> str | None:
    """The name of `worst_group`."""
    group = worst_group(trial)
    return group.name if group else None


def epsilon(trial: PublishedTrial) -> float | None:
    """Epsilon in the worst case over all training examples; infinite for a baseline."""
    return trial.privacy.epsilon if trial.privacy else None


def delta(trial: PublishedTrial) -> float | None:
    """The delta of `epsilon`; None for a baseline, which has no guarantee."""
    return trial.privacy.delta if trial.privacy and trial.privacy.is_private else None


def accuracy(trial: PublishedTrial) -> float | None:
    """Accuracy on test data, in [0, 1]."""
    return trial.quality.accuracy if trial.quality else None


def loss(trial: PublishedTrial) -> float | None:
    """Mean loss on test data."""
    return trial.quality.loss if trial.quality else None


def accuracy_change(trial: PublishedTrial) -> float | None:
    """Accuracy minus that of the non-private baseline, in [-1, 1]."""
    return trial.quality.accuracy_change if trial.quality else None


def worst_group_accuracy(trial: PublishedTrial) -> float | None:
    """Accuracy of `worst_group`, in [0, 1]."""
    group = worst_group(trial)
    return group.accuracy if group else None


def unequal_cost(trial: PublishedTrial) -> float | None:
    """Largest minus smallest accuracy change over groups: 0 if all groups lose the same accuracy (paper D)."""
    if trial.quality is None:
        return None
    changes = [group.accuracy_change for group in trial.quality.groups if group.accuracy_change is not None]
    return max(changes) - min(changes) if len(changes) > 1 else None


def mean_epsilon(trial: PublishedTrial) -> float | None:
    """Mean epsilon_i over the training examples, as published."""
    return trial.individuals.mean if trial.individuals else None


def median_epsilon(trial: PublishedTrial) -> float | None:
    """Median epsilon_i: as published, or computed from the published histogram (post-processing, no further cost)."""
    individuals = trial.individuals
    if individuals is None:
        return None
    if individuals.median is not None:
        return individuals.median
    if 0.5 in individuals.quantiles:
        return individuals.quantiles[0.5]
    return _histogram_median(individuals.histogram) if individuals.histogram else None


def _histogram_median(histogram: Histogram) -> float | None:
    counts = [max(count, 0.0) for count in histogram.counts]
    half, before = sum(counts) / 2.0, 0.0
    for low, high, count in zip(histogram.edges, histogram.edges[1:], counts, strict=False):
        if count > 0.0 and before + count >= half:
            return low + (high - low) * (half - before) / count
        before += count
    return None


def worst_over_median(trial: PublishedTrial) -> float | None:
    """The worst-case epsilon divided by the median epsilon_i."""
    worst, median = epsilon(trial), median_epsilon(trial)
    return worst / median if worst is not None and median is not None and median > 0.0 else None


def loss_correlation(trial: PublishedTrial) -> float | None:
    """Pearson's r of epsilon_i and the log loss of the example when norms were last taken (paper A, Figure 5)."""
    return trial.individuals.loss_correlation if trial.individuals else None


def release_epsilon(trial: PublishedTrial) -> float | None:
    """Epsilon of releasing the statistics of epsilon_i alone; already part of `epsilon`."""
    return trial.individuals.release_epsilon if trial.individuals else None


def initial_noise_multiplier(trial: PublishedTrial) -> float | None:
    """The noise multiplier of the first epoch; None for a baseline."""
    return trial.history[0].noise_multiplier if trial.history and not trial.is_baseline else None


def wall_seconds(trial: PublishedTrial) -> float | None:
    """Duration of training in seconds."""
    return trial.wall_seconds


def advantage(trial: PublishedTrial) -> float | None:
    """Upper bound on the membership advantage of any attack on one record; None for a baseline, which has no bound."""
    return _advantage(trial, 1)


def _advantage(trial: PublishedTrial, size: int) -> float | None:
    risk = trial.privacy.risks.get(size) if trial.privacy else None
    return risk.advantage.upper if risk else None


def tpr_at_fpr_1pct(trial: PublishedTrial) -> float | None:
    """Upper bound on the true positive rate of any attack on one record at a false positive rate of 1%."""
    return _tpr_at_fpr_1pct(trial, 1)


def _tpr_at_fpr_1pct(trial: PublishedTrial, size: int) -> float | None:
    risk = trial.privacy.risks.get(size) if trial.privacy else None
    return risk.true_positive_rates[FALSE_POSITIVE_RATES.index(0.01)].upper if risk else None


def _risk_by_group_size(trial: PublishedTrial) -> Mapping[str, float | None]:
    sizes = [size for size in trial.privacy.risks if size > 1] if trial.privacy else []
    return {f"privacy/advantage_group_of_{size}": _advantage(trial, size) for size in sizes} | {
        f"privacy/tpr_at_fpr_1pct_group_of_{size}": _tpr_at_fpr_1pct(trial, size) for size in sizes
    }


def _epsilon_by_group_size(trial: PublishedTrial) -> Mapping[str, float | None]:
    sizes = trial.privacy.group_epsilons if trial.privacy else {}
    return {f"privacy/epsilon_group_of_{size}": value for size, value in sizes.items() if size > 1}


def _epsilon_quantiles(trial: PublishedTrial) -> Mapping[str, float | None]:
    quantiles = trial.individuals.quantiles if trial.individuals else {}
    return {f"privacy/epsilon_i_quantile_{level:g}": value for level, value in quantiles.items()}


def _audit(trial: PublishedTrial) -> Mapping[str, float | None]:
    audit = trial.audit
    return {"privacy/audited_epsilon": audit.epsilon, "privacy/audit_confidence": audit.confidence} if audit else {}


def _fairness(trial: PublishedTrial) -> Mapping[str, float | None]:
    found = trial.quality.fairness if trial.quality else {}
    return {f"fairness/{name}": value for name, value in found.items()}


def _accounted_again(trial: PublishedTrial) -> dict[str, float | None]:
    """Of each accounting of `dpsweep account`, by the name of its folder."""
    found: dict[str, float | None] = {}
    for account in trial.accounts:
        values = {"epsilon": account.epsilon, "mean_epsilon_i": account.mean, "median_epsilon_i": account.median}
        sizes = {f"epsilon_group_of_{size}": epsilon for size, epsilon in account.group_epsilons.items()}
        found |= {f"privacy/account/{account.name}/{name}": value for name, value in {**values, **sizes}.items()}
    return found


METRICS = (
    Metric(
        "epsilon",
        "privacy/epsilon",
        "Worst-case ε",
        epsilon,
        NUMBER,
        "With δ, bounds what the published model can reveal about any one training record, whoever it belongs to and "
        "whatever an attacker knows. A guarantee, unless its row says estimate. It covers one trial: all trials train "
        "on the same records, so publishing several costs more, as the composed ε says.",
        frozenset(Place),
    ),
    Metric(
        "composed_epsilon",
        "privacy/composed_epsilon",
        "ε of all attempts",
        composed_epsilon,
        NUMBER,
        "Of the trial and of every earlier start of it whose folder was deleted: what that had shown stays part of the "
        "cost.",
        frozenset({Place.TRIALS}),
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
        frozenset({Place.SETTINGS}),
    ),
    Metric(
        "tpr_at_fpr_1pct",
        "privacy/tpr_at_fpr_1pct",
        "TPR at 1% FPR at most",
        tpr_at_fpr_1pct,
        AT_MOST,
        "The share of members that any such attack can recognise while it accuses at most 1% of non-members; guessing "
        "reaches 1%.",
        frozenset({Place.SETTINGS}),
    ),
    Metric(
        "initial_noise_multiplier",
        None,
        "Initial σ",
        initial_noise_multiplier,
        PRECISE,
        places=frozenset({Place.TRIALS}),
    ),
    Metric("release_epsilon", "privacy/release_epsilon", "ε of the release", release_epsilon, NUMBER),
    Metric("mean_example_epsilon", "privacy/mean_epsilon_i", "Mean εᵢ", mean_epsilon, NUMBER),
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
        frozenset({Place.SETTINGS, Place.TERMINAL}),
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
        "accuracy",
        "final/accuracy",
        "Test accuracy",
        accuracy,
        PERCENT,
        "Accuracy, loss and groups are computed on held-out test data, which the guarantee does not cover: the models "
        "do not depend on it, this page does.",
        frozenset(Place),
        of_model=True,
    ),
    Metric("loss", "final/loss", "Loss", loss, NUMBER, places=frozenset({Place.TRIALS}), of_model=True),
    Metric(
        "accuracy_change",
        "fairness/accuracy_change",
        "Change, points",
        accuracy_change,
        POINTS,
        "Private minus non-private accuracy, same data, model and seed, in percentage points. No guarantee covers the "
        "non-private baseline, and therefore none covers this change.",
        frozenset({Place.SETTINGS, Place.TERMINAL}),
        of_model=True,
    ),
    Metric(
        "worst_group_accuracy",
        "fairness/worst_group_accuracy",
        "Worst-served group",
        worst_group_accuracy,
        PERCENT,
        "The group of the test data with the lowest accuracy, and that accuracy.",
        frozenset(Place),
        of_model=True,
        whose=worst_group_name,
    ),
    Metric(
        "unequal_cost",
        "fairness/unequal_cost",
        "Unequal cost, points",
        unequal_cost,
        GAP,
        "The largest minus the smallest change of a group's accuracy against the baseline. Privacy is fair, in the "
        "sense of equal cost, when all groups change alike.",
        frozenset({Place.SETTINGS}),
        of_model=True,
    ),
    Metric(
        "seconds",
        "final/wall_seconds",
        "Time",
        wall_seconds,
        SECONDS,
        places=frozenset({Place.TRIALS, Place.TERMINAL}),
    ),
)
FAMILIES = (
    Family(_fairness, of_model=True),
    Family(_epsilon_by_group_size),
    Family(_risk_by_group_size),
    Family(_epsilon_quantiles),
    Family(_audit, of_model=True),
    Family(_accounted_again),
)
SECTIONS = ("final/", "fairness/", "privacy/")
"""Sections of MLflow's metrics, in the order of logging; MLflow's comparison page opens with the first metric."""


def columns(place: Place) -> tuple[Metric, ...]:
    """The metrics with a column in ``place``, in the order of `METRICS`.

    >>> [metric.name for metric in columns(Place.TERMINAL)][:2]
    ['epsilon', 'median_example_epsilon']
    """
    return tuple(metric for metric in METRICS if place in metric.places)


def known(trial: PublishedTrial) -> dict[str, float | None]:
    """Every metric by its name in results.json; None if it is unknown or infinite."""
    found = {metric.name: metric.value(trial) for metric in METRICS}
    return {name: value if value is not None and math.isfinite(value) else None for name, value in found.items()}


def families(trial: PublishedTrial) -> dict[str, float | None]:
    """Every number of `FAMILIES` by its name in MLflow; those of the model only if the trial finished."""
    finished = trial.state is TrialState.FINISHED
    found = (family.values(trial) for family in FAMILIES if finished or not family.of_model)
    return {name: value for values in found for name, value in values.items()}


def final_metrics(trial: PublishedTrial) -> dict[str, float]:
    """The scalars of a trial by their names in MLflow, section by section; only finite ones.

    An infinite epsilon is recorded as the tag ``private=false`` instead. For a stopped trial, metrics of the model are
    left out (its series show them); its costs are included.
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
    yield from families(trial).items()
