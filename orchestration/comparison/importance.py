"""The varied parameters that the main score depends on, over trials of a sweep or candidates of its tuning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from dpsweep.orchestration.comparison.parameters import choices
from dpsweep.orchestration.comparison.values import main
from dpsweep.orchestration.records.published import Label, PublishedTrial
from dpsweep.orchestration.records.states import TrialState

_FEWEST: Final = 8
"""With fewer trials, the share of a parameter would be chance."""


def importance(trials: Iterable[PublishedTrial]) -> list[tuple[str, float]]:
    """Return the share of each varied parameter in the predictable variation of the main score, the largest first.

    A random forest predicts the score from the parameters; the importance of one is how much worse it predicts after
    its values are permuted (Breiman 2001). Finished private trials only, such as the candidates of a tuning. [] for
    fewer than `_FEWEST` of them, and where nothing varies. It describes these trials and says nothing of privacy.
    """
    known = [trial for trial in trials if trial.state is TrialState.FINISHED and not trial.is_baseline]
    scored = {trial.key: score for trial in known if (score := main(trial)) is not None}
    scores = list(scored.values())
    found = choices(trial for trial in known if trial.key in scored) if len(scored) >= _FEWEST else []
    names = list(dict.fromkeys(name for row in found for name in row))
    if not names or len(set(scores)) < 2:
        return []
    shares = _permuted(np.array([[row.get(name, -1.0) for name in names] for row in _places(found, names)]), scores)
    return sorted(zip(names, shares, strict=True), key=lambda pair: -pair[1])


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
    """[P]: the share of each column; zeros where no column helps."""
    from sklearn.ensemble import RandomForestRegressor  # late: it takes half a second to load
    from sklearn.inspection import permutation_importance

    forest = RandomForestRegressor(n_estimators=64, random_state=0).fit(values, scores)
    found = permutation_importance(forest, values, scores, n_repeats=8, random_state=0).importances_mean.clip(min=0.0)
    return [float(each) for each in found / found.sum()] if found.sum() > 0.0 else [0.0] * len(found)
