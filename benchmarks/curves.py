"""Numbers of a trial after each epoch, which the papers plot; stored beside the final numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np

import dpsweep
from dpsweep.accounting.accountants.methods import total_rho
from dpsweep.accounting.records.shards import NormShards
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.orchestration.store.results import TrialResult
from dpsweep.workers.training.history import EpochRecord

Curve = Callable[[dpsweep.Trial, EpochRecord], float | None]


def _accuracy(trial: dpsweep.Trial, record: EpochRecord) -> float | None:
    return record.test.accuracy


def _accuracy_of(group: str) -> Curve:
    def accuracy(trial: dpsweep.Trial, record: EpochRecord) -> float | None:
        return next(each.accuracy for each in record.test.groups if each.name == group)

    return accuracy


def _noise(trial: dpsweep.Trial, record: EpochRecord) -> float | None:
    return record.noise_multiplier if trial.spec.is_private else None


def _rho(trial: dpsweep.Trial, record: EpochRecord) -> float | None:
    """rho of everything released up to the end of the epoch."""
    return total_rho(trial.trace.until(record.step)) if trial.spec.is_private else None


def _bound_of(group: str) -> Curve:
    def bound(trial: dpsweep.Trial, record: EpochRecord) -> float | None:
        return record.bounds.get(group)

    return bound


_SCHEDULES: Final = {"accuracy": _accuracy, "noise_multiplier": _noise, "rho": _rho}
_DIGITS: Final = {
    "accuracy": _accuracy,
    **{f"accuracy of {digit}": _accuracy_of(str(digit)) for digit in (2, 8)},
    **{f"bound of {digit}": _bound_of(str(digit)) for digit in range(10)},
}
CURVES: Final[Mapping[str, Mapping[str, Curve]]] = {
    "c-table2": _SCHEDULES,
    "c-table2-uniform": _SCHEDULES,
    "c-table2-same-epochs": _SCHEDULES,
    "c-table2-longer": _SCHEDULES,
    "c-table2-validation": _SCHEDULES,
    "d-mnist": _DIGITS,
    "d-mnist-short": _DIGITS,
}
"""The curves that are stored, by the name of the sweep."""
WITH_NORMS: Final = ("a-mnist",)
"""Sweeps for which medians of norms are stored beside them."""


def curves_of(name: str, trial: dpsweep.Trial, files: TrialFiles) -> dict[str, tuple[float, ...]]:
    """Return the curves of a finished trial of the sweep called ``name``, to four digits, without those it does not
    have.
    """
    if not isinstance(trial.result, TrialResult):
        return {}
    history = trial.result.training.history
    found = {
        curve: [value for record in history if (value := of(trial, record)) is not None]
        for curve, of in CURVES.get(name, {}).items()
    }
    if name in WITH_NORMS and trial.spec.is_private:
        found |= medians_of_norms(files, [record.step for record in history])
    return {curve: tuple(float(f"{value:.4g}") for value in values) for curve, values in found.items() if values}


def medians_of_norms(files: TrialFiles, steps: Sequence[int]) -> dict[str, list[float]]:
    """Return the median gradient norm of each group's training examples, at the last snapshot before each step."""
    shards = NormShards(files.norms)
    parts = [shards.read(part) for part in shards.parts]
    places = np.searchsorted(parts[0].steps, steps) - 1
    groups = np.concatenate([part.groups for part in parts])
    norms = np.concatenate([part.norms[:, places] for part in parts])
    names = range(int(groups.max()) + 1)
    return {f"median norm of {name}": np.median(norms[groups == name], axis=0).tolist() for name in names}
