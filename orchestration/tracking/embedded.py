"""Clients of MLflow: of an embedded store in an SQLite file, and of a server.

An embedded store is copied from a cached empty one, as MLflow takes two seconds to make it. A call of a server ends.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar, cast

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
from mlflow.environment_variables import MLFLOW_HTTP_REQUEST_TIMEOUT
from mlflow.store.entities import PagedList

from dpsweep.accounting.errors import StorageError
from dpsweep.accounting.records.files import write_bytes_atomically
from dpsweep.accounting.records.local_files import UnsafeFile
from dpsweep.orchestration.store.layout import DATABASE
from dpsweep.orchestration.tracking.addresses import (
    AddressParts,
    is_server,
    require_schema,
    runs_by_itself,
    sqlite_file,
)
from dpsweep.orchestration.tracking.requests import Timed
from dpsweep.orchestration.tracking.tracker import NO_TRACKING, TrackingUnavailable
from dpsweep.workers.machine.folders import user_cache

Client = TypeVar("Client")
Item = TypeVar("Item")
_SCHEME = "sqlite:///"
TIMES: Final = 6.0
"""Seconds that a request to a server may take in all, in multiples of the time in which it has to go on."""
TIMES_WITH_FILES: Final = 45.0
"""The same for a request that sends files: 100 MB at 110 kB/s take 900 s."""
MOST_PAGES: Final = 1000
"""Most pages of an answer that are asked for; the runs of the largest sweep fill about a hundred."""
_ADVICE: Final = f"see what holds up the server, or raise MLFLOW_HTTP_REQUEST_TIMEOUT; {TIMES:g} times it is the limit"


def embedded_tracking_uri(folder: Path | str) -> str:
    """Return the tracking URI of the SQLite store inside ``folder``.

    >>> embedded_tracking_uri("/data/runs/a")
    'sqlite:////data/runs/a/mlflow.db'
    """
    return f"{_SCHEME}{Path(folder).resolve() / DATABASE}"


def stored_tracking_uri(folder: Path | str) -> str:
    """Return the tracking URI of the SQLite store inside ``folder``; `NO_TRACKING` if there is none."""
    return embedded_tracking_uri(folder) if (Path(folder) / DATABASE).exists() else NO_TRACKING


def client_of(tracking_uri: str) -> MlflowClient:
    """Return a client of a store; a new SQLite file is made as a copy of a cached empty store.

    The cache in ``~/.cache/dpsweep`` has one empty store per version of MLflow, made from the first store that this
    version creates, without any data of a sweep. If it cannot be written, MLflow creates every store itself.

    Calls of a server raise TimeoutError where its answer is not complete in time (`Timed`). Raises: TrackingUnavailable
    for an SQLite file that runs something else than MLflow's.
    """
    file = sqlite_file(tracking_uri)
    if file is None:
        return timed(MlflowClient(tracking_uri=tracking_uri), tracking_uri)
    if not (file.exists() and file.stat().st_size):
        return _client_of_new(tracking_uri, file)
    require_schema(file, _parts_of_mlflow())
    return MlflowClient(tracking_uri=tracking_uri)


def _client_of_new(tracking_uri: str, file: Path) -> MlflowClient:
    empty = _empty()
    if empty is None or _is_copied(empty, file):
        return MlflowClient(tracking_uri=tracking_uri)
    client = MlflowClient(tracking_uri=tracking_uri)
    with contextlib.suppress(StorageError, UnsafeFile, sqlite3.Error):
        write_bytes_atomically(str(empty), _emptied(file))
    return client


def _empty() -> Path | None:
    """Return the place of the cached empty store, which only this user can change; None without a cache."""
    cache = user_cache()
    return cache and cache / f"mlflow-{mlflow.__version__}.db"


def _parts_of_mlflow() -> AddressParts:
    """Return what runs by itself in a store that this version of MLflow makes."""
    with contextlib.suppress(sqlite3.Error):
        if (empty := _empty()) and empty.is_file():
            return runs_by_itself(empty)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / DATABASE
        _client_of_new(embedded_tracking_uri(folder), file)
        return runs_by_itself(file)


def timed(client: Client, tracking_uri: str) -> Client:
    """Return ``client``, each of whose calls ends (`Timed`), where ``tracking_uri`` names a server; else as it is."""
    return cast(Client, Timed(client, _limit, _ADVICE)) if is_server(tracking_uri) else client


def every_page(search: Callable[[str | None], PagedList[Item]], of: str) -> Iterator[Item]:
    """Yield what a search finds, page by page. search: of the page with this token. of: what it finds, for errors.

    Raises: TrackingUnavailable for a server that gives more pages than `MOST_PAGES`.
    """
    token: str | None = None
    for _ in range(MOST_PAGES):
        page = search(token)
        yield from page
        token = page.token
        if not token:
            return
    raise TrackingUnavailable(f"MLflow has no end of {of} of one sweep; look at what server it is")


def _limit(method: str) -> float:
    """Return the seconds for a call of a method of MLflow's client, by the method's name."""
    pause = int(MLFLOW_HTTP_REQUEST_TIMEOUT.get())  # type: ignore[no-untyped-call]  # MLflow's has no types
    return pause * (TIMES_WITH_FILES if "artifact" in method else TIMES)


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
    """Return the content of a store that MLflow has just created, without its default experiment."""
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as database:
        with contextlib.closing(sqlite3.connect(file)) as made:
            made.backup(database)
        database.execute("DELETE FROM experiments")
        database.execute("VACUUM")  # so that no page holds what was deleted
        return database.serialize()
