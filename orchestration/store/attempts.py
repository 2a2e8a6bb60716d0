"""Append-only ledger of the releases of every start (attempt) of every trial.

Deleting a trial's folder restarts the trial with new noise, but what the earlier attempt showed, in MLflow or as a
model, remains part of the trial's cost. The ledger is therefore stored outside the folders of trials.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import Field, PlainSerializer, PlainValidator, TypeAdapter, ValidationError

from dpsweep.accounting.errors import DataCorruption, DpsweepError
from dpsweep.accounting.mechanism.estimates import without_guarantee
from dpsweep.accounting.mechanism.plain import of_plain, to_plain
from dpsweep.accounting.mechanism.reasons import Reason
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.accounting.records.files import list_files
from dpsweep.accounting.records.sealed import read_sealed, write_sealed
from dpsweep.orchestration.store.layout import SweepFiles


def _trace(stored: Trace | Mapping[str, Any]) -> Trace:
    """Return the stored trace. Raises: ValueError if there is none.

    Training never fixes contributions in advance, so contributions that claim a guarantee become output-specific.
    """
    if isinstance(stored, Trace):
        return stored
    try:
        return of_plain({**stored, "contributions": without_guarantee(stored["contributions"])})
    except (LookupError, TypeError, AttributeError, RuntimeError, DpsweepError) as error:
        raise ValueError(f"no trace of a run ({error})") from error


StoredTrace = Annotated[Trace, PlainValidator(_trace), PlainSerializer(to_plain)]
"""A trace inside a JSON file."""


@dataclass(frozen=True)
class Attempt:
    """One start of a trial from scratch, or one more release of its statistics.

    `number`: number of the attempt within its trial, from 1.
    `trace`: with ``delta``, bounds the cost of everything that the attempt has shown.
    `seed`: seed of its noise; None if the noise is secret.
    `ended`: whether it ran to its planned end, so that its length reveals nothing.
    `statistics`: trace of the release of statistics alone, if it was made.
    `reasons`: why the cost is an estimate, whatever the course of the attempt was
    (`dpsweep.orchestration.sweeps.planned`).
    `folder`: of its sweep; not stored.
    `release`: a random name, drawn anew whenever the record changes, so that only copies of one record share it; "" in
    records without one.
    """

    key: str
    number: int
    delta: float
    trace: StoredTrace
    seed: int | None = None
    ended: bool = False
    statistics: StoredTrace | None = None
    reasons: tuple[Reason, ...] = ()
    folder: Annotated[str, Field(exclude=True)] = field(default="", compare=False)
    release: str = field(default="", compare=False)

    @property
    def identity(self) -> tuple[str, ...]:
        """Return what two records of the same release share, so that it counts once.

        Such are a record that is read for two sweeps, and one that another sweep took over with its trial. Without a
        name it is where it is recorded, so that copies count twice rather than not at all.
        """
        return (self.release,) if self.release else (self.folder, self.key, str(self.number))


_ATTEMPT = TypeAdapter(Attempt)


def read_attempts(files: SweepFiles, key: str) -> tuple[Attempt, ...]:
    """Return the attempts at one trial, in order. Raises: DataCorruption if a record is damaged or missing."""
    folder, found = files.attempts(key), []
    next_step = "restore it from a backup: without it, part of the trial's cost is unknown"
    for number, name in enumerate(list_files(folder), start=1):
        uri = f"{folder}/{_name(number)}"
        if name != _name(number):  # shown as Python spells it, because a name may hold whole lines
            raise DataCorruption(f"{folder} holds {name!r} in place of {_name(number)}; {next_step}")
        try:
            attempt = _ATTEMPT.validate_json(read_sealed(uri, next_step) or b"")
        except ValidationError as error:
            raise DataCorruption(f"{uri} is no record of this version of dpsweep; {next_step}") from error
        if (attempt.key, attempt.number) != (key, number):
            raise DataCorruption(f"{uri} is not the record of attempt {number} of trial {key}; {next_step}")
        found.append(replace(attempt, folder=files.root))
    return tuple(found)


def adopt_attempts(files: SweepFiles, key: str, attempts: Iterable[Attempt]) -> None:
    """Add the attempts at the same trial in another sweep to its attempts in this sweep, unless they are there."""
    known = read_attempts(files, key)
    held = {attempt.identity for attempt in known}
    new = [attempt for attempt in attempts if attempt.identity not in held]
    for number, attempt in enumerate(new, start=len(known) + 1):
        _write(files, replace(attempt, number=number))


def _write(files: SweepFiles, attempt: Attempt) -> None:
    write_sealed(f"{files.attempts(attempt.key)}/{_name(attempt.number)}", _ATTEMPT.dump_json(attempt))


def _named(attempt: Attempt, number: int, files: SweepFiles) -> Attempt:
    """Return a record to be written as attempt ``number`` of its trial in the sweep of ``files``."""
    return replace(attempt, number=number, folder=files.root, release=secrets.token_hex(16))


def _name(number: int) -> str:
    return f"{number:06d}.json"


def _covers(before: Attempt, now: Attempt) -> bool:
    """Return whether the stored record of an attempt holds all that its training has shown by ``now``."""
    if before.ended or before.trace.steps > now.trace.steps:
        return True
    return before.trace.steps == now.trace.steps and not now.ended


class AttemptLog:
    """The attempts of a running sweep. Thread-safe. Each record is on disk before the log shows it."""

    def __init__(self, files: SweepFiles, keys: Iterable[str]) -> None:
        """Read the stored attempts. Raises: DataCorruption for a damaged record."""
        self._files, self._lock = files, threading.Lock()
        self._attempts = {key: read_attempts(files, key) for key in keys}
        self._current: dict[str, int] = {}

    @property
    def all(self) -> Mapping[str, tuple[Attempt, ...]]:
        with self._lock:
            return dict(self._attempts)

    def take_up(self, key: str, continues: bool) -> None:
        """Choose the current attempt: the last one that trained if the trial continues it, otherwise a new one."""
        with self._lock:
            trained = [attempt.number for attempt in self._attempts[key] if attempt.trace.segments]
            self._current[key] = trained[-1] if continues and trained else len(self._attempts[key]) + 1

    def note(self, now: Attempt) -> None:
        """Record everything that the current attempt has shown so far; the record of an attempt never shrinks.

        now: its ``number`` is set here.
        """
        with self._lock:
            now = _named(now, self._current.setdefault(now.key, 1), self._files)
            earlier = self._attempts[now.key]
            before = next((attempt for attempt in earlier if attempt.number == now.number), None)
            if before is not None and _covers(before, now):
                if now.statistics is None or before.statistics is not None:
                    return  # a worker that resumed from its checkpoint repeats steps that are already recorded
                now = replace(before, statistics=now.statistics, release=now.release)
            _write(self._files, now)
            others = [each for each in earlier if each is not before]
            self._attempts[now.key] = tuple(sorted([*others, now], key=lambda each: each.number))

    def has_released(self, key: str) -> bool:
        """Return whether the current attempt has shown anything that costs privacy."""
        with self._lock:
            current = self._current.get(key)
            return any(each.number == current for each in self._attempts[key])

    def has_released_statistics(self, key: str) -> bool:
        """Return whether the current attempt has released statistics."""
        with self._lock:
            current = self._current.get(key)
            return any(each.number == current and each.statistics for each in self._attempts[key])

    def note_statistics(self, now: Attempt) -> None:
        """Record, as its own attempt, that statistics released before are about to be released again."""
        with self._lock:
            now = _named(now, len(self._attempts[now.key]) + 1, self._files)
            _write(self._files, now)
            self._attempts[now.key] = (*self._attempts[now.key], now)
