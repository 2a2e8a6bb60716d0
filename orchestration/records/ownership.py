"""One driver at a time: a folder is locked, and in an object store, which has no locks, a claim is renewed.

A lock ends with its process, and Linux passes such locks on to NFS servers, so they hold between machines unless the
folder is mounted with ``nolock``. A claim is a file that its owner renews and others respect.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from accounting.errors import InvalidInput, StorageError
from accounting.records.files import read_bytes, write_bytes_atomically

_LOCK = ".lock"
PERIOD = 20.0
"""Seconds between two renewals; a claim that is three times as old is taken over."""


@dataclass(frozen=True)
class Claim:
    """Who drives the sweep; ``renewed`` in seconds since 1970 UTC, 0 when given up."""

    token: str
    host: str
    pid: int
    renewed: float


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold ``folder`` for the length of a ``with`` block; made if it is not there. The lock ends with the process.

    Raises: InvalidInput when another process holds it, and when it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / _LOCK).open("w")
    except OSError as error:
        raise InvalidInput(
            f"cannot write to {folder}: {error.strerror}; choose another folder with --output"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InvalidInput(
                f"another dpsweep is running in {folder}; wait for it, or choose another folder with --output"
            ) from error
        try:
            yield
        finally:
            _remove_unused(folder)


def _remove_unused(folder: Path) -> None:
    """A run that could not start leaves no folder behind."""
    if [entry.name for entry in folder.iterdir()] == [_LOCK]:
        (folder / _LOCK).unlink()
        folder.rmdir()


@contextlib.contextmanager
def claimed(uri: str, period: float = PERIOD) -> Iterator[None]:
    """Hold the claim at ``uri`` for the length of a ``with`` block; on a path there is nothing to hold.

    Guarantee: of two drivers whose clocks differ by less than two periods, the later is refused. With clocks further
    apart, or when both start within a second, the earlier may learn of it only at its next renewal, and gets SIGTERM;
    until then both write, and shards that differ are refused. Rests on stores that show a write to all readers at once,
    as S3 and GCS do.

    Raises: InvalidInput while another driver renews its claim.
    """
    if "://" not in uri:
        yield
        return
    mine = Claim(secrets.token_hex(8), socket.gethostname(), os.getpid(), time.time())
    _require_free(uri, _read(uri), mine, period)
    _write(uri, mine)
    time.sleep(min(1.0, period / 4.0))
    _require_free(uri, _read(uri), mine, period)
    ended = threading.Event()
    renewal = threading.Thread(target=_renew, args=(uri, mine, period, ended), daemon=True)
    renewal.start()
    try:
        yield
    finally:
        ended.set()
        renewal.join()
        with contextlib.suppress(StorageError):
            if _is_ours(uri, mine):
                _write(uri, replace(mine, renewed=0.0))


def _require_free(uri: str, found: Claim | None, mine: Claim, period: float) -> None:
    if found is None or found.token == mine.token:
        return
    age = time.time() - found.renewed
    if age < 3.0 * period:
        raise InvalidInput(
            f"another dpsweep drives {uri.rpartition('/')[0]}: process {found.pid} on {found.host}, heard of "
            f"{max(age, 0.0):.0f} s ago; wait for it, or choose another --output. When its driver is lost, a sweep is "
            f"free after {3.0 * period:.0f} s"
        )


def _renew(uri: str, mine: Claim, period: float, ended: threading.Event) -> None:
    while not ended.wait(period):
        with contextlib.suppress(StorageError):  # a store out of reach for a while: trials notice by themselves
            if not _is_ours(uri, mine):
                print(f"error: another dpsweep has taken over {uri.rpartition('/')[0]}; this one ends", file=sys.stderr)
                # not SIGINT, which whoever was started in the background of a script ignores
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
                return
            _write(uri, replace(mine, renewed=time.time()))


def _is_ours(uri: str, mine: Claim) -> bool:
    found = _read(uri)
    return found is None or found.token == mine.token


def _read(uri: str) -> Claim | None:
    try:
        return Claim(**json.loads(read_bytes(uri)))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise InvalidInput(f"{uri} is damaged; delete it when no dpsweep is running there") from error


def _write(uri: str, claim: Claim) -> None:
    write_bytes_atomically(uri, json.dumps(asdict(claim)).encode())
