"""Settings: trials that differ only in their seed, averaged and compared. Pure.

The variance between seeds is pooled over the private settings of a sweep. Two or three seeds say little about
their own spread; the seeds of all private settings together say more. A setting whose runs spread more than the
others, by an F test, is left out of the pool and keeps its own spread. No setting or difference ever gets less than
its own, and differences are widened for a setting whose spread is not noticed (`intervals.unnoticed`). The baseline
is not pooled, as training without noise spreads less. A difference from it is pooled over the private settings, each
beside it, so that what the baseline adds has its own few degrees of freedom.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
from scipy import special

from dpsweep.accounting.mechanism.reasons import Reason, union
from dpsweep.accounting.records.json_text import parsed_json
from dpsweep.orchestration.comparison.formats import MISSING, at_most, number, per_unit, shortened
from dpsweep.orchestration.comparison.intervals import (
    OTHER_SPREAD,
    Array,
    RunValues,
    SpreadOfSeeds,
    apart_by_chance,
    around_mean,
    repeats,
)
from dpsweep.orchestration.comparison.ledger import Composition, composed
from dpsweep.orchestration.comparison.metric_types import Metric
from dpsweep.orchestration.comparison.parameters import value_text
from dpsweep.orchestration.comparison.statistics import Spread, pareto_front, spread
from dpsweep.orchestration.comparison.values import Value, epsilon, main
from dpsweep.orchestration.store.published import (
    NON_PRIVATE,
    RUNS,
    GroupEpsilon,
    Label,
    PublishedAttack,
    PublishedGroup,
    PublishedTrial,
    TrialState,
)

_HIDDEN_SPREAD: Final = 1e-3
"""Level of `_spreads_more` for settings that others may have hidden."""


def pooled(settings: Sequence[RunValues]) -> SpreadOfSeeds | None:
    """Return the spread between the runs of several settings with the same seeds and splits; None if nothing can be
    pooled.

    Its degrees of freedom follow a two-way layout. The mean of one of S settings of R seeds has S (R - 1) if runs are
    unrelated, down to R - 1 where all settings of a seed move together. A difference has (S - 1)(R - 1).
    """
    every = [repeats(each) for each in settings]
    if len(every) < 2 or (freedom := len(every[0].values) - 1) < 1:
        return None
    apart = np.stack([around_mean(each.values) for each in every])
    usual = _usual(apart, freedom)
    kept = [each for each, is_usual in zip(every, usual, strict=True) if is_usual]
    if len(kept) < 2:
        return None
    own, shared = _covariances(list(apart[usual]), freedom)
    chances = [apart_by_chance(each) for each in kept]
    own_chance, shared_chance = _covariances(chances, freedom * kept[0].resampled.shape[1])
    return SpreadOfSeeds(own, shared, own_chance, shared_chance, freedom, len(kept))


def _covariances(apart: Sequence[Array], degrees: int) -> tuple[Array, Array]:
    """Return the mean covariance of the numbers of one setting, and of two settings. apart: [rows, K] by setting."""
    count = len(apart)
    of_each = sum(each.T @ each for each in apart)
    total = np.sum(apart, axis=0)
    across = (total.T @ total - of_each) / (count * (count - 1))
    return np.asarray(of_each / count / degrees), np.asarray(across / degrees)


def _usual(apart: Array, freedom: int) -> Array:
    """Return [S]: whether the runs of a setting spread like the runs of other settings.

    A setting that spreads a hundred times more hides one that spreads ten times more, and several that spread alike
    hide each other. The test is therefore repeated without the settings that were found, of each alone and of several
    together, at a level that hardly ever takes another setting away by chance.
    """
    usual = np.logical_not(_spreads_more(apart, freedom, OTHER_SPREAD))
    while True:
        more = _spreads_more(apart[usual], freedom, _HIDDEN_SPREAD)
        more = more if more.any() else _spread_apart(apart[usual], freedom)
        if not more.any():
            return usual
        usual[np.flatnonzero(usual)[more]] = False


def _spread_apart(apart: Array, freedom: int) -> Array:
    """Return [S]: the fewest settings with the largest spread that together spread more than the two or more others.

    None if none of them hides another. The level of the F test holds for all subsets of the settings together. Common
    parts make chance rejections rarer; columns that all have in common, such as a baseline's, tell nothing.
    """
    count = len(apart)
    apart = apart[:, :, np.ptp(apart, axis=0).any(0)]
    scale = np.maximum((apart**2).mean((0, 1)), 1e-300)
    found = (apart**2 / scale).sum((1, 2))
    squares = np.sort(found)
    few = np.arange(2, count - 1)
    if not few.size:
        return np.zeros(count, dtype=bool)
    total = np.cumsum(squares)
    rest = total[count - 1 - few]
    with np.errstate(divide="ignore", invalid="ignore"):  # 0 / 0 where no setting spreads, and none is rejected
        ratio = (total[-1] - rest) / few / (rest / (count - few))
    subsets = special.comb(count, few) * len(few)
    rejected = subsets * special.fdtrc(freedom * few, freedom * (count - few), ratio) < _HIDDEN_SPREAD
    least = squares[count - 1 - few[np.argmax(rejected)]] if rejected.any() else math.inf
    return np.asarray(found > least)


def _spreads_more(apart: Array, freedom: int, level: float) -> Array:
    """Return [S]: whether runs of a setting, less the part common to all settings of a seed, spread more than others.

    apart: [S, R, K]. By Grubbs' estimator of each variance from the variances of all differences; needs three settings.
    """
    count = len(apart)
    if count < 3:
        return np.zeros(count, dtype=bool)
    scale = np.maximum((apart**2).mean((0, 1)), 1e-300)
    scaled = apart / np.sqrt(scale)
    products = np.einsum("srk,trk->st", scaled, scaled)
    squares = np.diag(products)
    of_pair = squares[:, None] + squares - 2.0 * products
    of_one, total = of_pair.sum(1), of_pair.sum() / 2.0
    alone = np.maximum((of_one - total / (count - 1)) / (count - 2), 0.0)
    others = (total - of_one) / ((count - 1) * (count - 2) / 2.0) / 2.0
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(others > 0.0, alone / others, np.where(alone > 0.0, np.inf, 0.0))
    return np.asarray(special.fdtrc(freedom, freedom * (count - 2), ratio) < level)


def group_value(name: str, value: Callable[[PublishedGroup], float | None]) -> Value:
    """Return a function from a trial to ``value`` of its test group called ``name``."""
    return lambda trial: _of_group(trial.quality.groups if trial.quality else (), name, value)


def group_epsilon(name: str) -> Value:
    """Return a function from a trial to the mean epsilon_i of its training group called ``name``."""
    return group_paid(name, lambda group: group.mean)


def group_epsilon_error(name: str) -> Value:
    """Return a function from a trial to the published standard error of `group_epsilon`."""
    return group_paid(name, lambda group: group.standard_error)


def group_paid(name: str, value: Callable[[GroupEpsilon], float | None]) -> Value:
    """Return a function from a trial to ``value`` of its training group called ``name``."""
    return lambda trial: _of_group(trial.individuals.groups if trial.individuals else (), name, value)


def group_attack(name: str, value: Callable[[PublishedAttack], float]) -> Value:
    """Return a function from a trial to ``value`` of the attack on the group called ``name``."""
    return lambda trial: _of_group(trial.attacks, name, value)


_Group = TypeVar("_Group", PublishedGroup, GroupEpsilon, PublishedAttack)


def _of_group(groups: Iterable[_Group], name: str, value: Callable[[_Group], float | None]) -> float | None:
    return next((value(group) for group in groups if group.name == name), None)


@dataclass(frozen=True)
class Setting:
    """Finished trials that share all labels except the training seed and the split seed."""

    name: str
    labels: Mapping[str, Label]
    trials: tuple[PublishedTrial, ...]

    @property
    def clipping(self) -> str:
        """Return the label of the clipping method, ``non-private`` for a baseline; "" without a label."""
        return NON_PRIVATE if self.is_baseline else str(self.labels.get("clipping", ""))

    @property
    def schedule(self) -> str:
        """Return the label of the noise schedule; "" for a baseline and without a label."""
        return "" if self.is_baseline else str(self.labels.get("schedule", ""))

    @property
    def method(self) -> tuple[str, str]:
        """Return the names of the clipping method and of the schedule, without the parameters that labels may add."""
        params = self.trials[0].params
        if self.is_baseline:
            return NON_PRIVATE, ""
        clipping, schedule = params.get("spec.clipping.name"), params.get("spec.noise.schedule.name")
        return str(clipping or self.clipping), str(schedule or self.schedule)

    @property
    def is_baseline(self) -> bool:
        """Return whether all trials are non-private."""
        return all(trial.is_baseline for trial in self.trials)

    @property
    def splits(self) -> int:
        """Return the number of splits of the data that its trials have."""
        return len({trial.labels.get("split_seed") for trial in self.trials})

    @property
    def is_of_splits(self) -> bool:
        """Return whether its trials are on several splits of the data."""
        return self.splits > 1

    @property
    def runs(self) -> int:
        """Return the number of its trials."""
        return len(self.trials)

    @property
    def name_without_schedule(self) -> str:
        """Return the name without its schedule."""
        return " · ".join(part for part in self.name.split(" · ") if part != self.schedule)

    @property
    def per_unit(self) -> str:
        """Return whose its epsilons are, as the words behind a number; "" for single examples, and for a baseline."""
        units = {trial.privacy.unit for trial in self.trials if trial.privacy and trial.privacy.is_private}
        return per_unit(units.pop()) if len(units) == 1 else ""

    @property
    def neighbours(self) -> frozenset[tuple[str, str]]:
        """Return the adjacencies of its epsilons, each with the unit; epsilons of others do not compare with these."""
        found = (trial.privacy for trial in self.trials)
        return frozenset((each.adjacency, each.unit) for each in found if each and each.is_private)

    @property
    def composition(self) -> Composition | None:
        """Return the composed cost of all seeds of the setting."""
        return composed(self.trials)

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Return why the epsilons of its trials are estimates; empty if they are guarantees."""
        return union(trial.reasons for trial in self.trials)

    @property
    def composed_cost(self) -> str:
        """Return the composed epsilon of all seeds as text, with whose it is and the kind of claim."""
        found = self.composition
        if found is None:
            return number(math.inf) if self.is_baseline else MISSING
        whose = f"{self.per_unit}," if self.per_unit else ""
        return at_most(found.epsilon) + (f"{whose} {found.estimate.kind}" if found.estimate else "")

    def error_over_seeds(self, error: Value) -> float:
        """Return standard error of the mean over seeds, from the independent standard errors of its values; 0 if
        unknown.
        """
        known = [found for trial in self.trials if (found := error(trial)) is not None and math.isfinite(found)]
        return math.hypot(*known) / len(known) if known else 0.0

    def over_seeds(self, value: Value) -> Spread | None:
        """Return the mean, standard deviation and range of a number over the seeds; None if no trial has a finite
        value.
        """
        return spread(value(trial) for trial in self.trials)

    def mean(self, value: Value) -> float | None:
        """Return the mean of `over_seeds`; None if no trial has a finite value."""
        found = self.over_seeds(value)
        return found.mean if found else None

    def rank(self, value: Value) -> float:
        """Return the `mean`, by which settings are sorted; -infinity without one."""
        found = self.mean(value)
        return -math.inf if found is None else found

    @property
    def first_seed(self) -> PublishedTrial:
        """Return the trial with the lowest seeds, which represents the setting; choosing the best one would bias it."""
        return min(self.trials, key=lambda trial: (*(int(trial.labels.get(name, 0)) for name in RUNS), trial.key))

    @property
    def highest_epsilon(self) -> float | None:
        """Return the largest worst-case epsilon of a trial; None for a baseline."""
        found = self.over_seeds(epsilon)
        return found.high if found else None

    @property
    def level(self) -> float:
        """Return the worst-case epsilon to two digits, alike for trials of one target; infinite for a baseline."""
        found = self.mean(epsilon)
        return math.inf if found is None else float(f"{found:.2g}")


def levels(settings: Iterable[Setting]) -> list[float]:
    """Return the finite `Setting.level` of settings, ascending and each once."""
    return sorted({setting.level for setting in settings if math.isfinite(setting.level)})


def shown_over_seeds(metric: Metric, setting: Setting) -> str:
    """Return the metric over the seeds as the report shows it, prefixed with the names of its groups, if any
    (`whose`). An epsilon of users says so.
    """
    found = setting.over_seeds(metric.value)
    text = metric.format.over_seeds(found) if found else metric.format.one(metric.value(setting.trials[0]))
    text += setting.per_unit if metric.name == "epsilon" else ""
    return ": ".join([*([", ".join(groups)] if (groups := whose(metric, setting)) else []), text])


def called(group: str) -> str:
    """Return the name of a group; "group 8" for a bare number, which would read as a value."""
    return group if any(letter.isalpha() for letter in group) else f"group {group}"


def whose(metric: Metric, setting: Setting) -> tuple[str, ...]:
    """Return the names of the groups whose value the metric is, over the trials of the setting; empty for an overall
    metric, and where it is that of every group.
    """
    return tuple(dict.fromkeys(name for trial in setting.trials for name in metric.whose(trial)))


def served_worst(metric: Metric, setting: Setting) -> str:
    """Return in words the groups whose value a worst-group metric is, the first few of many."""
    return " or ".join(shortened([called(name) for name in sorted(whose(metric, setting))])) or "every group alike"


def setting_name(trial: PublishedTrial) -> str:
    """Return the trial's labels without seeds, as a phrase: "flat · exponential · epsilon 3", or "non-private"
    first.
    """
    return named(trial.setting, trial.is_baseline)


def named(labels: Mapping[str, Label], is_baseline: bool) -> str:
    """Return the name of a setting with these labels, by which every page, table and message calls it."""
    known = {key: value for key, value in labels.items() if value not in ("", "none", NON_PRIVATE)}
    if is_baseline:
        known.pop("schedule", None)  # a baseline has no noise
    phrases = label_phrases(known)
    plain = [phrases.pop(key) for key in _PLAIN if key in phrases]
    return " · ".join([*([NON_PRIVATE] if is_baseline else []), *plain, *phrases.values()]) or "trial"


_PLAIN = ("clipping", "schedule")
"""Labels that are shown by their value alone."""


def label_phrases(labels: Mapping[str, Label]) -> dict[str, str]:
    """Return each label as shown to readers: "flat", "exponential", "epsilon 3", "model mlp"."""
    values = {key: value_text(value) for key, value in labels.items()}
    return {key: value if key in _PLAIN else f"{key.replace('_', ' ')} {value}" for key, value in values.items()}


def finished_settings(trials: Iterable[PublishedTrial]) -> tuple[Setting, ...]:
    """Group the finished trials by setting: baselines first, then in the order of the sweep."""
    grouped: dict[str, list[PublishedTrial]] = {}
    for trial in trials:
        if trial.state is TrialState.FINISHED:
            grouped.setdefault(setting_name(trial), []).append(trial)
    settings = [Setting(name, members[0].setting, tuple(members)) for name, members in grouped.items()]
    return tuple(sorted(settings, key=lambda setting: not setting.is_baseline))


def class_names(trials: Iterable[PublishedTrial], classes: int) -> tuple[str, ...]:
    """Return the names of the classes as the sweep declares them; their numbers where it does not, or not alike."""
    declared = {str(trial.params.get("spec.data.params.classes")) for trial in trials}
    try:
        names = parsed_json(declared.pop()) if len(declared) == 1 else None
    except ValueError:  # a source of the user's own may call something else so
        names = None
    if not isinstance(names, list) or len(names) != classes:
        return tuple(map(str, range(classes)))
    return tuple(each if isinstance(each, str) else json.dumps(each) for each in names)


def group_names(*settings: Setting) -> tuple[str, ...]:
    """Return the names of all test groups, in increasing order of their mean accuracy, or main score, over the trials
    of all settings.
    """
    accuracies: dict[str, list[float]] = {}
    for trial in (trial for setting in settings for trial in setting.trials):
        for group in trial.quality.groups if trial.quality else ():
            served = math.nan if group.main is None else group.main
            accuracies.setdefault(group.name, []).append(served if math.isfinite(served) else 0.0)
    return tuple(sorted(accuracies, key=lambda name: statistics.fmean(accuracies[name])))


def best_trade_offs(
    settings: Sequence[Setting], worst_group: Metric, useless: Container[str] = ()
) -> tuple[Setting, ...]:
    """Return the private settings on the Pareto front of epsilon, accuracy (or main score), and a worst-group metric.

    useless: names of settings that are not on it, whatever they cost.

    Epsilons are compared to two significant digits, because trials calibrated to one target differ by rounding. Each
    adjacency has another front. Worst groups are compared by the means that tables and plots show; `Findings.front`
    says whether a difference is beyond noise.
    """
    private = [setting for setting in settings if not setting.is_baseline and setting.name not in useless]
    costed: dict[frozenset[tuple[str, str]], list[tuple[Setting, tuple[float, ...]]]] = {}
    for setting in private:
        total, worst = map(setting.mean, (main, worst_group.value))
        if total is not None and math.isfinite(setting.level):
            sign = -1.0 if worst_group.better == "higher" else 1.0
            cost = (setting.level, -total, sign * worst if worst is not None else math.inf)
            costed.setdefault(setting.neighbours, []).append((setting, cost))
    ahead = [alike[i][0] for alike in costed.values() for i in pareto_front([cost for _, cost in alike])]
    return tuple(setting for setting in private if setting in ahead)
