"""Describe how the values of a trial were tuned, in words and as data. Pure."""

from __future__ import annotations

from typing import Final

from dpsweep.accounting.mechanism.random_trials import ExponentialChoice, RandomTrials
from dpsweep.orchestration.store.published import PublishedTuning
from dpsweep.orchestration.sweeps.grid import GridPoint
from dpsweep.orchestration.sweeps.schema import SweepSpec
from dpsweep.orchestration.sweeps.tune import has


def tuning_note(sweep: SweepSpec, point: GridPoint) -> str | None:
    """Return a note that names the trial's tuned values, how they were chosen, and whether its epsilon covers the
    choice.

    None without tuning.
    """
    if sweep.tune is None or sweep.adapted is None:
        return None
    if point.candidate is not None:
        if sweep.tune.is_selection:
            return "private: a candidate of a private selection, whose ε is that after the selection"
        return _UNACCOUNTED if sweep.tune.privacy == "unaccounted" else None
    winner = sweep.adapted.winners.get(point.setting) if point.is_asked else None
    if winner is None:
        return f"tuned for an earlier version of the sweep{f'; {_UNACCOUNTED}' if sweep.tune.data is None else ''}"
    chosen = ", ".join(f"{place} {value}" for place, value in winner.values.items() if has(point.spec, place))
    epsilon = "ε is that after the selection" if point.is_private else "it is not private"
    match sweep.tune.selection:
        case RandomTrials() as law:
            return (
                f"private selection: {chosen}, the best of a random number of candidates ({law.mean:g} expected, drawn "
                f"from {winner.candidates}) by {sweep.tune.select_by.replace('_', ' ')} on the public part of the "
                f"data; {epsilon}; neither their number nor the others are released"
            )
        case ExponentialChoice() as choice:
            return (
                f"private selection: {chosen}, one of {choice.candidates} candidates, each trained on 1/{choice.parts} "
                "of the training examples, chosen by the exponential mechanism from their errors on a further part "
                f"(ε {choice.epsilon:g}); {epsilon}; the other candidates are not released"
            )
    if not chosen:
        return None  # a baseline has no clipping bound to tune
    by = f"tuned: {chosen}, the best of {winner.candidates} by {sweep.tune.select_by.replace('_', ' ')}"
    if sweep.tune.data is not None:
        return f"{by} on {sweep.tune.data.name}, declared public, without reading these data"
    return f"{by} on the public part of the data; {_UNACCOUNTED}"


def published_tuning(sweep: SweepSpec, point: GridPoint) -> PublishedTuning | None:
    """Return the tuning of a trial's setting; None if nothing was tuned, or if the candidates are private."""
    winner = sweep.adapted.winners.get(point.setting) if sweep.adapted and point.is_asked else None
    if sweep.tune is None or winner is None or not winner.tried:
        return None
    chosen = {place: value for place, value in winner.values.items() if has(point.spec, place)}
    tried = tuple((dict(each.values), each.score) for each in winner.tried)
    return PublishedTuning(sweep.tune.select_by, chosen, tried)


_UNACCOUNTED: Final = "research mode: candidates were trained on the private data, and no ε counts that one was chosen"
