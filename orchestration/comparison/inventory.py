"""Inventory of the sweeps below a folder: name, trials by state, last change."""

from __future__ import annotations

import datetime
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from dpsweep.accounting.errors import DpsweepError
from dpsweep.accounting.records.files import exists, list_folders
from dpsweep.orchestration.comparison.stored import stored_record
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.published import TrialState
from dpsweep.orchestration.store.status_snapshot import SweepSnapshot, read_snapshot
from dpsweep.orchestration.sweeps.manifest import Manifest, read_manifest
from dpsweep.orchestration.sweeps.schema import parse_sweep

STALE: Final = "stale"
_RUNNING: Final = TrialState.TRAINING.word
_DEEPEST: Final = 64
"""Most levels of folders that are looked into."""


@dataclass(frozen=True)
class SweepSummary:
    """Summary of a sweep below a folder.

    `state`: the state in its status.json, ``stale`` if a running sweep is stale, ``unknown`` without that file.
    `trials`: number of trials by the word for their state, from status.json or else from their results; those that ran
    when the driver ended are ``interrupted``.
    `changed`: time of the last change, in seconds since 1970 UTC.
    `problem`: why the folder cannot be read; if set, only ``folder`` is known besides.
    `snapshot`: of its status.json.
    """

    folder: str
    name: str = ""
    state: str = ""
    trials: Mapping[str, int] = field(default_factory=dict)
    changed: float | None = None
    problem: str = ""
    snapshot: SweepSnapshot | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        known = {"name": self.name, "state": self.state, "trials": dict(self.trials), "changed": self.changed}
        return {"folder": self.folder, **known, "problem": self.problem or None}


def sweeps_below(folder: str, depth: int = 0) -> Iterator[SweepSummary]:
    """Yield the sweep in ``folder``, or else the sweeps in the folders below it, in order, without hidden folders and
    links.

    `folder`: an absolute path or URI. A folder that cannot be read or is nested too deeply, whose name is no text, or
    that holds a damaged sweep, gives a summary with a `problem`. `depth`: of the folder below the first one.
    """
    files = SweepFiles(folder)
    if odd := _oddity(folder, depth):
        yield SweepSummary(_spelt(folder), problem=f"{_spelt(folder)} {odd}")
        return
    try:
        if exists(files.manifest):
            snapshot = read_snapshot(files.status)
            yield _of_results(files) if snapshot is None else _of_snapshot(files, snapshot)
            return
        if (begun := read_manifest(files.of_selection)) is not None:
            yield _of_selection(files, begun)
            return
        inner = list_folders(folder)
    except DpsweepError as error:
        yield SweepSummary(folder, problem=str(error))
        return
    for name in inner:
        yield from sweeps_below(f"{folder.rstrip('/')}/{name}", depth + 1)


def _oddity(folder: str, depth: int) -> str:
    """Return why a folder is not looked into; "" if nothing speaks against it."""
    if depth > _DEEPEST:
        return f"lies more than {_DEEPEST} folders deep, where no sweep is looked for; name a folder nearer to it"
    return "" if _spelt(folder) == folder else "has a name that is no UTF-8, so no sweep is looked for there; rename it"


def _spelt(name: str) -> str:
    """Return a name with every byte that is no UTF-8 spelt out."""
    return os.fsencode(name).decode(errors="backslashreplace")


def _of_selection(files: SweepFiles, begun: Manifest) -> SweepSummary:
    """Return the summary of a private selection without its trials, whose number tells how many were drawn."""
    return SweepSummary(files.root, parse_sweep(begun.text).name, "private selection", {}, _created(begun))


def _created(manifest: Manifest) -> float:
    return datetime.datetime.fromisoformat(manifest.created).timestamp()


def _of_snapshot(files: SweepFiles, snapshot: SweepSnapshot) -> SweepSummary:
    state = STALE if snapshot.is_stale() else snapshot.state
    trials = _by_word(snapshot.counts())
    if snapshot.is_over:
        trials = {"interrupted" if word == _RUNNING else word: count for word, count in trials.items()}
    return SweepSummary(files.root, snapshot.name, state, trials, snapshot.heartbeat, "", snapshot)


def _of_results(files: SweepFiles) -> SweepSummary:
    """Return the summary of a sweep whose driver ended before it wrote a status.json."""
    record = stored_record(files)
    counts = Counter(record.status(point.key).state for point in record.points)
    ended = [status.ended for status in record.statuses.values() if status.ended is not None]
    return SweepSummary(
        files.root, record.sweep.name, "unknown", _by_word(counts), max([_created(record.manifest), *ended])
    )


def _by_word(counts: Mapping[TrialState, int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for state in TrialState:
        if counts.get(state):
            found[state.word] = found.get(state.word, 0) + counts[state]
    return found
