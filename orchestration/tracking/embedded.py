"""Embedded MLflow store in an SQLite file, copied from a cached empty one, as MLflow takes two seconds to make it."""

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
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")

import mlflow
from mlflow import MlflowClient

from accounting.errors import StorageError
from accounting.records import UnsafeFile, write_bytes_atomically
from orchestration.records.layout import DATABASE
from orchestration.tracking.no_tracking import NO_TRACKING
from workers.user_cache import CACHE

_SCHEME = "sqlite:///"


def embedded_tracking_uri(folder: Path | str) -> str:
    """Tracking URI of the SQLite store inside ``folder``.

    >>> embedded_tracking_uri("/data/runs/a")
    'sqlite:////data/runs/a/mlflow.db'
    """
    return f"{_SCHEME}{Path(folder).resolve() / DATABASE}"


def stored_tracking_uri(folder: Path | str) -> str:
    """Tracking URI of the SQLite store inside ``folder``; `NO_TRACKING` if there is none."""
    return embedded_tracking_uri(folder) if (Path(folder) / DATABASE).exists() else NO_TRACKING


def client_of(tracking_uri: str) -> MlflowClient:
    """A client of a store; a new SQLite file is made as a copy of a cached empty store.

    The cache in ``~/.cache/dpsweep`` has one empty store per version of MLflow, made from the first store that this
    version creates, without any data of a sweep. If it cannot be written, MLflow creates every store itself.
    """
    file = Path(tracking_uri.removeprefix(_SCHEME))
    if not tracking_uri.startswith(_SCHEME) or (file.exists() and file.stat().st_size):
        return MlflowClient(tracking_uri=tracking_uri)
    empty = CACHE.expanduser().resolve() / f"mlflow-{mlflow.__version__}.db"
    if _is_copied(empty, file):
        return MlflowClient(tracking_uri=tracking_uri)
    client = MlflowClient(tracking_uri=tracking_uri)
    with contextlib.suppress(StorageError, UnsafeFile, sqlite3.Error):
        write_bytes_atomically(str(empty), _emptied(file))
    return client


def _is_copied(empty: Path, file: Path) -> bool:
    """Copy the empty store to ``file`` in one transaction; False if it is missing or damaged."""
    if not empty.is_file():
        return False
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(empty)) as kept:
        if kept.execute("PRAGMA quick_check").fetchone() == ("ok",):
            with contextlib.closing(sqlite3.connect(file)) as store:
                kept.backup(store)
            return True
    return False


def _emptied(file: Path) -> bytes:
    """The content of a store that MLflow has just created, without its default experiment."""
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as database:
        with contextlib.closing(sqlite3.connect(file)) as made:
            made.backup(database)
        database.execute("DELETE FROM experiments")
        database.execute("VACUUM")  # so that no page holds what was deleted
        return database.serialize()
