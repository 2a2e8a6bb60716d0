"""Chooses among the candidates of a tuning, and among the runs of a private selection, by the stored record.

Nothing is trained here. A candidate's score is one that its results publish.
"""

from __future__ import annotations

import math
import statistics
from typing import Final

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.mechanism.random_trials import ExponentialChoice
from dpsweep.orchestration.comparison.record import SweepRecord
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.sweeps.grid import GridPoint
from dpsweep.orchestration.sweeps.tune import Adapted, Tried, TuneSettings, Winner, has
from dpsweep.workers.evaluation.outcomes import read_wrong
from dpsweep.workers.evaluation.scores import Evaluation
from dpsweep.workers.tasks import TASKS

_WORST: Final = "worst_group_"
_TASK_SCORES: Final = {score.name: score for task in TASKS.values() for score in task.scores}
_OTHER_VALUES: Final = (
    "the errors are private, in the folder private/selection: offer other values, and choose another folder"
)


def best_candidates(record: SweepRecord) -> dict[str, Winner]:
    """Return the best candidate of each setting, by its mean score over the tuning seeds; the first one among equals.

    A candidate is skipped if one of its trials failed or its score is not finite. Raises: InvalidInput for a setting
    without any other candidate, and for a record that is not of a tuning.
    """
    tune, adapted = _of_tuning(record)
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
            score=_larger_is_better(tune, finite[best]),
            candidates=len(means),
            tried=tuple(
                Tried(
                    values={place: v for place, v in adapted.candidates[each].items() if has(specs[setting], place)},
                    score=_larger_is_better(tune, mean) if math.isfinite(mean) else None,
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


def selected_runs(record: SweepRecord, files: SweepFiles) -> dict[str, Winner]:
    """Return the selected run of each setting, which becomes its trial.

    It is the run with the best score, the first one among equals. The exponential mechanism draws it, once more at
    every call, by the number of wrong predictions on examples that no candidate was trained on.

    Guarantee: that of `ExponentialChoice`; else the score of a run depends only on its own model and on public data, as
    `dpsweep.accounting.accountants.selection` requires. Raises: InvalidInput for a setting without a run that can be
    selected, and for a record that is not of selections; DataCorruption for a damaged count of errors.
    """
    tune, adapted = _of_tuning(record)
    runs: dict[str, dict[int, GridPoint]] = {}
    for point in record.points:
        runs.setdefault(point.setting, {})[point.candidate or 0] = point
    winners = {}
    for setting, drawn in adapted.drawn.items():
        points = [runs[setting][place] for place in range(len(drawn))]
        choice = tune.selection
        score: float | None = None
        if isinstance(choice, ExponentialChoice):
            trained = [record.finished(point.key) is not None for point in points]
            if not any(trained):
                raise InvalidInput(f"every candidate of an exponential mechanism failed; {_OTHER_VALUES}")
            held_out = (files.trial(point.key).held_out for point in points)
            place = choice.draw([read_wrong(uri) if ran else None for uri, ran in zip(held_out, trained, strict=True)])
        else:
            scores = (_score(record, point) for point in points)
            known = [each if math.isfinite(each) else -math.inf for each in scores]
            place = known.index(max(known))
            if known[place] == -math.inf:
                raise InvalidInput(
                    f"no candidate of a private selection ended with a finite {tune.select_by}; {_OTHER_VALUES}"
                )
            score = _larger_is_better(tune, known[place])
        winners[setting] = Winner(
            values=adapted.candidates[drawn[place].candidate],
            score=score,
            candidates=len(adapted.candidates),
            candidate=place if isinstance(choice, ExponentialChoice) else None,
            seed=points[place].spec.seed,
        )
    return winners


def _of_tuning(record: SweepRecord) -> tuple[TuneSettings, Adapted]:
    """Return the section ``tune`` of a tuning sweep, and its candidates. Raises: InvalidInput for any other sweep."""
    sweep = record.sweep
    if sweep.tune is None or sweep.adapted is None or not sweep.adapted.candidates:
        raise InvalidInput(f"the sweep {sweep.name} is no tuning")
    return sweep.tune, sweep.adapted


def _score(record: SweepRecord, point: GridPoint) -> float:
    """Score of the final model: on the public part of the data or, with ``tune.data``, on the test part of that data.

    NaN if the trial did not finish.
    """
    tune, result = record.sweep.tune, record.finished(point.key)
    if tune is None or result is None:
        return math.nan
    evaluation = result.training.history[-1].public if tune.data is None else result.training.evaluation
    return math.nan if evaluation is None else _larger_is_better(tune, _published(tune.select_by, evaluation))


def _published(name: str, found: Evaluation) -> float:
    """Return a score of ``tune.select_by`` as it is published; NaN where it is not defined."""
    score = name.removeprefix(_WORST)
    if name != score and score in _TASK_SCORES:
        of_groups = (group.scores.get(score, math.nan) for group in found.groups)
        return (max if _is_lower_better(name) else min)(of_groups, default=math.nan)
    known = {"accuracy": found.accuracy, "loss": found.loss, **found.fairness, **found.scores}
    value = known.get(name)
    return math.nan if value is None else value


def _is_lower_better(name: str) -> bool:
    """Return whether a score of ``tune.select_by`` is better when it is smaller."""
    score = _TASK_SCORES.get(name.removeprefix(_WORST))
    return name == "loss" if score is None else score.better == "lower"


def _larger_is_better(tune: TuneSettings, score: float) -> float:
    """Return a published score as it is compared, or one that is compared as it is published."""
    return -score if _is_lower_better(tune.select_by) else score
