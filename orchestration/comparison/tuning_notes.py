"""Notes about a tuning, and the parameters on which the main score depends. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from dpsweep.accounting.mechanism.random_trials import ExponentialChoice, RandomTrials
from dpsweep.orchestration.comparison.parameters import choices
from dpsweep.orchestration.comparison.values import main
from dpsweep.orchestration.store.published import Label, PublishedTrial, PublishedTuning, TrialState
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

_FEWEST: Final = 8
"""With fewer trials, the share of a parameter would be chance."""


def importance(trials: Iterable[PublishedTrial]) -> list[tuple[str, float]]:
    """Return the share of each varied parameter in the predictable variation of the main score, the largest first.

    A random forest predicts the score from the parameters; the importance of one is how much worse it predicts after
    its values are permuted (Breiman 2001). Only finished private trials count. The list is empty for fewer than
    `_FEWEST` of them, and where nothing varies. So it is where the forest predicts further trials no better than their
    mean: scores then vary by chance. Parameters that only vary together count as one, and what a component alone has,
    such as the decay of one schedule, counts as the choice of it. So does what a tuning chose for each setting, as its
    best clipping bound. Importance says nothing of privacy.
    """
    known = [trial for trial in trials if trial.state is TrialState.FINISHED and not trial.is_baseline]
    scored = {trial.key: score for trial in known if (score := main(trial)) is not None}
    scores = list(scored.values())
    found = choices(trial for trial in known if trial.key in scored) if len(scored) >= _FEWEST else []
    tuned = {name.replace("_", " ") for trial in known if trial.tuning for name in trial.tuning.chosen}
    together = _told_apart([{name: value for name, value in row.items() if name not in tuned} for row in found])
    if not together or len(set(scores)) < 2:
        return []
    names = [first for first, *_ in together]
    shares = _permuted(np.array([[row.get(name, -1.0) for name in names] for row in _places(found, names)]), scores)
    named = zip(map(", ".join, together), shares, strict=True)
    return sorted(named, key=lambda pair: -pair[1]) if shares else []


def _told_apart(rows: Sequence[Mapping[str, Label]]) -> list[list[str]]:
    """Return the parameters whose shares can be told apart, in lists of those that only vary together.

    One that has a value for each value of a text, such as the parameter of a component, is left out. Parameters with
    another value in each row, such as random candidates, only seem to vary together.
    """
    parts: dict[str, tuple[int, ...]] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        places = {value: place for place, value in enumerate(dict.fromkeys(values))}
        parts[name] = tuple(places[value] for value in values)
    texts = {name for name in parts if any(isinstance(row.get(name), str) for row in rows)}
    found: dict[tuple[int, ...], list[str]] = {}
    for name, part in parts.items():
        finer = (each for other, each in parts.items() if other in texts and max(each) + 1 < len(rows))
        if any(each != part and len({*zip(each, part, strict=True)}) == len({*each}) for each in finer):
            continue
        is_each_row = len({*part}) == len(rows)
        found.setdefault((*part, len(found)) if is_each_row else part, []).append(name)
    return [*found.values()]


def _places(rows: Sequence[Mapping[str, Label]], names: Sequence[str]) -> list[dict[str, float]]:
    """Return the rows with texts as their places among all texts of the parameter."""
    texts = {name: sorted({str(row[name]) for row in rows if isinstance(row.get(name), str)}) for name in names}
    return [
        {
            name: float(texts[name].index(value) if isinstance(value, str) else value)
            for name, value in row.items()
            if name in texts
        }
        for row in rows
    ]


def _permuted(values: np.ndarray[tuple[int, int], np.dtype[np.float64]], scores: Sequence[float]) -> list[float]:
    """[P]: the share of each column; [] where no column helps."""
    from sklearn.ensemble import RandomForestRegressor  # late: it takes half a second to load
    from sklearn.inspection import permutation_importance

    forest = RandomForestRegressor(n_estimators=64, oob_score=True, random_state=0).fit(values, scores)
    if not forest.oob_score_ > 0.0:
        return []
    found = permutation_importance(forest, values, scores, n_repeats=8, random_state=0).importances_mean.clip(min=0.0)
    return [float(each) for each in found / found.sum()] if found.sum() > 0.0 else []
