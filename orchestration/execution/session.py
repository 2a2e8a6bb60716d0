"""The session folder of an embedded Ray: its sockets, its logs, the output of its workers, and data they share.

By default, Ray keeps the sessions of all users in a world-writable folder ``ray`` below the temporary folder and never
removes them. Here, each session gets a new folder of mode 0700, which is removed when the session ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.machine.folders import NODE_FOLDER

_VARIABLE = "RAY_TMPDIR"
"""Environment variable with the folder for all files of Ray and its workers; the default is TMPDIR."""
_PREFIX = "dps-"
_SOCKET = f"{_PREFIX}12345678/ray/session_2026-01-31_12-00-00_123456_4194304/sockets/plasma_store"
_LONGEST = 107 - len(f"/{_SOCKET}")
"""Longest parent folder, in bytes, that keeps the paths of Ray's sockets within Linux's limit of 107 bytes."""
_ROOM: Final = 64 * 2**20
"""Bytes that are free where a session begins: Ray waits in vain for processes that cannot write their logs."""
_SHORT = "/tmp"
"""Parent of the folder if the path of ``TMPDIR`` is too long or not writable."""
_open: Final[list[Path]] = []
"""The folders of this process's sessions."""
_EXIT_TIMEOUT = 10.0
"""Seconds to wait for the last processes of a session after its shutdown."""


@contextlib.contextmanager
def private_session() -> Iterator[None]:
    """Give a Ray started in this ``with`` block a new folder of mode 0700, which is removed when the block ends.

    The folder is made in ``RAY_TMPDIR`` if that is set, else in the first usable one of the temporary folder, ``/tmp``
    and ``XDG_RUNTIME_DIR``. Folders left there by killed drivers of this user are removed too, once their processes
    are gone. Raises: InvalidInput if no folder can be made.
    """
    given = os.environ.get(_VARIABLE)
    folder, lock = _make_in_first([given] if given else _usual_places())
    _open.append(folder)
    try:
        with _set(_VARIABLE, folder), _set(NODE_FOLDER, folder / "data"):
            yield
    finally:
        _end_processes(folder)
        os.close(lock)
        _remove_abandoned(folder.parent)
        _open.remove(folder)


_LEFT: Final = b"left"
_WATCH: Final = f"""
import sys
if sys.stdin.buffer.read() != {_LEFT!r}:
    print(sys.argv[1], file=sys.stderr)
"""
_watches: Final[list[subprocess.Popen[bytes]]] = []
"""The processes that watch this one."""


@contextlib.contextmanager
def told_if_killed(text: str) -> Iterator[None]:
    """Print ``text`` on stderr if this process ends during the ``with`` block without leaving it.

    A small process waits for that, in its own session, so that Ctrl-C and a closed terminal leave it alone.
    """
    command = [sys.executable, "-I", "-S", "-c", _WATCH, text]
    watch = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    _watches.append(watch)
    try:
        yield
    finally:
        _watches.remove(watch)
        with contextlib.suppress(BrokenPipeError):
            watch.communicate(_LEFT)


def remove_sessions() -> None:
    """End the processes of the sessions of this process, and remove their folders: it is about to end by force, and
    has said so.
    """
    for watch in tuple(_watches):
        with contextlib.suppress(OSError, ValueError):
            os.write(watch.stdin.fileno() if watch.stdin else -1, _LEFT)
    for folder in tuple(_open):
        _end_processes(folder)
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _set(variable: str, folder: Path) -> Iterator[None]:
    """Set an environment variable for the duration of a ``with`` block, and restore its value."""
    given = os.environ.get(variable)
    os.environ[variable] = str(folder)
    try:
        yield
    finally:
        if given is None:
            del os.environ[variable]
        else:
            os.environ[variable] = given


def _usual_places() -> list[str]:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return list(dict.fromkeys(filter(None, (tempfile.gettempdir(), _SHORT, runtime))))


def _make_in_first(places: Sequence[str]) -> tuple[Path, int]:
    """`_make` in the first of ``places`` that allows it."""
    reasons = []
    for base in (Path(place).absolute() for place in places):
        _remove_abandoned(base)
        try:
            return _make(base)
        except OSError as error:
            reasons.append(f"in {base}: {error.strerror}")
    raise InvalidInput(
        f"cannot make a folder for Ray {', '.join(reasons)}; set {_VARIABLE} to a local folder that you can write, "
        f"such as {_SHORT}, with a path of at most {_LONGEST} bytes and {_ROOM / 2**20:.0f} MiB of room"
    )


def _make(base: Path) -> tuple[Path, int]:
    """Return a new folder, and a file descriptor that locks it until it is closed or the process ends.

    Raises: OSError if ``base`` is not writable, has too little room, or its path is too long.
    """
    length = len(os.fsencode(base))
    if length > _LONGEST:
        raise OSError(errno.ENAMETOOLONG, f"a path of {length} bytes, but Ray's sockets leave room for {_LONGEST}")
    free = shutil.disk_usage(base).free
    if free < _ROOM:
        raise OSError(errno.ENOSPC, f"{free / 2**20:.0f} MiB are free, but Ray needs {_ROOM / 2**20:.0f} MiB")
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        with contextlib.suppress(BlockingIOError, FileNotFoundError):  # removed or locked by another driver
            lock = _lock(folder)
            if folder.exists():
                return folder, lock
            os.close(lock)


def _lock(folder: Path) -> int:
    """Return a file descriptor that locks a folder. Raises: OSError for a link, another user's folder, and a locked
    one.
    """
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
    """Remove this user's session folders that no driver and no process of a session uses."""
    for name in glob.glob(f"{_PREFIX}????????", root_dir=base):
        folder = base / name
        with contextlib.suppress(OSError):
            lock = _lock(folder)
            try:
                if not _pids_using(folder):
                    shutil.rmtree(folder)
            finally:
                os.close(lock)


def _end_processes(folder: Path) -> None:
    """Kill the processes of this session that survived ray.shutdown(), as happens if Ray's start was interrupted."""
    deadline = time.monotonic() + _EXIT_TIMEOUT
    while (pids := _pids_using(folder)) and time.monotonic() < deadline:
        session = [pid for pid in pids if _parent(pid) in pids | {os.getpid()}]
        for pid in session:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _pids_using(folder: Path) -> set[int]:
    """Other processes with an open file in the folder; every process of a session keeps its log open."""
    inside, found = f"{folder.resolve()}/", set()
    for handle in glob.iglob("/proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(handle).startswith(inside):
                found.add(int(handle.split("/")[2]))
    return found - {os.getpid()}


def _parent(pid: int) -> int | None:
    try:
        return int(
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1]
        )
    except OSError:
        return None
