"""The folder of an embedded Ray's session: its sockets, its logs, and what its workers print.

Ray lets everyone write its folders, and keeps them in ``ray`` below the folder for temporary files, for all users and
for ever. Here they lie inside a new folder that only its owner can enter, and go with it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from accounting.errors import InvalidInput

_VARIABLE = "RAY_TMPDIR"
"""Where Ray and its workers put all their files; unset, in TMPDIR."""
_PREFIX = "dps-"
_SOCKET = f"{_PREFIX}12345678/ray/session_2026-01-31_12-00-00_123456_4194304/sockets/plasma_store"
_LONGEST = 107 - len(f"/{_SOCKET}")
"""Bytes of the longest path with room for Ray's sockets below it: the path of a socket has at most 107."""
_SHORT = "/tmp"
"""Where the folder is made if ``TMPDIR`` is too long or cannot be used."""
_PATIENCE = 10.0
"""Seconds to wait for the last processes of a session that was shut down."""


@contextlib.contextmanager
def private_session() -> Iterator[None]:
    """Ray started in this ``with`` block keeps its files in a new folder of mode 0700, which is removed with the block.

    The folder is made in ``RAY_TMPDIR``; where that is not set, in the first that serves of the folder for temporary
    files, ``/tmp`` and ``XDG_RUNTIME_DIR``. Those that killed drivers of this user left there are removed, too, once
    their processes are gone. Raises: InvalidInput where no folder can be made.
    """
    given = os.environ.get(_VARIABLE)
    folder, lock = _make_in_first([given] if given else _usual_places())
    os.environ[_VARIABLE] = str(folder)
    try:
        yield
    finally:
        if given is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = given
        _end_processes(folder)
        os.close(lock)
        _remove_abandoned(folder.parent)


def _usual_places() -> list[str]:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return list(dict.fromkeys(filter(None, (tempfile.gettempdir(), _SHORT, runtime))))


def _make_in_first(places: Sequence[str]) -> tuple[Path, int]:
    """`_make` in the first of ``places`` where that can be done."""
    reasons = []
    for base in (Path(place).absolute() for place in places):
        _remove_abandoned(base)
        try:
            return _make(base)
        except OSError as error:
            reasons.append(f"in {base}: {error.strerror}")
    raise InvalidInput(
        f"cannot make a folder for Ray {', '.join(reasons)}; set {_VARIABLE} to a local folder that you can write, "
        f"such as {_SHORT}, with a path of at most {_LONGEST} bytes"
    )


def _make(base: Path) -> tuple[Path, int]:
    """A new folder, and the handle that locks it for as long as this process lives or until it is closed.

    Raises: OSError where ``base`` cannot be written, or its path is too long.
    """
    length = len(os.fsencode(base))
    if length > _LONGEST:
        raise OSError(errno.ENAMETOOLONG, f"a path of {length} bytes, but Ray's sockets leave room for {_LONGEST}")
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        with contextlib.suppress(BlockingIOError, FileNotFoundError):  # another start took it for abandoned
            lock = _lock(folder)
            if folder.exists():
                return folder, lock
            os.close(lock)


def _lock(folder: Path) -> int:
    """A handle that locks a folder of this user's; `OSError` for a link, another user's, and one that is locked."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(handle).st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "it belongs to another user")
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle


def _remove_abandoned(base: Path) -> None:
    """Remove this user's folders that neither a driver nor any other process of its session uses."""
    for name in glob.glob(f"{_PREFIX}????????", root_dir=base):
        folder = base / name
        with contextlib.suppress(OSError):
            lock = _lock(folder)
            try:
                if not _users(folder):
                    shutil.rmtree(folder)
            finally:
                os.close(lock)


def _end_processes(folder: Path) -> None:
    """End what a shutdown left of this process's session: Ray forgets what it started when its start is interrupted."""
    deadline = time.monotonic() + _PATIENCE
    while (users := _users(folder)) and time.monotonic() < deadline:
        session = [pid for pid in users if _parent(pid) in users | {os.getpid()}]
        for pid in session:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _users(folder: Path) -> set[int]:
    """Other processes that have a file open in the folder, as each of a session has its log."""
    inside, found = f"{folder.resolve()}/", set()
    for handle in glob.iglob("/proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(handle).startswith(inside):
                found.add(int(handle.split("/")[2]))
    return found - {os.getpid()}


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None
