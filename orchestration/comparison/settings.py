"""Settings: trials that differ only in their seed, averaged and compared. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from orchestration.comparison.metrics import Value, accuracy, epsilon, worst_group_accuracy
from orchestration.comparison.statistics import Spread, pareto_front, spread
from orchestration.records.published import (
    NON_PRIVATE,
    GroupEpsilon,
    Label,
    PublishedAttack,
    PublishedGroup,
    PublishedTrial,
)
from orchestration.records.states import TrialState


def group_value(name: str, value: Callable[[PublishedGroup], float | None]) -> Value:
    """The given value of the test group called ``name``, as a function of the trial."""

    def of_trial(trial: PublishedTrial) -> float | None:
        groups = trial.quality.groups if trial.quality else ()
        return next((value(group) for group in groups if group.name == name), None)

    return of_trial


def group_epsilon(name: str) -> Value:
    """Mean epsilon_i of the training group called ``name``, as a function of the trial."""

    return _group_paid(name, lambda group: group.mean)


def group_epsilon_error(name: str) -> Value:
    """Standard error of `group_epsilon` as published, as a function of the trial."""

    return _group_paid(name, lambda group: group.standard_error)


def group_loss_correlation(name: str) -> Value:
    """`metrics.loss_correlation` over the training group called ``name``, as a function of the trial."""
    return _group_paid(name, lambda group: group.loss_correlation)


def _group_paid(name: str, value: Callable[[GroupEpsilon], float | None]) -> Value:
    def of_trial(trial: PublishedTrial) -> float | None:
        groups = trial.individuals.groups if trial.individuals else ()
        return next((value(group) for group in groups if group.name == name), None)

    return of_trial


def group_attack(name: str, value: Callable[[PublishedAttack], float]) -> Value:
    """The given value of the attack on the group called ``name``, as a function of the trial."""

    def of_trial(trial: PublishedTrial) -> float | None:
        return next((value(group) for group in trial.attacks if group.name == name), None)

    return of_trial


@dataclass(frozen=True)
class Setting:
    """Finished trials that share all labels but the seed. ``clipping`` and ``schedule`` are "" where unlabelled."""

    name: str
    labels: Mapping[str, Label]
    trials: tuple[PublishedTrial, ...]

    @property
    def clipping(self) -> str:
        return NON_PRIVATE if self.is_baseline else str(self.labels.get("clipping", ""))

    @property
    def schedule(self) -> str:
        return "" if self.is_baseline else str(self.labels.get("schedule", ""))

    @property
    def is_baseline(self) -> bool:
        return all(trial.is_baseline for trial in self.trials)

    @property
    def name_without_schedule(self) -> str:
        return " · ".join(part for part in self.name.split(" · ") if part != self.schedule)

    def error_over_seeds(self, error: Value) -> float:
        """Standard error of a mean over seeds whose values have independent standard errors; 0 where unknown."""
        known = [found for trial in self.trials if (found := error(trial)) is not None and math.isfinite(found)]
        return math.hypot(*known) / len(known) if known else 0.0

    def over_seeds(self, value: Value) -> Spread | None:
        return spread(value(trial) for trial in self.trials)


def setting_name(trial: PublishedTrial) -> str:
    """Labels without the seed, as a phrase: "flat · exponential · epsilon 3"; a baseline is called non-private."""
    labels = {key: value for key, value in trial.setting.items() if value not in ("", "none", NON_PRIVATE)}
    if trial.is_baseline:
        labels.pop("schedule", None)  # without noise, its schedule means nothing
    plain = [str(labels.pop(key)) for key in ("clipping", "schedule") if key in labels]
    named = [
        f"{key.replace('_', ' ')} {value:g}" if isinstance(value, float) else f"{key.replace('_', ' ')} {value}"
        for key, value in labels.items()
    ]
    return " · ".join([*([NON_PRIVATE] if trial.is_baseline else []), *plain, *named]) or "trial"


def finished_settings(trials: Iterable[PublishedTrial]) -> tuple[Setting, ...]:
    """Group the finished trials by setting: baselines first, then in the order of the sweep."""
    grouped: dict[str, list[PublishedTrial]] = {}
    for trial in trials:
        if trial.state is TrialState.FINISHED:
            grouped.setdefault(setting_name(trial), []).append(trial)
    settings = [Setting(name, members[0].setting, tuple(members)) for name, members in grouped.items()]
    return tuple(sorted(settings, key=lambda setting: not setting.is_baseline))


def group_names(trials: Iterable[PublishedTrial]) -> tuple[str, ...]:
    """Names of all test groups, worst served first: by mean accuracy over all given trials."""
    accuracies: dict[str, list[float]] = {}
    for trial in trials:
        for group in trial.quality.groups if trial.quality else ():
            accuracies.setdefault(group.name, []).append(group.accuracy if math.isfinite(group.accuracy) else 0.0)
    return tuple(sorted(accuracies, key=lambda name: statistics.fmean(accuracies[name])))


def best_trade_offs(settings: Sequence[Setting]) -> tuple[Setting, ...]:
    """The private settings on the Pareto front of epsilon, accuracy and accuracy of the worst-served group.

    Epsilons are compared to two significant digits, because trials calibrated to one target differ by rounding.
    """
    private = [setting for setting in settings if not setting.is_baseline]
    costed = []
    for setting in private:
        cost, total, worst = map(setting.over_seeds, (epsilon, accuracy, worst_group_accuracy))
        if cost and total:
            costed.append((setting, (float(f"{cost.mean:.2g}"), -total.mean, -(worst or total).mean)))
    return tuple(costed[i][0] for i in pareto_front([cost for _, cost in costed]))
