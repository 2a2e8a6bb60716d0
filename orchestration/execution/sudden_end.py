"""Say on stderr that this process was ended by force, and what to do next.

Ray ends a driver at once, without a word and without running any of its code, when it loses the node or the head that
the driver is connected to. Only another process can tell the user then.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Final

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
