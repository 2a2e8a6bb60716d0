"""Makes a private selection among the trained candidates in a folder."""

from __future__ import annotations

from collections.abc import Mapping

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.mechanism.exponential_choice import ExponentialChoice
from dpsweep.orchestration.comparison.record import SweepRecord
from dpsweep.orchestration.comparison.winners import best_runs, of_tuning
from dpsweep.orchestration.records.layout import SweepFiles
from dpsweep.orchestration.sweeps.grid import GridPoint
from dpsweep.orchestration.sweeps.tune import Winner
from dpsweep.workers.evaluation.held_out import read_wrong


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
