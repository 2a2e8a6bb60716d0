"""The stored results of sweeps/papers: one JSON file per sweep in benchmarks/reproduction, numbers only, no data rows.

`python -m benchmarks.reproduce NAME` writes them, and docs/reproduction.py writes the pages on the papers from them.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter
from scipy import stats

FOLDER: Final = Path(__file__).parent / "reproduction"
LEVEL: Final = 0.95


@dataclass(frozen=True)
class Number:
    """A number of a setting: its value in each run, and the 95 % interval of their mean.

    `low`, `high`: None if unknown, as for a single run. `covers`: what the interval accounts for: ``runs`` for
    Student's t over the runs alone, else as in `dpsweep.orchestration.comparison.intervals.ConfidenceInterval`.
    """

    values: tuple[float, ...]
    low: float | None = None
    high: float | None = None
    covers: str = "runs"

    @property
    def mean(self) -> float:
        """Mean over the runs."""
        return statistics.fmean(self.values)

    @property
    def ends(self) -> tuple[float, float] | None:
        """Ends of the interval; None if unknown."""
        return None if self.low is None or self.high is None else (self.low, self.high)


@dataclass(frozen=True)
class StoredSetting:
    """One setting of a sweep with the numbers of its finished runs.

    `name`: as in the sweep's report.
    `parameters`: those that vary in the sweep, and the labels.
    `runs`: (seed of training, seed of the split), in the order of every number's values.
    `curves`: numbers of the first run after each epoch (`benchmarks.curves`).
    """

    name: str
    parameters: Mapping[str, str | int | float | bool | None]
    runs: tuple[tuple[int, int], ...]
    numbers: Mapping[str, Number]
    curves: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class StoredDifference:
    """A number of ``one`` minus that of ``other``, settings of a sweep, with the interval and the verdict of its
    report.
    """

    one: str
    other: str
    metric: str
    value: float
    low: float
    high: float
    verdict: str


@dataclass(frozen=True)
class StoredSweep:
    """The stored results of one sweep.

    `commit`: the last one that changed the code that trains and accounts.
    `asked`, `finished`: numbers of trials.
    `overlap`: test over training examples if several splits are drawn from the same rows, else 0.
    `cpu_seconds`: of all runs of the command, with training, accounting and comparison.
    `differences`: of private settings at the same epsilon.
    """

    sweep: str
    command: str
    version: str
    commit: str
    hardware: str
    asked: int
    finished: int
    train_size: int
    test_size: int
    overlap: float
    cpu_seconds: float
    settings: tuple[StoredSetting, ...]
    differences: tuple[StoredDifference, ...] = ()


_STORED: Final = TypeAdapter(StoredSweep)
_INNERMOST: Final = re.compile(r"\[[^\[\]{}]*\]")
"""Matches lists of plain values, which are written on one line."""


def stored_file(name: str, folder: Path = FOLDER) -> Path:
    """Return where the results of the sweep called ``name`` are stored."""
    return folder / f"{name}.json"


def write_stored(found: StoredSweep, folder: Path = FOLDER) -> Path:
    """Store the results of a sweep, in place of earlier ones."""
    path = stored_file(found.sweep, folder)
    text = _STORED.dump_json(found, indent=1).decode()
    path.write_text(_INNERMOST.sub(lambda part: " ".join(part.group().split()), text) + "\n")
    return path


def read_stored(name: str, folder: Path = FOLDER) -> StoredSweep | None:
    """Return the stored results; None where there are none."""
    path = stored_file(name, folder)
    return _STORED.validate_json(path.read_bytes()) if path.exists() else None


def over_runs(values: Sequence[float], splits: Sequence[int] = (), overlap: float = 0.0) -> Number:
    """Return a number with Student's interval over its runs; without an interval for a single run.

    splits: the split of each run. Splits drawn from the same rows overlap; the variance over several splits is
    corrected for this (Nadeau and Bengio 2003, Section 3.2), with ``overlap`` as in `StoredSweep`.
    """
    count = len(values)
    if count < 2:
        return Number(tuple(values))
    share = 1.0 / count + (overlap if len(set(splits)) > 1 else 0.0)
    half = float(stats.t.ppf(0.5 + LEVEL / 2.0, count - 1)) * statistics.stdev(values) * math.sqrt(share)
    mean = statistics.fmean(values)
    return Number(tuple(values), mean - half, mean + half)


def difference(sweep: StoredSweep, one: StoredSetting, other: StoredSetting, number: str) -> Number:
    """Return a number of ``one`` minus that of ``other``, paired by run, with the interval of the mean difference.

    Raises: KeyError where one of them does not have the number, ValueError where they have no run in common.
    """
    subtracted = dict(zip(other.runs, other.numbers[number].values, strict=True))
    values = zip(one.runs, one.numbers[number].values, strict=True)
    common = [(run, value - subtracted[run]) for run, value in values if run in subtracted]
    if not common:
        raise ValueError(f"{one.name!r} and {other.name!r} of {sweep.sweep} have no run in common")
    return over_runs([value for _, value in common], [split for (_, split), _ in common], sweep.overlap)
