"""Selects the best candidate of each setting from the results of a tuning. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from typing import Final

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.mechanism.exponential_choice import ExponentialChoice
from dpsweep.orchestration.comparison.record import SweepRecord
from dpsweep.orchestration.records.layout import SweepFiles
from dpsweep.orchestration.sweeps.grid import GridPoint
from dpsweep.orchestration.sweeps.tune import Adapted, Tried, TuneSettings, Winner, has
from dpsweep.workers.evaluation.held_out import read_wrong
from dpsweep.workers.evaluation.scores import Evaluation
from dpsweep.workers.tasks import TASKS, Score


def _of_fairness(name: str) -> Callable[[Evaluation], float]:
    return lambda found: found.fairness.get(name, math.nan)


def _of_task(score: Score) -> Callable[[Evaluation], float]:
    return lambda found: _sign(score) * found.scores.get(score.name, math.nan)


def _of_worst_group(score: Score) -> Callable[[Evaluation], float]:
    return lambda found: min(
        (_sign(score) * group.scores.get(score.name, math.nan) for group in found.groups), default=math.nan
    )


def _sign(score: Score) -> float:
    return 1.0 if score.better == "higher" else -1.0


_TASK_SCORES: Final = tuple(score for task in TASKS.values() for score in task.scores)
_SCORES: Final[Mapping[str, Callable[[Evaluation], float]]] = {
    "accuracy": lambda found: math.nan if found.accuracy is None else found.accuracy,
    "worst_group_accuracy": _of_fairness("worst_group_accuracy"),
    "worst_group_balanced_accuracy": _of_fairness("worst_group_balanced_accuracy"),
    "worst_group_true_positive_rate": _of_fairness("worst_group_true_positive_rate"),
    "loss": lambda found: -found.loss,
    **{score.name: _of_task(score) for score in _TASK_SCORES},
    **{f"worst_group_{score.name}": _of_worst_group(score) for score in _TASK_SCORES},
}
"""Functions that compute the score, by ``tune.select_by``; larger is better."""


_LOWER: Final = frozenset(
    (
        "loss",
        *(f"{prefix}{each.name}" for each in _TASK_SCORES if each.better == "lower" for prefix in ("", "worst_group_")),
    )
)
"""Names of scores whose published value is better when smaller."""


def best_candidates(record: SweepRecord) -> dict[str, Winner]:
    """Return the best candidate of each setting, by its mean score over the tuning seeds; the first one among equals.

    A candidate is skipped if one of its trials failed or its score is not finite. Raises: InvalidInput for a setting
    without any other candidate, and for a record that is not of a tuning.
    """
    tune, adapted = of_tuning(record)
    specs = {point.setting: point.spec for point in record.points if point.is_asked}
    winners = {}
    for setting, means in scores_of(record).items():
        finite = {candidate: mean for candidate, mean in means.items() if math.isfinite(mean)}
        if not finite:
            names = [point.key for point in record.points if point.setting == setting]
            raise InvalidInput(
                f"no candidate of a setting ended with a finite {tune.select_by} (trials: {', '.join(names)}); "
                "see their errors, and offer it other values"
            )
        best = max(finite, key=finite.__getitem__)
        winners[setting] = Winner(
            values=adapted.candidates[best],
            score=_shown_score(tune, finite[best]),
            candidates=len(means),
            tried=tuple(
                Tried(
                    values={place: v for place, v in adapted.candidates[each].items() if has(specs[setting], place)},
                    score=_shown_score(tune, mean) if math.isfinite(mean) else None,
                )
                for each, mean in means.items()
            ),
        )
    return winners


def scores_of(record: SweepRecord) -> dict[str, dict[int, float]]:
    """Return the mean score over the tuning seeds by setting and index of the candidate; larger is better, NaN if a
    trial failed."""
    scores: dict[str, dict[int, list[float]]] = {}
    for point in record.points:
        if point.is_asked:
            scores.setdefault(point.setting, {}).setdefault(point.candidate or 0, []).append(_score(record, point))
    return {
        setting: {candidate: statistics.fmean(found) for candidate, found in tried.items()}
        for setting, tried in scores.items()
    }


def best_runs(record: SweepRecord) -> dict[str, Winner]:
    """Return the best run of each private selection; the first one among equals. A run without a finite score is the
    worst.

    Guarantee: the score of a run depends only on its own model and on public data, as
    `dpsweep.accounting.accountants.selection` requires. Raises: InvalidInput for a selection without a run with a
    finite score, and for a record that is not of selections.
    """
    tune, adapted = of_tuning(record)
    runs: dict[str, list[tuple[float, GridPoint]]] = {}
    for point in record.points:
        runs.setdefault(point.setting, []).append((_score(record, point), point))
    winners = {}
    for setting, drawn in adapted.drawn.items():
        score, best = max(runs[setting], key=lambda run: run[0] if math.isfinite(run[0]) else -math.inf)
        if not math.isfinite(score):
            raise InvalidInput(
                f"no candidate of a private selection ended with a finite {tune.select_by}; the errors are private, in "
                f"the folder private/selection: offer other values, and choose another folder"
            )
        winners[setting] = Winner(
            values=adapted.candidates[drawn[best.candidate or 0].candidate],
            score=_shown_score(tune, score),
            candidates=len(adapted.candidates),
            seed=best.spec.seed,
        )
    return winners


def of_tuning(record: SweepRecord) -> tuple[TuneSettings, Adapted]:
    """Return the section ``tune`` of a tuning sweep, and its candidates. Raises: InvalidInput for any other sweep."""
    sweep = record.sweep
    if sweep.tune is None or sweep.adapted is None or not sweep.adapted.candidates:
        raise InvalidInput(f"the sweep {sweep.name} is no tuning")
    return sweep.tune, sweep.adapted


def _shown_score(tune: TuneSettings, score: float) -> float:
    return -score if tune.select_by in _LOWER else score


def _score(record: SweepRecord, point: GridPoint) -> float:
    """Score of the final model: on the public part of the data or, with ``tune.data``, on the test part of that data.

    NaN if the trial did not finish.
    """
    tune, result = record.sweep.tune, record.finished(point.key)
    if tune is None or result is None:
        return math.nan
    evaluation = result.training.history[-1].public if tune.data is None else result.training.evaluation
    return math.nan if evaluation is None else _SCORES[tune.select_by](evaluation)


def selected_runs(record: SweepRecord, files: SweepFiles) -> dict[str, Winner]:
    """Return the selected run of each setting, which becomes its trial.

    Guarantee: that of `best_runs` or, with the exponential mechanism, of `ExponentialChoice`; this one draws a new
    choice at every call. Raises: as `best_runs`; DataCorruption for a damaged count of errors.
    """
    choice = record.sweep.tune.selection if record.sweep.tune else None
    if not isinstance(choice, ExponentialChoice):
        return best_runs(record)
    trained = [point.key for point in record.points if record.finished(point.key) is not None]
    return _chosen_runs(record, choice, {key: read_wrong(files.trial(key).held_out) for key in trained})


def _chosen_runs(record: SweepRecord, choice: ExponentialChoice, wrong: Mapping[str, int]) -> dict[str, Winner]:
    """Choose a run of each setting by the exponential mechanism.

    `wrong`: number of wrong predictions on the part of the data that no candidate was trained on, by key of the run;
    failed runs are missing. Guarantee: that of `ExponentialChoice`. Raises: InvalidInput for a setting whose runs all
    failed, and for a record that is not of selections.
    """
    _, adapted = of_tuning(record)
    runs: dict[str, dict[int, GridPoint]] = {}
    for point in record.points:
        runs.setdefault(point.setting, {})[point.candidate or 0] = point
    winners = {}
    for setting, drawn in adapted.drawn.items():
        if not any(point.key in wrong for point in runs[setting].values()):
            raise InvalidInput(
                "every candidate of an exponential mechanism failed; the errors are private, in the folder "
                "private/selection: offer other values, and choose another folder"
            )
        place = choice.draw([wrong.get(runs[setting][each].key) for each in range(len(drawn))])
        winners[setting] = Winner(
            values=adapted.candidates[place],
            score=None,
            candidates=len(adapted.candidates),
            candidate=place,
            seed=runs[setting][place].spec.seed,
        )
    return winners
