"""Keep lines of compiled code off this process's stderr, and say there when the process was ended by force.

Say on stderr that this process was ended by force, and what to do next. Ray ends a driver at once, without a word and
without running any of its code, when it loses the node or the head that the driver is connected to. Only another
process can tell the user then.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
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


_LEFT: Final = b"left"
_WATCH: Final = f"""
import sys
if sys.stdin.buffer.read() != {_LEFT!r}:
    print(sys.argv[1], file=sys.stderr)
"""


@contextlib.contextmanager
def told_if_killed(text: str) -> Iterator[None]:
    """Print ``text`` on stderr if this process ends during the ``with`` block without leaving it.

    A small process waits for that, in its own session, so that Ctrl-C and a closed terminal leave it alone.
    """
    command = [sys.executable, "-I", "-S", "-c", _WATCH, text]
    watch = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        yield
    finally:
        with contextlib.suppress(BrokenPipeError):
            watch.communicate(_LEFT)
