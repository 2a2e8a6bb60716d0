"""MLflow in an SQLite file. An empty store is kept, because MLflow takes two seconds to make its tables."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
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

from orchestration.records.layout import DATABASE
from workers.data import CACHE

_SCHEME = "sqlite:///"


def embedded_tracking_uri(folder: Path | str) -> str:
    """Tracking URI of the SQLite store inside ``folder``.

    >>> embedded_tracking_uri("/data/runs/a")
    'sqlite:////data/runs/a/mlflow.db'
    """
    return f"{_SCHEME}{Path(folder).resolve() / DATABASE}"


def client_of(tracking_uri: str) -> MlflowClient:
    """A client of a store that is ready; a new SQLite file becomes a copy of the empty store that is kept.

    The empty store lies in ``~/.cache/dpsweep``, holds nothing of any sweep, and is that of the first store which a
    version of MLflow makes. Where it cannot be kept, MLflow makes each store anew.
    """
    file = Path(tracking_uri.removeprefix(_SCHEME))
    if not tracking_uri.startswith(_SCHEME) or (file.exists() and file.stat().st_size):
        return MlflowClient(tracking_uri=tracking_uri)
    empty = CACHE.expanduser() / f"mlflow-{mlflow.__version__}.db"
    is_copied = _is_whole(empty) and _copied(empty, file)
    client = MlflowClient(tracking_uri=tracking_uri)
    if not is_copied:
        _keep(file, empty)
    return client


def _is_whole(empty: Path) -> bool:
    if not empty.is_file():
        return False
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(empty)) as database:
        return bool(database.execute("PRAGMA quick_check").fetchone() == ("ok",))
    return False


def _copied(empty: Path, file: Path) -> bool:
    with contextlib.suppress(OSError), _beside(file) as copy:
        shutil.copyfile(empty, copy)
        if file.exists():
            shutil.copymode(file, copy)  # made beforehand where only its owner may read it
        copy.replace(file)
        return True
    return False


def _keep(file: Path, empty: Path) -> None:
    """Keep the store that MLflow has just made, without the experiment that it puts into a new one."""
    with contextlib.suppress(OSError, sqlite3.Error):
        empty.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _beside(empty) as copy:
            with contextlib.closing(sqlite3.connect(file)) as database:
                database.execute("VACUUM INTO ?", (str(copy),))
            with contextlib.closing(sqlite3.connect(copy, isolation_level=None)) as database:
                database.execute("DELETE FROM experiments")
                database.execute("VACUUM")  # so that no page holds what was deleted
            copy.replace(empty)


@contextlib.contextmanager
def _beside(file: Path) -> Iterator[Path]:
    """A path in the folder of ``file`` that nobody else writes to; what is left there is deleted."""
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".empty-") as folder:
        yield Path(folder) / file.name
