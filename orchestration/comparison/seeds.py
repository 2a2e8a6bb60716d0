"""Variance between seeds, pooled over the private settings of a sweep. Pure numpy.

Two or three seeds say little about their own spread; the seeds of all private settings together say more. A setting
whose runs spread more than the others, by an F test, is left out of the pool and keeps its own spread. No setting or
difference ever gets less than its own, and differences are widened for a setting whose spread is not noticed
(`intervals.unnoticed`). The baseline is not pooled, as training without noise spreads less. A difference from it is
pooled over the private settings, each beside it, so that what the baseline adds has its own few degrees of freedom.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from scipy import special

from dpsweep.orchestration.comparison.intervals import OTHER_SPREAD, Array, RunValues, SpreadOfSeeds

_HIDDEN_SPREAD: Final = 1e-3
"""Level of `_spreads_more` for settings that others may have hidden."""


def pooled(settings: Sequence[RunValues]) -> SpreadOfSeeds | None:
    """Return the spread between the runs of several settings with the same seeds and splits; None if nothing can be
    pooled.

    Its degrees of freedom follow a two-way layout. The mean of one of S settings of R seeds has S (R - 1) if runs are
    unrelated, down to R - 1 where all settings of a seed move together. A difference has (S - 1)(R - 1).
    """
    if len(settings) < 2:
        return None
    splits = settings[0].splits
    freedom = len(splits) - len(np.unique(splits))
    if freedom < 1:
        return None
    apart = np.stack([_apart(each.values, each) for each in settings])
    usual = _usual(apart, freedom)
    kept = [each for each, is_usual in zip(settings, usual, strict=True) if is_usual]
    if len(kept) < 2:
        return None
    own, shared = _covariances(list(apart[usual]), freedom)
    chances = [_of_chance(each) for each in kept]
    own_chance, shared_chance = _covariances(chances, freedom * kept[0].resampled.shape[1])
    return SpreadOfSeeds(own, shared, own_chance, shared_chance, freedom, len(kept))


def _apart(values: Array, runs: RunValues) -> Array:
    found = np.empty_like(values)
    for split in np.unique(runs.splits):
        own = runs.splits == split
        found[own] = values[own] - values[own].mean(0)
    return found


def _of_chance(runs: RunValues) -> Array:
    """[R B, K]: how far runs of one split move apart when test examples are resampled."""
    moved = np.where(np.isfinite(runs.resampled), runs.resampled - runs.values[:, None], 0.0)
    return _apart(moved, runs).reshape(-1, runs.values.shape[1])


def _covariances(apart: Sequence[Array], degrees: int) -> tuple[Array, Array]:
    """Return the mean covariance of the numbers of one setting, and of two settings. apart: [rows, K] by setting."""
    count = len(apart)
    of_each = sum(each.T @ each for each in apart)
    total = np.sum(apart, axis=0)
    across = (total.T @ total - of_each) / (count * (count - 1))
    return np.asarray(of_each / count / degrees), np.asarray(across / degrees)


def _usual(apart: Array, freedom: int) -> Array:
    """[S]: whether the runs of a setting spread like the other settings' runs.

    A setting that spreads a hundred times more hides one that spreads ten times more. The test is therefore repeated
    without the settings that were found, at a level that hardly ever takes another setting away by chance.
    """
    usual = np.logical_not(_spreads_more(apart, freedom, OTHER_SPREAD))
    while (more := _spreads_more(apart[usual], freedom, _HIDDEN_SPREAD)).any():
        usual[np.flatnonzero(usual)[more]] = False
    return usual


def _spreads_more(apart: Array, freedom: int, level: float) -> Array:
    """[S]: whether the runs of a setting, less what all settings of a seed share, spread more than the others'.

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
