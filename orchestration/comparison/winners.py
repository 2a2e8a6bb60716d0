"""The best candidate of each setting, as a tuning found it. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from typing import Final

from accounting.errors import InvalidInput
from orchestration.comparison.record import SweepRecord
from orchestration.sweeps.grid import GridPoint
from orchestration.sweeps.tune import Winner
from workers.evaluation import Evaluation

_SCORES: Final[Mapping[str, Callable[[Evaluation], float]]] = {
    "accuracy": lambda found: found.accuracy,
    "worst_group_accuracy": lambda found: found.fairness.get("worst_group_accuracy", math.nan),
    "loss": lambda found: -found.loss,
}
"""By ``tune.select_by``: larger is better."""


def best_candidates(record: SweepRecord) -> dict[str, Winner]:
    """The best candidate of each setting, by its mean over the seeds of the tuning; the first of equal ones.

    A candidate of which a trial failed, or whose score is not finite, is none. Raises: InvalidInput for a setting
    without a candidate, and for a record that is not of a tuning.
    """
    sweep = record.sweep
    if sweep.tune is None or sweep.adapted is None or not sweep.adapted.candidates:
        raise InvalidInput(f"the sweep {sweep.name} is no tuning")
    scores: dict[str, dict[int, list[float]]] = {}
    for point in record.points:
        if point.is_asked:
            scores.setdefault(point.setting, {}).setdefault(point.candidate or 0, []).append(_score(record, point))
    winners = {}
    for setting, tried in scores.items():
        means = {candidate: statistics.fmean(found) for candidate, found in tried.items()}
        finite = {candidate: mean for candidate, mean in means.items() if math.isfinite(mean)}
        if not finite:
            names = [point.key for point in record.points if point.setting == setting]
            raise InvalidInput(
                f"no candidate of a setting ended with a finite {sweep.tune.select_by} (trials: {', '.join(names)}); "
                "see their errors, and offer it other values"
            )
        best = max(finite, key=finite.__getitem__)
        score = abs(finite[best]) if sweep.tune.select_by == "loss" else finite[best]
        winners[setting] = Winner(values=sweep.adapted.candidates[best], score=score, candidates=len(tried))
    return winners


def _score(record: SweepRecord, point: GridPoint) -> float:
    """Of the final model, on the public part of the data, or on the test data of a tuning on public data."""
    tune, result = record.sweep.tune, record.finished(point.key)
    if tune is None or result is None:
        return math.nan
    evaluation = result.training.history[-1].public if tune.data is None else result.training.evaluation
    return math.nan if evaluation is None else _SCORES[tune.select_by](evaluation)
