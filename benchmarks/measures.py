"""Measures finished trials beyond `Sweep.results`, for docs/reproduction.csv.

The data of the papers are public, so values that a trial withholds or releases with noise are measured exactly here.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import dpsweep
from dpsweep.accounting import account, individual_epsilons
from dpsweep.accounting.records.shards import NormShards
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.orchestration.comparison.statistics import pearson
from dpsweep.orchestration.store.results import TrialResult, read_exact_statistics
from dpsweep.workers.tasks.losses import build_loss
from dpsweep.workers.trials.membership import attack

Measure = Callable[[dpsweep.Trial, TrialFiles], Mapping[str, float | None]]


def of_training(trial: dpsweep.Trial, files: TrialFiles) -> Mapping[str, float | None]:
    """Return the number of epochs trained; a budget may have ended the trial early."""
    training = getattr(trial.result, "training", None)
    return {} if training is None else {"epochs": training.epochs}


def of_examples(trial: dpsweep.Trial, files: TrialFiles) -> Mapping[str, float | None]:
    """Exact statistics of epsilon_i: means by group, the correlation with losses, and errors of the estimates."""
    exact = read_exact_statistics(files.private_summary, "train the trial again")
    if exact is None:
        return {}
    found: dict[str, float | None] = {f"epsilon_of.{group.name}": group.mean for group in exact.groups}
    found |= {"mean_example_epsilon": exact.mean, "median_example_epsilon": exact.median}
    found["loss_correlation"] = exact.loss_correlation
    if exact.estimates is not None:
        found["estimates.correlation"] = exact.estimates.correlation
        found["estimates.mean_error"] = exact.estimates.mean_error
        found["estimates.largest_error"] = exact.estimates.largest_error
    return found


def training_accuracy(trial: dpsweep.Trial, files: TrialFiles) -> Mapping[str, float | None]:
    """Accuracy of the final model on its training examples."""
    train = _dataset(trial).train
    predicted = trial.predict(train.features).argmax(1)
    return {"training_accuracy": float((predicted == train.labels.numpy()).mean())}


def epochs_of_each_noise(trial: dpsweep.Trial, files: TrialFiles) -> Mapping[str, float | None]:
    """Return how many epochs the schedule kept each noise multiplier (paper C, Figure 4)."""
    if not isinstance(trial.result, TrialResult):
        return {}
    counts = Counter(f"epochs_at.{record.noise_multiplier:.4g}" for record in trial.result.training.history)
    return {name: float(count) for name, count in counts.items()}


def mean_gradients(trial: dpsweep.Trial, files: TrialFiles) -> Mapping[str, float | None]:
    """For each group of the training examples, the norm of their mean gradient at the final model."""
    import torch

    dataset, model = _dataset(trial), trial.model()
    found = {}
    for place, name in enumerate(dataset.group_names):
        rows = dataset.train.groups == place
        logits = model(dataset.prepare(dataset.train.features[rows]))
        loss = torch.nn.functional.cross_entropy(logits, dataset.train.labels[rows])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        found[f"mean_gradient.{name}"] = math.sqrt(sum(float((each**2).sum()) for each in gradients))
    return found


def release_error(trial: dpsweep.Trial, files: TrialFiles) -> Mapping[str, float | None]:
    """Share of examples near the largest epsilon_i, quantiles, and mean relative error of their release.

    For paper A, Table 2.
    """
    shown = getattr(trial.result, "individuals", None)
    if shown is None:
        return {}
    exact = trial.epsilons().upper
    errors = [abs(value / np.quantile(exact, rank) - 1.0) for rank, value in shown.quantiles.items()]
    if shown.mean is not None:
        errors.append(abs(shown.mean / exact.mean() - 1.0))
    found = {"share_at_worst_case": float((exact > 0.99 * exact.max()).mean())}
    found |= {f"epsilon_quantile.{rank:g}": float(np.quantile(exact, rank)) for rank in shown.quantiles}
    return {**found, "release_error": float(np.mean(errors))} if shown.disclosure == "private" else found


def of_groups(trial: dpsweep.Trial, files: TrialFiles) -> Mapping[str, float | None]:
    """Correlation of test accuracy and mean epsilon_i over the groups (paper A, Figure 6)."""
    exact = read_exact_statistics(files.private_summary, "train the trial again")
    if exact is None or not isinstance(trial.result, TrialResult):
        return {}
    accuracies = {group.name: group.accuracy for group in trial.result.evaluation.groups}
    paid = [(group.mean, accuracies[group.name]) for group in exact.groups]
    return {"group_correlation": pearson(*map(np.array, zip(*paid, strict=True)))}


def of_refreshes(trial: dpsweep.Trial, files: TrialFiles) -> Mapping[str, float | None]:
    """Correlation of estimated and exact epsilon_i at 0.5, 1 and 3 norm refreshes per epoch (paper A, Figure 4).

    Computed from the examples whose norms were stored at every step; an estimate uses only those at its refreshes.
    """
    if not trial.spec.is_private or not trial.spec.norms.exact_examples:
        return {}
    trace, delta = trial.trace, trial.epsilons().delta
    shards = NormShards(files.exact_norms)
    tracked = [shards.read(part) for part in shards.parts]

    def epsilons(per_epoch: float | None) -> np.ndarray[Any, np.dtype[np.float64]]:
        found = []
        for part in tracked:
            steps = part.steps if per_epoch is None else _refreshed(part.steps, trial, per_epoch)
            seen = part.contributions[:, np.searchsorted(part.steps, steps)]
            found.append(individual_epsilons(steps, seen, trace, delta, "rdp").upper)
        return np.concatenate(found)

    exact = epsilons(None)
    return {f"refreshes_{each:g}.correlation": pearson(exact, epsilons(each)) for each in (0.5, 1.0, 3.0)}


def _refreshed(steps: Any, trial: dpsweep.Trial, per_epoch: float) -> Any:
    """Return the ``steps`` at which norms are measured if this happens ``per_epoch`` times an epoch."""
    epoch = len(steps) / trial.spec.epochs
    return np.unique(np.ceil(np.arange(0.0, len(steps), epoch / per_epoch)).astype(np.int64))


def membership(trial: dpsweep.Trial, files: TrialFiles) -> Mapping[str, float | None]:
    """Accuracy of membership inference by a loss threshold per group; guessing gives 0.5 (paper A, App. D)."""
    found = attack(trial.model(), _dataset(trial), build_loss(trial.spec.loss), seed=0)
    rates = {f"membership.{group.name}": group.success_rate for group in found}
    return {**rates, "membership": sum(group.correct for group in found) / sum(group.examples for group in found)}


def by_pld(trial: dpsweep.Trial, files: TrialFiles) -> Mapping[str, float | None]:
    """Epsilon_i and the worst case by privacy loss distributions, from the same norms; paper A did not have these."""
    if not trial.spec.is_private:
        return {}
    trace, delta = trial.trace, trial.epsilons().delta
    shards = NormShards(files.norms)
    read = (shards.read(part) for part in shards.parts)
    found = [individual_epsilons(part.steps, part.contributions, trace, delta, "pld").upper for part in read]
    epsilons = np.concatenate(found)
    return {
        "worst_case_by_pld": account(trace, delta, "pld").epsilon,
        "mean_example_epsilon_by_pld": float(epsilons.mean()),
        "median_example_epsilon_by_pld": float(np.median(epsilons)),
    }


@functools.lru_cache(maxsize=1)
def _load(spec: str, load: Callable[[], Any]) -> Any:
    return load()


def _dataset(trial: dpsweep.Trial) -> Any:
    from dpsweep.workers.data import load_dataset

    return _load(repr(trial.spec.data), lambda: load_dataset(trial.spec.data))


MEASURES: Mapping[str, tuple[Measure, ...]] = {
    "a": (of_examples, of_groups, of_refreshes, by_pld, release_error, membership),
    "c": (training_accuracy,),
    "c-table2-validation": (training_accuracy, epochs_of_each_noise),
    "d": (of_examples,),
    "adult": (of_examples,),
    "mnist": (of_examples,),
    "d-adult": (of_examples, mean_gradients),
    "d-dutch": (of_examples, mean_gradients),
    "d-mnist": (of_examples, mean_gradients),
    "d-mnist-short": (of_examples, mean_gradients),
    "d-mnist-search": (),
}
"""Measures beyond `Sweep.results`, by the name of the sweep or its first word."""


def measured(name: str, trial: dpsweep.Trial, files: TrialFiles) -> Mapping[str, float | None]:
    """Return all measures of a finished trial of the sweep called ``name``."""
    measures = MEASURES.get(name, MEASURES.get(name.partition("-")[0], ()))
    return {key: value for measure in (of_training, *measures) for key, value in measure(trial, files).items()}
