"""MLflow tracking URIs: whether they name a server or a database, whether it can be reached, and its errors."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Final
from urllib.parse import unquote, urlsplit

from dpsweep.accounting.errors import DpsweepError
from dpsweep.orchestration.comparison.formats import masked
from dpsweep.orchestration.tracking.sqlite_files import file_of, require_own_journal
from dpsweep.orchestration.tracking.tracker import EXPERIMENT, TrackingUnavailable

VARIABLE: Final = "MLFLOW_EXPERIMENT_NAME"
"""Variable that names the experiment of all sweeps."""
LOCAL_SERVER: Final = "http://127.0.0.1:5000"
"""Address of `mlflow ui`, which shows a database."""
_DEFAULT_PORTS = {"http": 80, "https": 443, "postgresql": 5432, "mysql": 3306, "mssql": 1433}


def probe(tracking_uri: str) -> None:
    """Connect to an MLflow server or database once, to fail within seconds where MLflow would retry for minutes.

    Raises: TrackingUnavailable for a database whose driver is not installed, and for an SQLite file with a journal that
    somebody else has made. Errors of sockets and SQLAlchemy pass through if it cannot be reached.
    """
    parts = urlsplit(tracking_uri)
    scheme = parts.scheme.split("+")[0]
    proxied = scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(parts.hostname or "")
    if parts.hostname and scheme in _DEFAULT_PORTS and not proxied:
        socket.create_connection((parts.hostname, parts.port or _DEFAULT_PORTS[scheme]), timeout=10).close()
    if not is_server(tracking_uri):
        if (file := file_of(tracking_uri)) is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            require_own_journal(file)
        import sqlalchemy  # late: of no use to a driver that records on a server

        try:
            sqlalchemy.create_engine(tracking_uri, poolclass=sqlalchemy.pool.NullPool).connect().close()
        except ModuleNotFoundError as error:
            raise TrackingUnavailable(
                f"the MLflow store {masked(tracking_uri, tracking_uri)} needs the driver {error.name!r}: install it, "
                "or name an installed one, as in postgresql+psycopg2://"
            ) from error


def experiment_name() -> str:
    """Return the name of the experiment of all sweeps: ``MLFLOW_EXPERIMENT_NAME``, as for MLflow itself, or
    `EXPERIMENT`.
    """
    return os.environ.get(VARIABLE) or EXPERIMENT


def is_server(tracking_uri: str) -> bool:
    """Return whether the URI names an MLflow server, which stores artifacts itself, and not a database."""
    return tracking_uri.partition(":")[0].split("+")[0] not in ("sqlite", "postgresql", "mysql", "mssql")


_PREFACE: Final = "(raised as a result of Query-invoked autoflush"
"""Begins a line that SQLAlchemy puts before the reason of some errors."""


@contextlib.contextmanager
def reported(doing: str, uri: str) -> Iterator[None]:
    """Turn errors of stores and artifact repositories, which raise their own types, into `TrackingUnavailable`."""
    try:
        yield
    except DpsweepError:
        raise
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith(_PREFACE)]
        reason = next(iter(lines), type(error).__name__)
        raise TrackingUnavailable(masked(f"{doing} MLflow at {uri}: {_explained(reason, uri)}", uri)) from error


def _explained(reason: str, uri: str) -> str:
    """Return the reason with what to do about it, where that is known. HTTP: MLflow tells the code in the text
    alone.
    """
    host = uri.partition("://")[2].partition("/")[0].rpartition("@")[2]
    user = os.environ.get("MLFLOW_TRACKING_USERNAME")
    who = f"as {user!r}" if user else "without a login"
    advice = {
        "database or disk is full": f"{reason}; free some space where the database is",
        "sqlite3.DatabaseError": f"{reason}; the file is damaged: delete it, and `dpsweep record` records all "
        "but registered models anew",
        "Invalid Host header": f"the server refuses the host name (403 Invalid Host header); start it with "
        f"`--allowed-hosts {host}`, or name it as it expects",
        "error code 401": f"the server refuses to be used {who} (401); set MLFLOW_TRACKING_USERNAME and "
        "MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, where this command runs",
        "error code 403": f"the server refuses to be used {who} for this (403); ask its administrator for EDIT on the "
        f"experiment {experiment_name()!r}, name one of your own by MLFLOW_EXPERIMENT_NAME, or set another "
        "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
        "Connection refused": "connection refused, as nothing listens there; start the server, or correct the address",
        "Name or service not known": "its host name is not known on this machine; correct the address",
        "timed out": "it does not answer in time; see whether the server is busy, or unreachable from here",
    }
    return next((text for sign, text in advice.items() if sign in reason), reason)


_ID: Final = re.compile(r"(m-)?[0-9a-f]{32}")
"""Id of a run, or of a logged model, as MLflow makes it."""
MOST_PAGES: Final = 1000
"""Most pages of an answer that are asked for; the runs of the largest sweep fill about a hundred."""


def require_location(uri: str, owner: str) -> None:
    """Check the location of the files of a run or model before MLflow's client writes there.

    A server may name a folder of this machine. It has to be one that MLflow made for this ``owner``, a run or a model,
    lest the server choose which files of this user are replaced. Raises: TrackingUnavailable.
    """
    parts = urlsplit(uri)
    if parts.scheme not in ("", "file"):
        return
    names = PurePosixPath(unquote(parts.path)).parts
    if not _ID.fullmatch(owner) or names[-2:] != (owner, "artifacts") or ".." in names:
        raise TrackingUnavailable(
            f"MLflow keeps the files of {owner} in {uri} on this machine, but there MLflow itself has only folders "
            "ID/artifacts, so nothing was written; look at what server it is, or start it with --serve-artifacts"
        )
