"""Show the progress of a sweep: live on a terminal, otherwise one line per event."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dpsweep.accounting.errors import count_of
from dpsweep.orchestration.comparison.formats import (
    Fitting,
    at_most,
    clock,
    dim_table,
    for_terminal,
    no_progress,
    per_unit,
    plain_text,
    print_line,
    seconds,
)
from dpsweep.orchestration.comparison.metrics import measured
from dpsweep.orchestration.store.background import every
from dpsweep.orchestration.store.published import TrialState
from dpsweep.orchestration.store.status import SweepStatus, TrialStatus

_SHOWN_AT_ONCE = 12
_LINE_INTERVAL = 10.0
"""Seconds between two lines on the recording in MLflow, where the output is no terminal."""
IF_IT_HANGS: Final = "if its process hangs, end it, and the trial continues from its checkpoint"


class ConsoleDisplay:
    """A `pipeline.stage.Display`: live progress on a terminal, and one line per event where there is none."""

    def __init__(self, console: Console, worded: Callable[[str], str] = str) -> None:
        """worded: rewords warnings."""
        self._console, self._worded = console, worded
        self._status: SweepStatus | None = None
        self._told = ""
        self._quiet = set[str]()

    def missing_in_mlflow(self) -> str:
        """Return what of the sweep that was watched last is not recorded; "" if nothing is missing, or trials are
        left.
        """
        recording = self._status.recording if self._status else None
        return for_terminal(recording.missing()) if recording else ""

    def warn(self, message: str) -> None:
        print_line(self._console, f"warning: {self._worded(message)}", "yellow")

    def ended(self, trial: TrialStatus) -> None:
        print_line(self._console, _line(trial))

    @contextlib.contextmanager
    def watching(self, status: SweepStatus) -> Iterator[None]:
        self._status = status

        def tell(over: threading.Event) -> None:
            for trial in status.trials:
                quiet = status.quiet(trial.key)
                if quiet is not None and trial.key not in self._quiet:
                    self.warn(f"{trial.key}: {no_progress(quiet)}; {IF_IT_HANGS}")
                (self._quiet.discard if quiet is None else self._quiet.add)(trial.key)
            recording = status.recording
            line = recording.line() if recording is not None and recording.goes_on else ""
            if line and line != self._told:  # the same again while MLflow is silent tells nothing
                self._console.print(plain_text(line), soft_wrap=True)
            self._told = line

        if not self._console.is_terminal:
            with every(_LINE_INTERVAL, tell):
                yield
            return
        with Live(console=self._console, get_renderable=lambda: _picture(status), refresh_per_second=2, transient=True):
            yield


def _line(trial: TrialStatus) -> Text:
    took = (trial.trained or trial.ended or 0.0) - (trial.started or 0.0)
    if trial.result is not None:  # of training, as in tables and results; an earlier driver may have trained it
        took = trial.result.ended - trial.result.started
    claim = f"epsilon {_epsilon(trial.epsilon)}{per_unit(trial.unit)}{' (estimate)' * bool(trial.reasons)}"
    found = f"{measured(trial.accuracy, trial.scores)}, {claim}, {seconds(took)}"
    text = trial.error if trial.state is TrialState.FAILED and trial.error else found
    return plain_text(f"{trial.state:9}", trial.state.style) + plain_text(f" {trial.key}: {text}")


def _picture(status: SweepStatus) -> RenderableType:
    counts, trials, recording = status.counts(), status.trials, status.recording
    if recording is not None and recording.goes_on:
        return plain_text(f"{count_of(len(trials), 'trial')} done; {recording.line()}", "bold")
    ended = sum(trial.state.has_ended for trial in trials)
    left = status.seconds_left()
    headline = (
        f"{ended} of {len(trials)} trials done, {sum(trial.state.is_running for trial in trials)} running, "
        f"{counts.get(TrialState.FAILED, 0)} failed; {clock(status.elapsed)} elapsed, "
        f"{clock(left) if left is not None else '?'} to finish"
    )
    running = [trial for trial in trials if trial.state.is_running]
    return Group(plain_text(headline, "bold"), *([Fitting(_running(running, status.quiet))] if running else []))


def _running(trials: Sequence[TrialStatus], quiet: Callable[[str], float | None]) -> Table:
    table = dim_table("trial", "progress", "step", "epsilon so far", "on test data", "")
    for trial in trials[:_SHOWN_AT_ONCE]:
        table.add_row(
            trial.key,
            ProgressBar(total=trial.total_steps, completed=trial.step, width=24),
            f"{trial.step}/{trial.total_steps}",
            _epsilon(trial.epsilon),
            measured(trial.accuracy, trial.scores),
            ", ".join(
                filter(None, ("accounting" * (trial.state is TrialState.ACCOUNTING), no_progress(quiet(trial.key))))
            ),
        )
    return table


def _epsilon(value: float | None) -> str:
    return "none (not private)" if value == math.inf else at_most(value)
