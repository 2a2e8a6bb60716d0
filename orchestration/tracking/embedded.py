"""MLflow in an SQLite file. An empty store is kept, because MLflow takes two seconds to make its tables."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path

# MLflow reads these when it is imported: no telemetry, no log lines about migrations, no long retries (the recorder
# retries).
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("DO_NOT_TRACK", "true")
os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # stdout is the command's own, such as its JSON
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")

import mlflow
from mlflow import MlflowClient

from accounting.errors import StorageError
from accounting.records import write_bytes_atomically
from orchestration.records.layout import DATABASE
from orchestration.tracking.no_tracking import NO_TRACKING
from workers.data import CACHE

_SCHEME = "sqlite:///"


def embedded_tracking_uri(folder: Path | str) -> str:
    """Tracking URI of the SQLite store inside ``folder``.

    >>> embedded_tracking_uri("/data/runs/a")
    'sqlite:////data/runs/a/mlflow.db'
    """
    return f"{_SCHEME}{Path(folder).resolve() / DATABASE}"


def stored_tracking_uri(folder: Path | str) -> str:
    """That of the SQLite store inside ``folder``; `NO_TRACKING` if there is none, as of a sweep recorded elsewhere."""
    return embedded_tracking_uri(folder) if (Path(folder) / DATABASE).exists() else NO_TRACKING


def client_of(tracking_uri: str) -> MlflowClient:
    """A client of a store that is ready; a new SQLite file becomes a copy of the empty store that is kept.

    The empty store lies in ``~/.cache/dpsweep``, holds nothing of any sweep, and is that of the first store which a
    version of MLflow makes. Where it cannot be kept, MLflow makes each store anew.
    """
    file = Path(tracking_uri.removeprefix(_SCHEME))
    if not tracking_uri.startswith(_SCHEME) or (file.exists() and file.stat().st_size):
        return MlflowClient(tracking_uri=tracking_uri)
    empty = CACHE.expanduser() / f"mlflow-{mlflow.__version__}.db"
    if _is_copied(empty, file):
        return MlflowClient(tracking_uri=tracking_uri)
    client = MlflowClient(tracking_uri=tracking_uri)
    with contextlib.suppress(StorageError, sqlite3.Error):
        write_bytes_atomically(str(empty), _emptied(file))
    return client


def _is_copied(empty: Path, file: Path) -> bool:
    """Copy the empty store, in one transaction; False where there is none, or a damaged one."""
    if not empty.is_file():
        return False
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(empty)) as kept:
        if kept.execute("PRAGMA quick_check").fetchone() == ("ok",):
            with contextlib.closing(sqlite3.connect(file)) as store:
                kept.backup(store)
            return True
    return False


def _emptied(file: Path) -> bytes:
    """The store that MLflow has just made, without the experiment that it puts into a new one."""
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as database:
        with contextlib.closing(sqlite3.connect(file)) as made:
            made.backup(database)
        database.execute("DELETE FROM experiments")
        database.execute("VACUUM")  # so that no page holds what was deleted
        return database.serialize()
