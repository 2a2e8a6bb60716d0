"""Functions that read one number from a trial, used by the entries of `metrics.METRICS`. Pure; None means unknown."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Final

import numpy as np

from dpsweep.accounting.attacks import FALSE_POSITIVE_RATES
from dpsweep.orchestration.comparison.tallies import Statistic, Tally, of_counts
from dpsweep.orchestration.store.published import (
    EpsilonHistogram,
    PublishedGroup,
    PublishedTrial,
    TrialState,
)
from dpsweep.workers.evaluation import rates
from dpsweep.workers.evaluation.rates import ConfusionCounts

Value = Callable[[PublishedTrial], float | None]
"""A function from a trial to a number; None if it is unknown, infinite if there is no bound."""
_TRAINED: Final = (TrialState.FINISHED, TrialState.STOPPED)


def finite(value: float | None) -> float | None:
    """Return the value; None also for one that is infinite or NaN."""
    return value if value is not None and math.isfinite(value) else None


def epsilon(trial: PublishedTrial) -> float | None:
    """Return the epsilon in the worst case over all training examples; infinite for a baseline."""
    return trial.privacy.epsilon if trial.privacy else None


def delta(trial: PublishedTrial) -> float | None:
    """Return the delta of `epsilon`; None for a baseline, which has no guarantee."""
    return trial.privacy.delta if trial.privacy and trial.privacy.is_private else None


def gap_between_groups(value: Callable[[PublishedGroup], float | None]) -> Value:
    """Return a function from a trial to the largest minus the smallest value of a group of the test data; None for
    fewer than two.
    """

    def gap(trial: PublishedTrial) -> float | None:
        groups = trial.quality.groups if trial.quality else ()
        known = [found for group in groups if (found := value(group)) is not None]
        return max(known) - min(known) if len(known) > 1 else None

    return gap


def main(trial: PublishedTrial) -> float | None:
    """Return the main score of the trial's task on test data: accuracy for classification, else one of its scores."""
    return trial.quality.main if trial.quality else None


def median_epsilon(trial: PublishedTrial) -> float | None:
    """Return the median epsilon_i: as published, or computed from the published histogram (post-processing, no further
    cost).
    """
    individuals = trial.individuals
    if individuals is None:
        return None
    if individuals.median is not None:
        return individuals.median
    if 0.5 in individuals.quantiles:
        return individuals.quantiles[0.5]
    return _histogram_median(individuals.histogram) if individuals.histogram else None


def _histogram_median(histogram: EpsilonHistogram) -> float | None:
    counts = [max(count, 0.0) for count in histogram.counts]
    half, before = sum(counts) / 2.0, 0.0
    for low, high, count in zip(histogram.edges, histogram.edges[1:], counts, strict=False):
        if count > 0.0 and before + count >= half:
            return low + (high - low) * (half - before) / count
        before += count
    return None


def worst_over_median(trial: PublishedTrial) -> float | None:
    """Return the worst-case epsilon divided by the median epsilon_i."""
    worst, median = epsilon(trial), median_epsilon(trial)
    return worst / median if worst is not None and median is not None and median > 0.0 else None


def loss_correlation(trial: PublishedTrial) -> float | None:
    """Return Pearson's r of epsilon_i and the log loss of the example when norms were last taken (paper A,
    Figure 5).
    """
    return trial.individuals.loss_correlation if trial.individuals else None


def squared_error(trial: PublishedTrial, place: int) -> float | None:
    """Return the mean over the steps of the squared error of the sum of all gradients up to each (place 0), or the
    largest error (1).
    """
    errors = trial.privacy.squared_errors if trial.privacy else None
    return errors[place] if errors else None


def peak_memory(trial: PublishedTrial) -> float | None:
    """Return the peak memory of the device that trained the trial, in MiB; None before its end, as it still grows."""
    return trial.device.peak_bytes / 2**20 if trial.device and trial.state in _TRAINED else None


def utilization(trial: PublishedTrial) -> float | None:
    """Return the mean share of time in which the GPU that trained the trial computed; None before its end."""
    return trial.device.utilization if trial.device and trial.state in _TRAINED else None


def advantage(trial: PublishedTrial, size: int = 1) -> float | None:
    """Return the upper bound on the membership advantage of any attack on ``size`` records together; None for a
    baseline, which has no bound.
    """
    risk = trial.privacy.risks.get(size) if trial.privacy else None
    return risk.advantage.upper if risk else None


def tpr_at_fpr_1pct(trial: PublishedTrial, size: int = 1) -> float | None:
    """Return the upper bound on the true positive rate of any such attack at a false positive rate of 1%."""
    risk = trial.privacy.risks.get(size) if trial.privacy else None
    return risk.true_positive_rates[FALSE_POSITIVE_RATES.index(0.01)].upper if risk else None


@lru_cache(maxsize=2**14)
def score_of_counts(found: ConfusionCounts | None, score: Statistic) -> float | None:
    """Return a score of counts; None if it is not defined. Cached, because every table and figure asks for the same
    ones.
    """
    if found is None:
        return None
    value = score(Tally(found.matrix, np.asarray(found.log_loss), np.asarray(found.calibration_error)))
    return None if value is None or math.isnan(value) else float(value)


def _majority_rate(counts: rates.Array) -> rates.Array:
    """Return the share of the most frequent label, which is the accuracy of always predicting it.

    counts: [..., K, K] by label and predicted class. Returns: [...].
    """
    of_labels = counts.sum(-1)
    return np.asarray(of_labels.max(-1) / of_labels.sum(-1))


MAJORITY: Final = of_counts(_majority_rate)


def epsilon_gap(trial: PublishedTrial) -> float | None:
    """Return the largest minus smallest mean epsilon_i over groups of training examples (paper A), as published."""
    paid = [group.mean for group in trial.individuals.groups] if trial.individuals else []
    return max(paid) - min(paid) if len(paid) > 1 else None


def on_training(trial: PublishedTrial) -> float | None:
    """Return the main score of the final model on its training examples."""
    return trial.quality.on_training if trial.quality else None


def in_training(name: str) -> Callable[[PublishedGroup], float | None]:
    """Return a function from a group to the last of the means ``name`` in its `PublishedCourse`."""

    def last(group: PublishedGroup) -> float | None:
        found = getattr(group.training, name) if group.training else ()
        return found[-1] if found else None

    return last


def further_numbers(trial: PublishedTrial) -> dict[str, float | None]:
    """Return the numbers whose names in MLflow depend on the trial; of the final model only if it finished.

    Gaps between groups, recalls of classes, scores of single labels or targets, costs and bounds on attacks by group
    size, quantiles of epsilon_i, bounds of audits, and results of `dpsweep account`.
    """
    found: dict[str, float | None] = {}
    is_finished, quality, privacy = trial.state is TrialState.FINISHED, trial.quality, trial.privacy
    if quality is not None and is_finished:
        recalls = rates.recalls(quality.counts.matrix).tolist() if quality.counts else ()
        found |= {f"fairness/{name}": gap for name, gap in quality.fairness.items()}
        found |= {f"final/recall_of_class_{label}": finite(recall) for label, recall in enumerate(recalls)}
        for name, scores in quality.parts.items():
            found |= {f"final/{number}_of_{name}": score for number, score in scores.items()}
    if privacy is not None:
        sizes = [size for size in privacy.risks if size > 1]
        costs = {size: cost for size, cost in privacy.group_epsilons.items() if size > 1}
        found |= {f"privacy/epsilon_group_of_{size}": cost for size, cost in costs.items()}
        found |= {f"privacy/advantage_group_of_{size}": advantage(trial, size) for size in sizes}
        found |= {f"privacy/tpr_at_fpr_1pct_group_of_{size}": tpr_at_fpr_1pct(trial, size) for size in sizes}
    quantiles = trial.individuals.quantiles if trial.individuals else {}
    found |= {f"privacy/epsilon_i_quantile_{level:g}": value for level, value in quantiles.items()}
    for audit in trial.every_audit if is_finished else ():
        place = f"audit/{audit.name}".rstrip("/")
        found |= {f"{place}/lower_bound": audit.lower_bound, f"{place}/confidence": audit.confidence}
        found |= {f"{place}/lower_bound_{name}": bound for name, bound in audit.lower_bounds.items()}
    for account in trial.accounts:
        values = {"epsilon": account.epsilon, "mean_epsilon_i": account.mean, "median_epsilon_i": account.median}
        values |= {f"epsilon_group_of_{size}": cost for size, cost in account.group_epsilons.items()}
        found |= {f"privacy/account/{account.name}/{name}": value for name, value in values.items()}
    return found
