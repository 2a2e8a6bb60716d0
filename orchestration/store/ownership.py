"""Ensures one driver per sweep at a time: a file lock in a local folder, a renewed claim file in an object store.

A file lock ends with its process. Linux passes it on to NFS servers, so it also holds between machines unless the
folder is mounted with ``nolock``. Object stores have no locks: there the driver writes a claim file and renews it. A
second driver waits for the next renewal, and is refused then; without one the claim expires.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial

from dpsweep.accounting.errors import InvalidInput, StorageError
from dpsweep.accounting.records.files import ATTRIBUTES, read_bytes, write_bytes_atomically
from dpsweep.accounting.records.json_text import parsed_json
from dpsweep.accounting.records.local_files import delete_with_only, locked, make_folders, require_replaceable
from dpsweep.orchestration.store.background import end_driver, every
from dpsweep.orchestration.store.layout import LOCK, SweepFiles

PERIOD = 20.0
"""Seconds between two renewals of a claim; a claim expires after three periods without renewal."""


_NO_WORD = (StorageError, InvalidInput)
"""Errors while a claim is renewed: its store is unreachable, as trials report, or it is damaged, and refuses others."""


@dataclass(frozen=True)
class DriverClaim:
    """The claim of the driver that runs a sweep. renewed: seconds since 1970 UTC, or 0 once the driver has ended."""

    token: str
    host: str
    pid: int
    renewed: float


@contextlib.contextmanager
def exclusive(files: SweepFiles) -> Iterator[None]:
    """Keep other drivers off a sweep for the duration of a ``with`` block, by the lock of its local folder and, in an
    object store, by its claim.

    Creates the folder if it is missing. The lock ends with the process. Raises: InvalidInput if another process holds
    it or the folder is not writable; UnsafeFile for a lock that is no regular file; StorageError where the block fails
    for the want of a file and the folder is gone; as `claimed`.
    """
    folder = files.local_folder
    with contextlib.ExitStack() as held:
        try:
            make_folders(str(folder), 0o755)
            require_replaceable(str(folder))
            held.enter_context(locked(str(folder / LOCK)))
        except BlockingIOError as error:
            raise InvalidInput(
                f"another dpsweep writes to {files.root}; wait for it, or choose another --output"
            ) from error
        except OSError as error:
            how = ATTRIBUTES if error.errno == errno.EPERM else "make it writable, or choose another folder"
            raise InvalidInput(f"cannot write to {folder}: {error.strerror}; {how}") from error
        mine = os.stat(folder)
        try:
            with claimed(files.claim) if "://" in files.root else contextlib.nullcontext():
                yield
        except (FileNotFoundError, StorageError) as error:
            is_missing = FileNotFoundError in (type(error), type(error.__cause__))
            if not is_missing or (folder.is_dir() and os.path.samestat(mine, os.stat(folder))):
                raise
            raise StorageError(
                f"{folder} was removed or moved while dpsweep wrote to it; put it back in place of what is there now, "
                "and run the same command again"
            ) from error
        finally:
            with contextlib.suppress(FileNotFoundError):  # the folder is gone
                delete_with_only(str(folder), LOCK)  # nothing else is there if the run could not start


@contextlib.contextmanager
def claimed(uri: str, period: float = PERIOD) -> Iterator[None]:
    """Hold the claim at ``uri``, in an object store, for the duration of a ``with`` block.

    Guarantee: if the clocks of two drivers differ by less than two periods, the later driver is refused. If the clocks
    differ by more, or both start within a second, the earlier driver may be replaced; it notices at its next renewal
    and gets SIGTERM. Until then both write, and shards that differ are refused. This requires a store with strong
    read-after-write consistency, such as S3 and GCS.

    The next renewal shows whether a driver lives. A claim that is not renewed for three periods is taken over.

    period: seconds between renewals. Raises: InvalidInput when another driver renews its claim.
    """
    mine = DriverClaim(secrets.token_hex(8), socket.gethostname(), os.getpid(), time.time())
    while True:
        _await_free(uri, period)
        _write(uri, replace(mine, renewed=time.time()))
        time.sleep(min(1.0, period / 4.0))
        if _is_ours(uri, mine):  # and not of one that found it free at the same time
            break
    try:
        with every(period, partial(_renew, uri, mine)):
            yield
    finally:
        with contextlib.suppress(*_NO_WORD):
            if _is_ours(uri, mine):
                _write(uri, replace(mine, renewed=0.0))


def _await_free(uri: str, period: float) -> None:
    """Return once there is no claim, or one that was not renewed for three periods. Raises: InvalidInput for a renewed
    one.
    """
    found = _read(uri)
    if found is None:
        return
    age = max(time.time() - found.renewed, 0.0)  # a claim from the future, by a wrong clock or forged, is watched too
    free = time.monotonic() + 3.0 * period - age
    if age < 3.0 * period:
        said = f"a driver of {uri.rpartition('/')[0]} was heard of {age:.0f} s ago"
        print(f"warning: {said}; waiting up to {3.0 * period - age:.0f} s for another sign of it", file=sys.stderr)
    while time.monotonic() < free:
        time.sleep(min(2.0, period / 4.0))
        now = _read(uri)
        if now is None or now.renewed == 0.0:
            return
        if now != found:
            raise InvalidInput(
                f"another dpsweep drives {uri.rpartition('/')[0]}: process {now.pid} on {now.host}; wait for it, or "
                "choose another --output"
            )


def _renew(uri: str, mine: DriverClaim, over: threading.Event) -> None:
    with contextlib.suppress(*_NO_WORD):
        if not _is_ours(uri, mine):
            over.set()
            end_driver(f"another dpsweep has taken over {uri.rpartition('/')[0]}; this one ends")
        else:
            _write(uri, replace(mine, renewed=time.time()))


def _is_ours(uri: str, mine: DriverClaim) -> bool:
    found = _read(uri)
    return found is None or found.token == mine.token


def _read(uri: str) -> DriverClaim | None:
    """Return the claim, if there is one. It is read twice if it seems damaged, as it is cut if it is replaced
    meanwhile.
    """
    try:
        with contextlib.suppress(ValueError, TypeError):
            return DriverClaim(**parsed_json(read_bytes(uri)))
        return DriverClaim(**parsed_json(read_bytes(uri)))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise InvalidInput(f"{uri} is damaged; delete it when no dpsweep is running there") from error


def _write(uri: str, claim: DriverClaim) -> None:
    write_bytes_atomically(uri, json.dumps(asdict(claim)).encode())
