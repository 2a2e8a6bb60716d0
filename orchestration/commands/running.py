"""Run a sweep, print its outcome and exit, also by a signal.

`dpsweep run` and the driver of a submitted sweep share this.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Final, NoReturn

import typer
from rich.console import Console

from dpsweep.orchestration.comparison.formats import for_terminal
from dpsweep.orchestration.execution.session import remove_sessions

if TYPE_CHECKING:
    from dpsweep.orchestration.pipeline import Outcome, RunRequest

_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command like Ctrl-C: those of `kill` and of a terminal that closes."""
WITHIN: Final = 4.0
"""Seconds in which a command ends after one of these signals, by itself or by force.

By force is as by SIGKILL, but for Ray's folder, which goes too: workers end with their driver, and the next run ends
MLflow's runs.
"""
INTERRUPTED: Final = 130
"""Exit code of a command that was interrupted."""


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt, and end this process if it goes on.

    Once a signal came, the process ends with this context and takes no interpreter apart: that takes seconds where
    torch is loaded, and waits for every thread. An ignored signal, such as SIGHUP under nohup, stays ignored.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    ended = threading.Event()
    handled = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    handlers = {number: signal.signal(number, _interrupt) for number in handled}
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_end_late, args=(reader, ended), name="dpsweep-ending", daemon=True).start()
    try:
        with _interrupted_again(handled):
            yield
    except SystemExit as end:
        if _came(handled):
            _leave(end.code if isinstance(end.code, int) else 1)
        raise
    finally:
        if not _came(handled):  # else another must not disturb the end, which is still to come within the time
            ended.set()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        signal.set_wakeup_fd(before)
        os.close(writer)


@contextlib.contextmanager
def _interrupted_again(handled: Sequence[signal.Signals]) -> Iterator[None]:
    """Interrupt once more after a callback that may raise nothing, such as one of Python's imports, was interrupted."""
    before = sys.unraisablehook

    def seen(found: sys.UnraisableHookArgs) -> None:
        if not issubclass(found.exc_type, KeyboardInterrupt) or not _came(handled):
            before(found)
            return
        for number in handled:
            signal.signal(number, _interrupt)
        threading.Timer(_SOON, os.kill, (os.getpid(), handled[0])).start()

    sys.unraisablehook = seen
    try:
        yield
    finally:
        sys.unraisablehook = before


_SOON: Final = 0.01
"""Seconds after which the callback is over."""


def _came(handled: Sequence[signal.Signals]) -> bool:
    """Return whether one of the signals came: since then all are ignored."""
    return any(signal.getsignal(number) is signal.SIG_IGN for number in handled)


def _leave(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # its reader is gone, or it is closed
            stream.flush()
    os._exit(code)


def _interrupt(number: int, frame: FrameType | None) -> None:
    for each in _SIGNALS:  # a terminal and its shell both send one; the second must not interrupt the cleanup
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def _end_late(reader: int, ended: threading.Event) -> None:
    """End this process by force if a signal has not ended it in time."""
    while numbers := os.read(reader, 64):  # nothing once the other end is closed
        if not set(_SIGNALS).isdisjoint(numbers) and not ended.wait(WITHIN):
            os.write(2, b"ended by force, as it did not end by itself; every file is whole, old or new\n")
            with contextlib.suppress(OSError):
                remove_sessions()
            os._exit(INTERRUPTED)
    os.close(reader)


NOT_RECORDED: Final = 3
"""Exit code if all results are on disk, and not all of them in MLflow."""


def run_to_the_end(request: RunRequest, as_json: bool) -> NoReturn:
    """Run the sweep and exit: with 0, with 1 if a trial failed, 3 if MLflow lacks records, 130 when interrupted."""
    from dpsweep.orchestration.pipeline import ConsoleDisplay, run_sweep

    display = ConsoleDisplay(Console(stderr=True))
    try:
        outcome = run_sweep(request, display)
    except KeyboardInterrupt:
        missing = display.missing_in_mlflow()
        print(f"interrupted; {missing or 'the same command continues where it stopped'}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    show_outcome(outcome, as_json)
    if outcome.recording and (missing := outcome.recording.missing()):
        print(for_terminal(f"error: {missing}"), file=sys.stderr)
        raise typer.Exit(NOT_RECORDED)
    raise typer.Exit(1 if outcome.record.failed else 0)


def show_outcome(outcome: Outcome, as_json: bool) -> None:
    """Print the outcome to stdout, as tables or as one JSON object."""
    from dpsweep.orchestration.commands.printed_tables import outcome_object, print_outcome

    if as_json:
        print_json(outcome_object(outcome))
    else:
        print_outcome(outcome)


def print_json(value: object) -> None:
    """Print ``value`` as indented JSON. Raises: ValueError for NaN and infinities."""
    print(json.dumps(value, indent=2, allow_nan=False))
