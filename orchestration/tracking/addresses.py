"""MLflow tracking URIs: their secrets, whether they name a server or a database, whether it answers, and its errors.

An SQLite file may be somebody else's, and SQLite obeys what it opens. A journal of a transaction that was cut off may
name another file, which SQLite deletes once it has played the journal back. A view, a trigger or a virtual table runs
when MLflow reads or writes, and need not end. So a file is looked at before MLflow opens it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import socket
import sqlite3
import urllib.request
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from dpsweep.accounting.errors import DpsweepError
from dpsweep.accounting.records.files import read_range
from dpsweep.orchestration.tracking.tracker import EXPERIMENT, TrackingUnavailable

VARIABLE: Final = "MLFLOW_EXPERIMENT_NAME"
"""Variable that names the experiment of all sweeps."""
LOCAL_SERVER: Final = "http://127.0.0.1:5000"
"""Address of `mlflow ui`, which shows a database."""


def serving(uri: str) -> str:
    """Return the command, but for the interpreter, with which MLflow serves a database at `LOCAL_SERVER`."""
    return f"mlflow ui --backend-store-uri {shlex.quote(uri)}"


_DEFAULT_PORTS = {"http": 80, "https": 443, "postgresql": 5432, "mysql": 3306, "mssql": 1433}


MASK: Final = "***"
_SECRET: Final = re.compile(r"pass|pwd|secret|token|key|auth|credential", re.IGNORECASE)


def looks_secret(name: str) -> bool:
    """Return whether a variable of this name probably holds a secret.

    >>> looks_secret("AWS_SECRET_ACCESS_KEY"), looks_secret("DPSWEEP_DATA")
    (True, False)
    """
    return _SECRET.search(name) is not None


def secrets_of(uri: str) -> tuple[str, ...]:
    """Return the secret parts of an address: its password, a user name without password that may be a token (HTTP
    only), and query parameters with secret names. The whole address if it cannot be parsed."""
    try:
        parts = urlsplit(uri)
        user, password = parts.username, parts.password
    except ValueError:
        return (uri,)
    named = [value for name, value in parse_qsl(parts.query) if looks_secret(name)]
    lone = user if user and not password and parts.scheme.startswith("http") else None
    return tuple(dict.fromkeys(value for value in (password, lone, *named) if value))


def masked(uri: str) -> str:
    """Return ``uri`` with its secrets masked."""
    return masked_in(uri, uri)


def masked_in(text: str, uri: str) -> str:
    """Return ``text`` with the secrets of ``uri`` masked, whether percent-encoded or not."""
    for secret in sorted(secrets_of(uri), key=len, reverse=True):
        for spelt in dict.fromkeys((secret, unquote(secret), quote(secret, safe=""), quote(secret))):
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(spelt)}(?![A-Za-z0-9])", MASK, text)
    return text


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
        if (file := sqlite_file(tracking_uri)) is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            require_own_journal(file)
        import sqlalchemy  # late: of no use to a driver that records on a server

        try:
            sqlalchemy.create_engine(tracking_uri, poolclass=sqlalchemy.pool.NullPool).connect().close()
        except ModuleNotFoundError as error:
            raise TrackingUnavailable(
                f"the MLflow store {masked(tracking_uri)} needs the driver {error.name!r}: install it, "
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
        raise TrackingUnavailable(masked_in(f"{doing} MLflow at {uri}: {_explained(reason, uri)}", uri)) from error


def _explained(reason: str, uri: str) -> str:
    """Return the reason with what to do about it, where that is known. HTTP: MLflow tells the code in the text
    alone.
    """
    host = uri.partition("://")[2].partition("/")[0].rpartition("@")[2]
    user = os.environ.get("MLFLOW_TRACKING_USERNAME")
    who = f"as {user!r}" if user else "without a login"
    failed = re.search(r"too many (\d+) error responses", reason)
    not_allowed = (
        f"the server refuses to be used {who} for this (403); ask its administrator for EDIT on the experiment "
        f"{experiment_name()!r}, name one of your own by MLFLOW_EXPERIMENT_NAME, or set another "
        "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
    )
    advice = {
        "database or disk is full": f"{reason}; free some space where the database is",
        "sqlite3.DatabaseError": f"{reason}; the file is damaged: delete it, and `dpsweep record` records all "
        "but registered models anew",
        "Invalid Host header": f"the server refuses the host name (403 Invalid Host header); start it with "
        f"`--allowed-hosts {host}`, or name it as it expects",
        "error code 401": f"the server refuses to be used {who} (401); set MLFLOW_TRACKING_USERNAME and "
        "MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, where this command runs",
        "error code 403": not_allowed,
        "PERMISSION_DENIED": not_allowed,
        "too many 429 error responses": "the server refuses so many requests (429); raise its limit, or try later",
        "error responses": f"the server, or a proxy before it, fails ({failed and failed[1]}); see its log, its "
        "database and its disk",
        "not in a valid JSON format": "an answer is not MLflow's, but perhaps a page to log in or of a proxy; correct "
        "the address, or see what answers there",
        "Connection refused": "connection refused, as nothing listens there; start the server, or correct the address",
        "Connection aborted": "it ends connections without an answer; see its log, and what lies between",
        "Name or service not known": "its host name is not known on this machine; correct the address",
        "timed out": "it does not answer in time; see whether the server is busy, or unreachable from here",
    }
    return next((text for sign, text in advice.items() if sign in reason), reason)


_ID: Final = re.compile(r"(m-)?[0-9a-f]{32}")
"""Id of a run, or of a logged model, as MLflow makes it."""


def require_location(uri: str, owner: str) -> None:
    """Check the location of the files of a run or model before MLflow's client writes there.

    A server may name a folder of this machine. It has to be one that MLflow made for this ``owner``, a run or a model,
    lest the server choose which files of this user are replaced. Raises: TrackingUnavailable.
    """
    parts = urlsplit(uri)
    if parts.scheme not in ("", "file"):
        return
    names = PurePosixPath(unquote(parts.path)).parts
    if not owner:
        raise TrackingUnavailable(
            "an answer names neither a run nor a model, so it is not MLflow's; correct the address, or see what "
            "answers there"
        )
    if not _ID.fullmatch(owner) or names[-2:] != (owner, "artifacts") or ".." in names:
        raise TrackingUnavailable(
            f"MLflow keeps the files of {owner} in {uri} on this machine, but there MLflow itself has only folders "
            "ID/artifacts, so nothing was written; look at what server it is, or start it with --serve-artifacts"
        )


_SCHEME: Final = "sqlite:///"
_NAMES_A_FILE: Final = bytes.fromhex("d9d505f920a163d7")
"""Last bytes of a journal that names another file (SQLite, pager.c: `readSuperJournal`)."""
_RUNS: Final = "SELECT type, name, sql FROM sqlite_master WHERE type NOT IN ('table', 'index') OR rootpage = 0"
_ELSEWHERE: Final = "--tracking-uri names another store, or `none`"
AddressParts = frozenset[tuple[str, str, str]]
"""Type, name and SQL of parts of a schema."""


def sqlite_file(tracking_uri: str) -> Path | None:
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


def runs_by_itself(file: Path) -> AddressParts:
    """Return the parts of a database's schema that run when others are read or written. Raises: sqlite3.Error."""
    with contextlib.closing(sqlite3.connect(file)) as store:
        return frozenset(store.execute(_RUNS))


def require_schema(file: Path, known: AddressParts) -> None:
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
