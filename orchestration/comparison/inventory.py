"""Inventory of the sweeps below a folder: name, trials by state, last change."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from dpsweep.accounting.errors import DpsweepError
from dpsweep.accounting.records import exists, list_folders
from dpsweep.orchestration.comparison.stored import stored_record
from dpsweep.orchestration.records.layout import SweepFiles
from dpsweep.orchestration.records.states import TrialState
from dpsweep.orchestration.records.status_snapshot import SweepSnapshot, read_snapshot

STALE: Final = "stale"


@dataclass(frozen=True)
class SweepSummary:
    """Summary of a sweep below a folder.

    state: the state in its status.json, ``stale`` if a running sweep is stale, ``unknown`` without that file. trials:
    number of trials by the word for their state, from status.json or else from their results. changed: time of the last
    change, in seconds since 1970 UTC. problem: why the folder cannot be read; if set, only ``folder`` is known besides.
    snapshot: of its status.json.
    """

    folder: str
    name: str = ""
    state: str = ""
    trials: Mapping[str, int] = field(default_factory=dict)
    changed: float | None = None
    problem: str = ""
    snapshot: SweepSnapshot | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        known = {"name": self.name, "state": self.state, "trials": dict(self.trials), "changed": self.changed}
        return {"folder": self.folder, **known, "problem": self.problem or None}


def sweeps_below(folder: str) -> Iterator[SweepSummary]:
    """Yield the sweep in ``folder``, or else the sweeps in the folders below it, in order, without hidden folders and
    links.

    folder: an absolute path or URI. A folder that cannot be read, or holds a damaged sweep, gives a summary with a
    `problem`.
    """
    files = SweepFiles(folder)
    try:
        if exists(files.manifest):
            yield _summary(files)
            return
        inner = list_folders(folder)
    except DpsweepError as error:
        yield SweepSummary(folder, problem=str(error))
        return
    for name in inner:
        yield from sweeps_below(f"{folder.rstrip('/')}/{name}")


def _summary(files: SweepFiles) -> SweepSummary:
    snapshot = read_snapshot(files.status)
    return _of_results(files) if snapshot is None else _of_snapshot(files, snapshot)


def _of_snapshot(files: SweepFiles, snapshot: SweepSnapshot) -> SweepSummary:
    state = STALE if snapshot.is_stale() else snapshot.state
    return SweepSummary(files.root, snapshot.name, state, _by_word(snapshot.counts()), snapshot.heartbeat, "", snapshot)


def _of_results(files: SweepFiles) -> SweepSummary:
    """Return the summary of a sweep whose driver ended before it wrote a status.json."""
    record = stored_record(files)
    counts = Counter(record.status(point.key).state for point in record.points)
    ended = [status.ended for status in record.statuses.values() if status.ended is not None]
    created = datetime.datetime.fromisoformat(record.manifest.created).timestamp()
    return SweepSummary(files.root, record.sweep.name, "unknown", _by_word(counts), max([created, *ended]))


def _by_word(counts: Mapping[TrialState, int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for state in TrialState:
        if counts.get(state):
            found[state.word] = found.get(state.word, 0) + counts[state]
    return found
