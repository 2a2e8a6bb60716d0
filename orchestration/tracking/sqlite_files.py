"""Look at an SQLite file before MLflow opens it, because it may be somebody else's, and SQLite obeys what it opens.

A journal of a transaction that was cut off may name another file, which SQLite deletes once it has played the journal
back. A view, a trigger or a virtual table runs when MLflow reads or writes, and need not end.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path
from typing import Final

from dpsweep.accounting.records.files import read_range
from dpsweep.orchestration.tracking.tracker import TrackingUnavailable

_SCHEME: Final = "sqlite:///"
_NAMES_A_FILE: Final = bytes.fromhex("d9d505f920a163d7")
"""Last bytes of a journal that names another file (SQLite, pager.c: `readSuperJournal`)."""
_RUNS: Final = "SELECT type, name, sql FROM sqlite_master WHERE type NOT IN ('table', 'index') OR rootpage = 0"
_ELSEWHERE: Final = "--tracking-uri names another store, or `none`"
Parts = frozenset[tuple[str, str, str]]
"""Type, name and SQL of parts of a schema."""


def file_of(tracking_uri: str) -> Path | None:
    """Return the file of an SQLite store; None for any other store."""
    if not tracking_uri.startswith(_SCHEME):
        return None
    return Path(os.path.realpath(tracking_uri.removeprefix(_SCHEME).partition("?")[0]))


def require_own_journal(file: Path) -> None:
    """Refuse a database whose journal names another file. Raises: TrackingUnavailable; UnsafeFile, StorageError."""
    journal = f"{file}-journal"
    try:
        _, size = read_range(journal, 0, 0)
        start = max(size - len(_NAMES_A_FILE), 0)
        end, _ = read_range(journal, start, size - start)
    except FileNotFoundError:
        return
    if end == _NAMES_A_FILE:
        raise TrackingUnavailable(
            f"{journal} names another file, which SQLite would delete, and MLflow writes no such journal; find out who "
            f"put it there, then delete it, or {_ELSEWHERE}"
        )


def runs_by_itself(file: Path) -> Parts:
    """Return the parts of a database's schema that run when others are read or written. Raises: sqlite3.Error."""
    with contextlib.closing(sqlite3.connect(file)) as store:
        return frozenset(store.execute(_RUNS))


def require_schema(file: Path, known: Parts) -> None:
    """Refuse a database that runs anything which is not ``known``; one that is damaged is left to who opens it.

    Raises: TrackingUnavailable; sqlite3.OperationalError where it cannot be read now.
    """
    try:
        found = runs_by_itself(file)
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError:
        return
    for kind, name, _ in sorted(found - known):
        raise TrackingUnavailable(
            f"{file} holds the {kind} {name!r}, which MLflow has not made and SQLite would run; find out who put it "
            f"there, or {_ELSEWHERE}"
        )
