"""One run at a time in a sweep's folder."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from accounting.errors import InvalidInput

_NAME = ".lock"


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold ``folder`` for the length of a ``with`` block; made if it is not there. The lock ends with the process.

    Raises: InvalidInput when another process holds it, and when it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / _NAME).open("w")
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
    if [entry.name for entry in folder.iterdir()] == [_NAME]:
        (folder / _NAME).unlink()
        folder.rmdir()
