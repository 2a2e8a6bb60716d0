"""Judges whether settings have learnt anything, before any comparison of them. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from scipy import special

from dpsweep.orchestration.comparison.evidence import Evidence
from dpsweep.orchestration.comparison.formats import first_few
from dpsweep.orchestration.comparison.intervals import LEVEL
from dpsweep.orchestration.comparison.metric_types import Metric
from dpsweep.orchestration.comparison.settings import Setting
from dpsweep.orchestration.comparison.values import MAJORITY, score_of_counts
from dpsweep.orchestration.comparison.wording import ends
from dpsweep.orchestration.store.published import PublishedQuality, PublishedSweep, PublishedTrial
from dpsweep.workers.evaluation.scores import Evaluation

_HARDLY: Final = {"classification": 0.2, "regression": 0.05}
"""By task: a baseline that gains at most this share of what a perfect model gains over a constant prediction has learnt
almost nothing. R² is this share by its definition."""

_CONSTANT: Final = {
    "language_modelling": "the most frequent token",
    "multi_label": "the same labels",
    "regression": "the mean",
    "segmentation": "the most frequent class for every pixel",
}
"""By task: the best constant prediction, where it is not the most frequent class."""
_ENOUGH_SEEDS: Final = 3
"""With fewer seeds (splits, if there are several), Student's t makes the interval so wide that no setting would be told
from constant."""
_FREQUENT: Final = 0.9
"""Share of a class from which on a model that predicts nothing else is seldom beaten by its accuracy."""


def constant_score(found: Evaluation | PublishedQuality) -> float | None:
    """Return the main score of the best constant prediction on the same examples; None if it is not known."""
    majority = score_of_counts(found.counts, MAJORITY)
    return found.constant if majority is None else majority


def has_diverged(setting: Setting) -> bool:
    """Return whether no trial of the setting has both a finite loss and a better score than a constant prediction."""
    return not any(trial.quality and _has_learnt(trial.quality) for trial in setting.trials)


def _has_learnt(found: PublishedQuality) -> bool:
    constant = constant_score(found)
    return math.isfinite(found.loss) and (constant is None or (found.main or 0.0) > constant + 1e-9)


def is_reference(runs: Sequence[Evaluation | PublishedQuality]) -> bool:
    """Return whether the runs of a non-private setting tell what privacy costs: each has a finite loss and score, and
    their mean is better than a constant prediction.

    The mean of those that did not diverge would be that of the lucky ones.
    """
    scores = [math.nan if each.main is None or not math.isfinite(each.loss) else each.main for each in runs]
    constants = [known for each in runs if (known := constant_score(each)) is not None]
    if not scores or not all(map(math.isfinite, scores)):
        return False
    return not constants or statistics.fmean(scores) > statistics.fmean(constants) + 1e-9


def is_lost(setting: Setting) -> bool:
    """Return whether a non-private setting is no reference for the cost of privacy (`is_reference`)."""
    return not is_reference([trial.quality for trial in setting.trials if trial.quality])


def is_constant(setting: Setting) -> bool:
    """Return whether every trial predicts a single class within each group, so that gaps between groups say nothing."""
    return all(_is_constant(trial) for trial in setting.trials)


def _is_constant(trial: PublishedTrial) -> bool:
    quality = trial.quality
    counts = [group.counts for group in quality.groups if group.counts] if quality else []
    if quality is None or quality.counts is None:
        return False
    predicted = [np.count_nonzero(each.matrix.sum(0)) for each in (counts or [quality.counts])]
    groups_are_classes = all(np.count_nonzero(each.matrix.sum(1)) == 1 for each in counts)
    everyone = np.count_nonzero(quality.counts.matrix.sum(0))
    return everyone == 1 if groups_are_classes else all(classes == 1 for classes in predicted)


def constant_of(setting: Setting) -> float | None:
    """Return the mean over seeds of `constant_score` on the setting's test data; None if it is not known."""
    return setting.mean(lambda trial: constant_score(trial.quality) if trial.quality else None)


def lost_runs(setting: Setting, main: Metric) -> str:
    """Return, as a clause, in how many runs a setting diverged while others have a score; "" if in none or all.

    The mean of the others would be that of the lucky ones.
    """
    found, runs = setting.over_seeds(main.value), len(setting.trials)
    return f"diverged in {runs - found.count} of {runs} runs" if found is not None and found.count < runs else ""


def too_few_to_test(setting: Setting, evidence: Evidence, main: Metric) -> str:
    """Return why a setting cannot be judged, as a clause that names the test users or examples; "" if it can.

    With too few, even the interval of a model without a mistake reaches down to a constant prediction. For n right
    answers out of n, Clopper and Pearson's lower end is the n-th root of 0.025. Where a constant prediction is right
    for all of them, more of the same kind would not help.
    """
    constant, (units, unit) = constant_of(setting), evidence.units(setting, main.name)
    if constant is None or units <= 0.0 or ((1.0 - LEVEL) / 2.0) ** (1.0 / units) > constant:
        return ""
    if constant >= 1.0:
        every = f"the only {unit}" if units == 1.0 else f"all {units:.0f} {unit}s"
        return f"always predicting {best_constant(main)} is right for {every}: hold out some with other labels"
    those = f"one {unit}" if units == 1.0 else f"{units:.0f} {unit}s"
    return f"{those} cannot tell even a perfect model from always predicting {best_constant(main)}: hold out more"


def why_useless(setting: Setting, evidence: Evidence, main: Metric) -> str:
    """Return why a setting is never recommended, as a clause after its name; "" if it has learnt something.

    Accuracy hides whether rare classes are found: one that finds them has learnt something (`finds_rare_classes`).
    """
    if not is_constant(setting) and finds_rare_classes(setting, evidence, main):
        return ""
    return _why_not_above_constant(setting, evidence, main)


def _why_not_above_constant(setting: Setting, evidence: Evidence, main: Metric) -> str:
    """Return why the main score of a setting is not above that of a constant prediction, as a clause; "" if it is.

    It predicts one class, has diverged, or the 95% interval of its main score reaches down to a constant prediction,
    which it always does if too few were held out to test.
    With one or two seeds, or two splits, that is the interval over test examples alone. Without an interval the mean
    counts.
    """
    constant, found = constant_of(setting), setting.over_seeds(main.value)
    shown = main.format.one
    always = f"always predicting {best_constant(main)}, which reaches {shown(constant)}" if constant is not None else ""
    if is_constant(setting):
        return (
            f"predicted one class for everybody in each group{f', and did no better than {always}' if always else ''}"
        )
    if has_diverged(setting):
        return f"did no better than {always}" if always else "diverged"
    if constant is None or found is None:
        return ""
    if few := too_few_to_test(setting, evidence, main):
        return f"cannot be judged, as {few}"
    reached = _ends(setting, evidence, main)
    if reached is not None and reached[0] <= constant:
        between = ends(*reached, main.format)
        return f"cannot be told from {always} (it reaches {shown(found.mean)}, 95% interval {between})"
    return "" if found.mean > constant + 1e-9 else f"did no better than {always}"


def finds_rare_classes(setting: Setting, evidence: Evidence, main: Metric, among: int = 1) -> bool:
    """Return whether the 95% interval of balanced accuracy is above 1 / K, the value of a constant prediction.

    K: number of classes of test examples. among: number of settings that it was chosen from.
    """
    level = 1.0 - (1.0 - LEVEL) / max(1, among)
    interval = evidence.interval(setting, "balanced_accuracy", level=level) if main.name == "accuracy" else None
    chance = setting.mean(_chance)
    return interval is not None and chance is not None and interval.low > chance


def _chance(trial: PublishedTrial) -> float | None:
    quality = trial.quality
    if quality is None or quality.counts is None or not math.isfinite(quality.loss):
        return None
    return 1.0 / np.count_nonzero(quality.counts.matrix.sum(1))


def _ends(setting: Setting, evidence: Evidence, main: Metric) -> tuple[float, float] | None:
    repeats = setting.splits if setting.is_of_splits else setting.runs
    if repeats < _ENOUGH_SEEDS:
        return evidence.over_examples(setting, main.name)
    interval = evidence.interval(setting, main.name)
    return None if interval is None else (interval.low, interval.high)


def best_constant(main: Metric) -> str:
    """Return the best constant prediction in words, for use after "always predicting"."""
    return _CONSTANT.get(str(main.task), "the most frequent class")


@dataclass(frozen=True)
class UnknownCost:
    """Why no non-private setting tells what privacy costs. because: a clause. sentences: that clause with numbers."""

    because: str = ""
    sentences: str = ""

    @classmethod
    def of_baseline(cls, because: str, rest: str) -> UnknownCost:
        """Return that a baseline is no reference. rest: a sentence with its numbers, and what to do."""
        return cls(because, f"No use as a reference: {because}; the cost of privacy is unknown. {rest}")


def why_cost_is_unknown(baselines: Sequence[Setting], evidence: Evidence, main: Metric) -> UnknownCost:
    """Return why no non-private setting has learnt enough to tell what privacy costs; empty if one has, or without any.

    baselines: all non-private settings that have finished. The best of them is compared with a constant prediction, and
    with the references that were trained beside it (``reference: true``).
    """
    if not baselines:
        return UnknownCost()
    known = [setting for setting in baselines if not is_lost(setting)]
    best = max(known or baselines, key=lambda setting: setting.rank(main.value))
    reached, constant, shown = best.rank(main.value), constant_of(best), main.format.one
    if few := too_few_to_test(best, evidence, main):
        return UnknownCost(few, f"The cost of privacy is unknown: {few}.")
    hardly = "the baseline hardly beats a constant prediction"
    others = cure_of_rare_classes(constant, main) or "other inputs, such as narrower ranges"
    step = f"train it longer, with another rate, or {others}"
    if not known:
        return UnknownCost.of_baseline(hardly, f"{lost_in_words(baselines, main)}: {step}.")
    if best_reference := _reference(best):
        name, score = best_reference
        if _is_below(reached, score, _ends(best, evidence, main), evidence.units(best, main.name)[0]):
            return UnknownCost.of_baseline(
                f"the baseline is worse than {name}",
                f"{best.name} reaches {shown(reached)}, but {name}, which costs nothing, {shown(score)}: train it "
                "longer, with another rate, or other inputs.",
            )
    if constant is None or not 0.0 <= constant < 1.0:
        return UnknownCost()
    why = _why_not_above_constant(best, evidence, main)
    if reached - constant > _HARDLY.get(str(main.task), 0.0) * (1.0 - constant):
        if not why:
            return UnknownCost()
        hardly, step = "nothing shows that the baseline beats a constant prediction", f"hold out more, or {step}"
    return UnknownCost.of_baseline(
        hardly,
        f"{best.name} reaches {shown(reached)}, and always predicting {best_constant(main)} {shown(constant)}: {step}.",
    )


def _is_below(reached: float, score: float, ends: tuple[float, float] | None, units: float) -> bool:
    """Return whether a baseline is worse than a reference beyond the interval of their difference.

    `ends`: of the interval of the baseline's score ``reached``; None if unknown. The reference's ``score``, a share of
    ``units`` test examples, has the interval of Clopper and Pearson. Both are joined like intervals of independent
    numbers (Zou and Donner 2008).
    """
    right = score * units
    low = float(special.betaincinv(right, units - right + 1.0, (1.0 - LEVEL) / 2.0)) if right > 0.0 else score
    return score - reached > math.hypot(0.0 if ends is None else ends[1] - reached, score - low)


def lost_in_words(baselines: Sequence[Setting], main: Metric) -> str:
    """Return what went wrong with lost baselines (`is_lost`), as a clause."""
    names = first_few([each.name for each in baselines])
    return f"{names} diverged, or did no better than always predicting {best_constant(main)}"


def cure_of_rare_classes(constant: float | None, main: Metric) -> str:
    """Return what to do where one class is so frequent that accuracy hides whether others are found; "" elsewhere."""
    is_rare = main.name == "accuracy" and constant is not None and constant >= _FREQUENT
    return "leave out rows of the most frequent class at random" if is_rare else ""


def without_changes(trials: Iterable[PublishedTrial]) -> tuple[PublishedTrial, ...]:
    """Return the trials without their changes against a baseline, for where the cost of privacy is unknown."""
    return tuple(
        trial if trial.quality is None else replace(trial, quality=_unchanged(trial.quality)) for trial in trials
    )


def with_known_changes(data: PublishedSweep, unknown_cost: str) -> PublishedSweep:
    """Return the sweep, without changes of its trials if there is a reason why the cost of privacy is unknown."""
    return replace(data, trials=without_changes(data.trials)) if unknown_cost else data


def _unchanged(quality: PublishedQuality) -> PublishedQuality:
    groups = tuple(
        replace(group, accuracy_change=None, scores=_without_change(group.scores)) for group in quality.groups
    )
    return replace(quality, accuracy_change=None, scores=_without_change(quality.scores), groups=groups)


def _without_change(scores: Mapping[str, float]) -> dict[str, float]:
    return {name: score for name, score in scores.items() if not name.endswith("_change")}


def _reference(setting: Setting) -> tuple[str, float] | None:
    """Return the best reference of the setting's trials, with its mean score; None if none was trained."""
    scores: dict[str, list[float]] = {}
    for trial in setting.trials:
        for name, score in trial.references.items():
            scores.setdefault(name, []).append(score)
    means = {name: statistics.fmean(found) for name, found in scores.items()}
    return max(means.items(), key=lambda pair: pair[1], default=None)
