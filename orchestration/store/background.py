"""Threads beside a run: calls at intervals, and the end of a run that a thread asks for."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def every(period: float, look: Callable[[threading.Event], None], patience: float | None = None) -> Iterator[None]:
    """Call ``look`` in a thread, each time after a pause of ``period`` seconds, for the duration of a ``with`` block.

    It gets an event that is set once the block has ended; setting it ends the calls. patience: seconds to wait, at the
    end, for a call that goes on; None for as long as it takes.
    """
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(period):
            look(over)

    thread = threading.Thread(target=repeat, name="dpsweep-every", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(patience)


def end_driver(why: str) -> None:
    """Print an error, and end this process's run as Ctrl-C would; for threads that learn why it cannot go on."""
    print(f"error: {why}", file=sys.stderr)
    # a command handles SIGTERM; a process started in the background of a script ignores SIGINT
    is_command = signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM if is_command else signal.SIGINT)
