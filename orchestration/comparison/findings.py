"""Findings of a sweep: settings compared with intervals, verdicts and warnings. Pure."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Final, Literal

import numpy as np
from scipy import special

from dpsweep.accounting.mechanism.units import EXAMPLE
from dpsweep.orchestration.comparison.evidence import TEST_USER, Evidence
from dpsweep.orchestration.comparison.extremes import hidden_groups_note
from dpsweep.orchestration.comparison.formats import amount, first_few, is_shown, listed
from dpsweep.orchestration.comparison.intervals import LEVEL, ConfidenceInterval
from dpsweep.orchestration.comparison.metric_types import Metric
from dpsweep.orchestration.comparison.metrics import METRICS, main_metric, metric
from dpsweep.orchestration.comparison.rate_metrics import (
    GROUP_METRICS,
    WORST_GROUP_METRICS,
    group_metric,
    spoken,
    spoken_worst,
)
from dpsweep.orchestration.comparison.sanity import (
    UnknownCost,
    is_constant,
    is_lost,
    lost_in_words,
    lost_runs,
    too_few_to_test,
    why_cost_is_unknown,
    why_useless,
    without_changes,
)
from dpsweep.orchestration.comparison.settings import Setting, finished_settings, group_names
from dpsweep.orchestration.store.published import NON_PRIVATE, PublishedSweep, PublishedTrial, has_groups

Verdict = Literal["better", "worse", "not distinguishable", "unknown (one seed)", "unknown"]
COMPARED: Final = ("epsilon", "sigma", "data", "model", "sampling", "epochs", "user_sampling", "max_records_per_user")
"""Labels that distinguish compared settings, besides the method; settings that differ only in other labels count as
one method with several tuned values."""


@dataclass(frozen=True)
class Difference:
    """Difference of two settings in one metric: the first setting minus the second, paired, and the verdict on it."""

    one: str
    other: str
    metric: str
    interval: ConfidenceInterval | None

    @property
    def verdict(self) -> Verdict:
        """Return the verdict on the first setting, compared with the second."""
        if self.interval is None:
            return "unknown"
        if self.interval.is_of_one_seed:
            return "unknown (one seed)"
        if self.interval.low <= 0.0 <= self.interval.high:
            return "not distinguishable"
        return "better" if (self.interval.low > 0.0) == (metric(self.metric).better == "higher") else "worse"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "verdict": self.verdict}


POWER: Final = 0.8
"""Share of sweeps in which a difference that is called detectable is found."""
_ACCURACY: Final = metric("accuracy")


@dataclass(frozen=True)
class Findings:
    """The finished settings of a sweep, compared.

    `worst_group`: the worst-group metric that compares them. `main`: accuracy, or the main score of another task;
    higher is better. `looks`: number of times that verdicts were read to decide whether to add seeds; 0 if that was not
    asked.
    """

    settings: tuple[Setting, ...]
    evidence: Evidence
    worst_group: Metric = WORST_GROUP_METRICS["accuracy"]
    main: Metric = _ACCURACY
    looks: int = 0

    @property
    def level(self) -> float:
        """Return the confidence level at which all verdicts hold together; see `dpsweep.orchestration.pipeline.run`.

        >>> Findings((), Evidence({})).level, round(Findings((), Evidence({}), looks=2).level, 4)
        (0.95, 0.9924)
        """
        return 1.0 - (1.0 - LEVEL) * (6.0 / (math.pi * self.looks) ** 2 if self.looks else 1.0)

    @property
    def task(self) -> str:
        """Return the task of the sweep, a name in `dpsweep.workers.tasks.TASKS`."""
        return str(self.main.task)

    @property
    def word(self) -> str:
        """Return accuracy, or the main score of the task, as a sentence calls it."""
        return spoken(group_metric(self.main.name))

    @property
    def worst_word(self) -> str:
        """Return the metric of groups behind `worst_group`, as a sentence calls it."""
        return spoken_worst(self.worst_group)

    @property
    def worst_word_unless_main(self) -> str:
        """Return `worst_word` with a space before it; "" where it is that of the main score."""
        return "" if self.worst_word == self.word else f" {self.worst_word}"

    @cached_property
    def trials(self) -> tuple[PublishedTrial, ...]:
        """Return the trials of all settings."""
        return tuple(trial for setting in self.settings for trial in setting.trials)

    @cached_property
    def has_groups(self) -> bool:
        """Return whether there are several groups of test examples to compare."""
        return has_groups(self.trials)

    @property
    def headline(self) -> tuple[str, ...]:
        """Return the metrics of the headline; intervals of its differences hold simultaneously for them.

        They are of all test examples, and of the worst-served group if there are several.
        """
        return (self.main.name, self.worst_group.name) if self.has_groups else (self.main.name,)

    @cached_property
    def private(self) -> tuple[Setting, ...]:
        """Return the private settings."""
        return tuple(setting for setting in self.settings if not setting.is_baseline)

    @cached_property
    def useless(self) -> Mapping[str, str]:
        """Return why private settings are never recommended, by name (`why_useless`, `lost_runs`)."""
        found = {
            setting.name: lost_runs(setting, self.main) or why_useless(setting, self.evidence, self.main)
            for setting in self.private
        }
        return {name: why for name, why in found.items() if why}

    @cached_property
    def too_few_to_test(self) -> str:
        """Return why no private setting can be judged, as a clause, where too few were held out; "" otherwise."""
        found = [too_few_to_test(setting, self.evidence, self.main) for setting in self.private]
        return found[0] if found and all(found) else ""

    @cached_property
    def useful(self) -> tuple[Setting, ...]:
        """Return the private settings that have learnt something."""
        return tuple(setting for setting in self.private if setting.name not in self.useless)

    @cached_property
    def no_reference(self) -> UnknownCost:
        """Return why no baseline tells what privacy costs (`why_cost_is_unknown`)."""
        finished = [setting for setting in self.settings if setting.is_baseline]
        return why_cost_is_unknown(finished, self.evidence, self.main)

    @property
    def unknown_cost(self) -> str:
        """Return sentences if no baseline tells what privacy costs; "" otherwise, and without any."""
        return self.no_reference.sentences

    @cached_property
    def baselines(self) -> tuple[Setting, ...]:
        """Return the non-private settings that are not lost, the best by `main` first; none if `unknown_cost`."""
        if self.unknown_cost:
            return ()
        found = [setting for setting in self.settings if setting.is_baseline and not is_lost(setting)]
        return tuple(sorted(found, key=lambda setting: -mean_of(setting, self.main.name)))

    @cached_property
    def methods(self) -> tuple[Setting, ...]:
        """Return the best of the `useful` settings of each method by `main`; others differ in tuned values alone."""
        best: dict[tuple[object, ...], Setting] = {}
        for setting in self.useful:
            method = _method(setting)
            if method not in best or mean_of(setting, self.main.name) > mean_of(best[method], self.main.name):
                best[method] = setting
        return tuple(best.values())

    def rivals(self, best: Setting) -> tuple[Setting, ...]:
        """Return the settings to compare the best one with: other `methods`, and its method with other values."""
        of_own = [each for each in self.useful if each not in self.methods and _method(each) == _method(best)]
        return tuple(each for each in (*self.methods, *of_own) if each is not best)

    @cached_property
    def differences(self) -> tuple[Difference, ...]:
        """Return the difference of every two `methods` in each metric of the headline."""
        pairs = itertools.combinations(self.methods, 2)
        return tuple(self.difference(one, other, name) for one, other in pairs for name in self.headline)

    @cached_property
    def comparisons(self) -> int:
        """Return the number of differences that headlines may state: all pairs of private settings in each metric."""
        count = len(self.private)
        return max(1, len(self.headline) * count * (count - 1) // 2)

    def interval(self, setting: Setting, name: str) -> ConfidenceInterval | None:
        """Return a metric of a setting with its own 95% interval."""
        return self.evidence.interval(setting, name)

    def difference(self, one: Setting, other: Setting, name: str) -> Difference:
        """Return the difference of two settings in one metric; its interval is corrected for all `comparisons`."""
        found = self.evidence.difference(one, other, name, comparisons=self.comparisons, level=self.level)
        return Difference(one.name, other.name, name, found)

    def best(self, name: str, among: Iterable[Setting] | None = None) -> Setting | None:
        """Return the setting with the best `value` of a metric in ``among``, by default `useful`; None if none has
        it.
        """
        sign = 1.0 if metric(name).better == "higher" else -1.0
        return max(self._known(name, among), key=lambda setting: sign * self.value(setting, name), default=None)

    def is_of_rows(self, setting: Setting) -> bool:
        """Return whether the epsilon of a setting is that of one row, while the data name users who may own several."""
        costs = [trial.privacy for trial in setting.trials if trial.privacy and trial.privacy.is_private]
        of_row = any(each.unit == EXAMPLE.name and max(each.group_epsilons, default=1) == 1 for each in costs)
        names_users = any(trial.params.get("spec.data.params.user") for trial in setting.trials)
        return of_row and (names_users or self.evidence.units(setting, self.main.name)[1] == TEST_USER)

    def per_unit(self, setting: Setting) -> str:
        """Return `Setting.per_unit`; " per row" for single rows of users, who may own several."""
        return " per row" if self.is_of_rows(setting) else setting.per_unit

    def value(self, setting: Setting, name: str) -> float:
        """Return the mean of a metric by which settings are ordered; NaN if unknown.

        The value of an extreme over groups, such as the worst-served group, corrected for its choice.
        """
        mean = mean_of(setting, name)
        if metric(name).extreme is None or np.isnan(mean):
            return mean
        found = self.interval(setting, name)
        return mean if found is None or found.corrected is None else found.corrected

    def interval_of_best(
        self, best: Setting, name: str, among: Iterable[Setting] | None = None, beside: Setting | None = None
    ) -> ConfidenceInterval | None:
        """Return the interval of the setting that `best` has chosen from ``among``; it allows for that choice.

        `among`: by default all private settings, because dropping those that are not `useful` is a choice by results
        too. `beside`: subtract this setting, which was not chosen.

        Let higher be better, and L_s and U_s be bounds of each setting s. The chosen one lies above L_s except with S
        times the probability for one (Bonferroni). It lies below the highest U_t as a single setting does: else the
        truly best one, m, would lie above U_m.
        """

        def interval(each: Setting, level: float = LEVEL) -> ConfidenceInterval | None:
            if beside is None:
                return self.evidence.interval(each, name, level=level)
            return self.evidence.difference(each, beside, name, level=level)

        known = self._known(name, self.private if among is None else among)
        plain, strict = interval(best), interval(best, 1.0 - (1.0 - LEVEL) / max(1, len(known)))
        spans = [found for each in known if (found := interval(each)) is not None]
        if plain is None or strict is None or len(spans) < 2:
            return plain
        if metric(name).better == "lower":
            return replace(plain, low=min(each.low for each in spans), high=strict.high)
        return replace(plain, low=strict.low, high=max(each.high for each in spans))

    def choice(self, name: str) -> int:
        """Return how many settings `interval_of_best` allows for; 0 where it has nothing to choose from."""
        known = [each for each in self._known(name, self.private) if self.interval(each, name) is not None]
        return len(known) if len(known) > 1 else 0

    @property
    def after_choice(self) -> str:
        """Return words on why the interval of the best setting reaches further on one side; "" without a choice."""
        among = self.choice(self.main.name)
        return f" after choosing among {among}" if among else ""

    def interval_of_chosen(
        self, chosen: Setting, name: str, among: Iterable[Setting] | None = None
    ) -> ConfidenceInterval | None:
        """Return the interval of a setting that was chosen from ``among``, by default all private ones, by any results.

        The intervals of all settings it was chosen from hold together (Bonferroni). The best one in this very metric
        has that of `interval_of_best`.
        """
        if among is None and chosen is self.best(name):
            return self.interval_of_best(chosen, name)
        count = len(self.private if among is None else tuple(among))
        return self.evidence.interval(chosen, name, level=1.0 - (1.0 - LEVEL) / max(1, count))

    def change_of_chosen(self, chosen: Setting, name: str) -> ConfidenceInterval | None:
        """Return `interval_of_chosen` of the metric minus that of the best baseline; None without a baseline."""
        if not self.baselines:
            return None
        if len(self.baselines) == 1 and chosen is self.best(name):
            return self.interval_of_best(chosen, name, beside=self.baselines[0])
        pairs = max(1, len(self.private) * len(self.baselines))
        return self.evidence.difference(chosen, self.baselines[0], name, comparisons=pairs)

    def _known(self, name: str, among: Iterable[Setting] | None) -> list[Setting]:
        """Return the settings of ``among``, by default `useful`, whose metric is known."""
        return [each for each in (self.useful if among is None else among) if not np.isnan(self.value(each, name))]

    def detectable(self, name: str) -> float | None:
        """Return the difference of two `methods` in a metric that these seeds and test examples find in four of five
        sweeps; of one method alone, that of its best value to another.

        By the median half width of the measured differences; None with one seed, one setting or without intervals.
        """
        pairs = list(itertools.combinations(self.methods, 2))
        if len(self.methods) == 1:
            pairs = [(self.methods[0], other) for other in self.rivals(self.methods[0])]
        found = [self.difference(*pair, name).interval for pair in pairs]
        halves = [(each.high - each.low) / 2.0 for each in found if each is not None and not each.is_of_one_seed]
        if not halves:
            return None
        reach = float(special.ndtri(1.0 - (1.0 - self.level) / 2.0 / self.comparisons))
        return float(np.median(halves)) * (1.0 + float(special.ndtri(POWER)) / reach)

    def undecided(self, best: Setting, name: str, among: Iterable[Setting]) -> tuple[Difference, ...]:
        """Return the differences of ``best`` to the other settings in ``among`` than which it is neither better nor
        worse: not distinguishable from them, or of unknown order.
        """
        found = (self.difference(best, other, name) for other in among if other is not best)
        return tuple(each for each in found if each.verdict not in ("better", "worse"))

    def alike(self, best: Setting, name: str) -> tuple[Difference, ...]:
        """Return the differences of ``best`` to those `rivals` that are not distinguishable from it, the nearest
        first.
        """
        found = [self.difference(best, each, name) for each in self.rivals(best)]
        known = [(abs(each.interval.value), each) for each in found if each.interval is not None]
        near = sorted(known, key=lambda pair: pair[0])
        return tuple(each for _, each in near if each.verdict == "not distinguishable")

    @cached_property
    def front(self) -> tuple[Setting, ...]:
        """Return the private settings that are on the Pareto front beyond noise.

        Each is better by intervals, in at least one metric of `headline`, than every other private setting that costs
        no more (epsilon to two digits, of the same adjacency). One that has learnt nothing is not among them.
        """
        known = [one for one in self.useful if self.interval(one, self.main.name)]
        return tuple(one for one in known if all(self._is_ahead(one, other) for other in self._rivals(one)))

    def _rivals(self, one: Setting) -> list[Setting]:
        alike = (other for other in self.private if other.neighbours == one.neighbours)
        return [other for other in alike if other is not one and other.level <= one.level]

    def _is_ahead(self, one: Setting, other: Setting) -> bool:
        return any(self.difference(one, other, name).verdict == "better" for name in self.headline)


def findings(data: PublishedSweep, evidence: Evidence) -> Findings:
    """Return the finished settings of a sweep, compared by the resampled outcomes of their trials.

    Where no baseline tells what privacy costs, trials have no change against one.
    """
    worst_group = WORST_GROUP_METRICS[data.worst_group]
    found = Findings(finished_settings(data.trials), evidence, worst_group, main_metric(data.task), data.looks)
    if not found.unknown_cost:
        return found
    return replace(found, settings=finished_settings(without_changes(data.trials)))


def as_dict(found: Findings) -> dict[str, Any]:
    """Return plain values for JSON: every setting with its intervals, every difference between methods, and the
    warnings.

    `of_trials` reads them.
    """
    return {
        "settings": [
            {
                "name": setting.name,
                "trials": [trial.key for trial in setting.trials],
                "intervals": {
                    name: asdict(interval)
                    for name in (each.name for each in METRICS if each.measure and setting.mean(each.value) is not None)
                    if (interval := found.interval(setting, name))
                },
                "groups": _of_groups(found, setting),
                "reasons": list(setting.reasons),
                "on_front_beyond_noise": setting in found.front,
                "useless": found.useless.get(setting.name, ""),
            }
            for setting in found.settings
        ],
        "differences": [each.as_dict() for each in found.differences],
        "comparisons": found.comparisons,
        "level": found.level,
        "worst_group": found.worst_group.name,
        "unknown_cost": found.unknown_cost,
        "warnings": warnings(found),
    }


def of_trials(stored: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Read the output of `as_dict`: by the key of each trial, its setting with the intervals of its means.

    In the result, ``runs`` is the number of averaged runs, and ``covers`` names the sources of variation that the
    intervals account for (`intervals.ConfidenceInterval`).
    """
    unknown = stored["unknown_cost"]
    return {key: _setting_entry(setting, unknown) for setting in stored["settings"] for key in setting["trials"]}


def _setting_entry(setting: Mapping[str, Any], unknown_cost: str) -> dict[str, Any]:
    def ends(intervals: Mapping[str, Any]) -> dict[str, Any]:
        return {name: {end: each[end] for end in ("value", "low", "high")} for name, each in intervals.items()}

    first: Mapping[str, Any] = next(iter(setting["intervals"].values()), {})
    return {
        "name": setting["name"],
        "runs": first.get("runs"),
        "covers": first.get("covers"),
        "on_front_beyond_noise": setting["on_front_beyond_noise"],
        "unknown_cost": unknown_cost,
        "intervals": ends(setting["intervals"]),
        "groups": {name: ends(each) for name, each in setting.get("groups", {}).items()},
    }


def _of_groups(found: Findings, setting: Setting) -> dict[str, dict[str, Any]]:
    """Return the intervals by group and metric, for every group that has any."""
    intervals = {
        name: {
            each.name: asdict(interval)
            for each in GROUP_METRICS
            if each.measure
            and not (found.unknown_cost and each.name.endswith("_change"))
            and (interval := found.evidence.interval(setting, each.name, name))
        }
        for name in group_names(setting)
    }
    return {name: known for name, known in intervals.items() if known}


def mean_of(setting: Setting, name: str) -> float:
    """Return the mean of a metric over the seeds of a setting; NaN if unknown."""
    found = setting.mean(metric(name).value)
    return math.nan if found is None else found


def _method(setting: Setting) -> tuple[object, ...]:
    return (*setting.method, *(setting.labels.get(name) for name in COMPARED))


def tuned_values(found: Findings) -> dict[str, int]:
    """Return the largest number of settings that a clipping method has at one schedule and privacy level, by clipping
    method. ``non-private`` is one of them.
    """
    counts: dict[str, list[int]] = {}
    for method in found.methods:
        alike = [each for each in found.private if _method(each) == _method(method)]
        counts.setdefault(method.method[0], []).append(len(alike))
    tried = {clipping: max(sizes) for clipping, sizes in counts.items()}
    baselines = Counter(_method(setting) for setting in found.settings if setting.is_baseline)
    return {**tried, **({NON_PRIVATE: max(baselines.values())} if baselines else {})}


def warnings(found: Findings) -> list[str]:
    """Return warnings to read before trusting a difference, one sentence or more each."""
    hidden = hidden_groups_note(found.trials)
    told = (_of_rows, _unlike, _diverged, _above_baseline, _useless, _constant, _unequally_tuned, _untuned)
    unknown = [found.unknown_cost] if found.unknown_cost else []
    return [*unknown, *(sentence for each in told for sentence in each(found)), *hidden]


def _of_rows(found: Findings) -> list[str]:
    """Return a sentence if epsilons are of single rows, and the data name users, who may own several."""
    if not any(map(found.is_of_rows, found.private)):
        return []
    return [
        "Warning: every ε is that of one row, and protects nobody who owns several as much: set privacy.unit: user, or "
        "list the most rows of a user in accounting.group_sizes."
    ]


def _unlike(found: Findings) -> list[str]:
    """Return a sentence on epsilons that must not be compared; none if all are of one adjacency."""
    kinds = sorted({kind for setting in found.private for kind in setting.neighbours})
    if len(kinds) < 2:
        return []
    of_each = [adjacency if unit == EXAMPLE.name else f"{adjacency} of a {unit}" for adjacency, unit in kinds]
    return [
        f"Warning: epsilons are of several adjacencies, {listed(of_each)}, and must not be compared: equal ones do not "
        "protect alike. No setting is called more private than one of another adjacency."
    ]


def _useless(found: Findings) -> list[str]:
    """Return a sentence on private settings that have learnt nothing, by the reason that they share."""
    by_reason: dict[str, list[str]] = {}
    for name, why in found.useless.items():
        by_reason.setdefault(why.partition(" (")[0], []).append(name)
    return [f"Not recommended: {first_few(names)} {why}." for why, names in by_reason.items()]


def _diverged(found: Findings) -> list[str]:
    if found.unknown_cost:
        return []
    lost = [setting for setting in found.settings if setting.is_baseline and is_lost(setting)]
    return [f"Warning: {lost_in_words(lost, found.main)}, and nothing is compared with it."] if lost else []


def _above_baseline(found: Findings) -> list[str]:
    if not found.baselines:
        return []
    best = found.baselines[0]
    above = []
    for setting in found.methods:
        gain = mean_of(setting, found.main.name) - mean_of(best, found.main.name)
        if gain > 0.0 and is_shown(gain, found.main.format):
            above.append((setting, gain, found.difference(setting, best, found.main.name).verdict))
    if not above:
        return []
    setting, gain, verdict = max(above, key=lambda each: each[1])
    hows = {"better": "beyond its interval", "not distinguishable": "within its interval"}
    how = hows.get(verdict, verdict)
    return [
        f"Warning: {setting.name} is {_amount(gain, found.main)} above the best non-private setting ({how}). Noise "
        "does not help a well-tuned model: tune the baseline before reading what privacy costs."
    ]


def _amount(gain: float, of: Metric) -> str:
    return amount(gain, of.format) + ("" if of.format.is_share else f" of {of.heading}")


def _constant(found: Findings) -> list[str]:
    flat = [setting for setting in found.settings if is_constant(setting) and setting.name not in found.useless]
    if not flat:
        return []
    rates = [rate for setting in flat if not np.isnan(rate := mean_of(setting, "majority_class_rate"))]
    named = first_few([setting.name for setting in flat])
    return [
        f"Warning: {named} predicted one class for everybody in each group. Gaps between groups say nothing then: a "
        f"constant prediction reaches {100 * max(rates):.1f}% here."
    ]


def _unequally_tuned(found: Findings) -> list[str]:
    counts = tuned_values(found)
    if len(found.private) < 2 or len(set(counts.values())) < 2:
        return []
    each = ", ".join(f"{method} with {count}" for method, count in counts.items())
    return [
        f"Warning: settings were not tuned alike. Tried were {each} choices of their other values (clipping bound, "
        "learning rate, ...), so a difference may be one of tuning, not of method."
    ]


def _untuned(found: Findings) -> list[str]:
    counts = {method: count for method, count in tuned_values(found).items() if method != NON_PRIVATE}
    if len(counts) < 2 or max(counts.values()) > 1 or any(map(_is_tuned, found.private)):
        return []
    return [
        f"Warning: no clipping method was tuned: {listed(list(counts))} were tried with one choice each of their other "
        "values (clipping bound, learning rate, ...), and others may turn a difference around. Lists of values, "
        "or the section tune, compare methods at their best."
    ]


def _is_tuned(setting: Setting) -> bool:
    """Return whether values of the setting were chosen among candidates, which a private selection does not show."""
    return any(trial.tuning or trial.is_selected for trial in setting.trials)
