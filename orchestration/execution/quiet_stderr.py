"""Keep single lines of compiled code off this process's stderr."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import Final

_DRAINED_WITHIN: Final = 1.0
"""Seconds to wait for the last lines, where a child process still holds the other end."""


@contextlib.contextmanager
def stderr_without(text: bytes) -> Iterator[None]:
    """Leave out the lines with ``text`` that this process writes to stderr during a ``with`` block.

    Other lines are passed on as they come, so that those before a crash of the process are seen.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    reader, writer = os.pipe()
    os.dup2(writer, 2)
    os.close(writer)
    passing = threading.Thread(target=_pass_on, args=(reader, kept, text), daemon=True)
    passing.start()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        passing.join(_DRAINED_WITHIN)


def _pass_on(reader: int, kept: int, text: bytes) -> None:
    with open(reader, "rb") as lines, open(kept, "wb", buffering=0) as stderr:
        for line in lines:
            if text not in line:
                stderr.write(line)
