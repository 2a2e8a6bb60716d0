"""Live progress of a sweep on a terminal, and plain lines where there is none."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from orchestration.comparison.formats import clock, number, percent, seconds
from orchestration.records.status import SweepStatus, TrialStatus

_STYLES = {"finished": "green", "failed": "red", "stopped": "yellow", "accounting": "cyan", "training": "bold"}
_SHOWN_AT_ONCE = 12


@contextlib.contextmanager
def watching(console: Console, status: SweepStatus) -> Iterator[None]:
    """Keep the terminal up to date for the length of a ``with`` block. Without a terminal, only `announce` prints."""
    if not console.is_terminal:
        yield
        return
    with Live(console=console, get_renderable=lambda: _picture(status), refresh_per_second=2, transient=True):
        yield


def announcer(console: Console) -> Callable[[TrialStatus], None]:
    """Prints one line for each trial that ends."""
    return lambda trial: console.print(_line(trial), highlight=False, soft_wrap=True)


def _line(trial: TrialStatus) -> Text:
    took = (trial.ended or 0.0) - (trial.started or 0.0)
    found = f"accuracy {percent(trial.accuracy)}, epsilon {_epsilon(trial.epsilon)}, {seconds(took)}"
    text = trial.error if trial.state == "failed" and trial.error else found
    return Text.assemble((f"{trial.state:9}", _STYLES[trial.state]), f" {trial.key}: {text}")


def _picture(status: SweepStatus) -> RenderableType:
    counts, trials = status.counts(), status.trials
    ended = sum(counts.get(state, 0) for state in ("finished", "failed", "stopped"))
    left = status.seconds_left()
    headline = (
        f"{ended} of {len(trials)} trials done, {counts.get('training', 0) + counts.get('accounting', 0)} running, "
        f"{counts.get('failed', 0)} failed; {clock(status.elapsed)} elapsed, "
        f"{clock(left) if left is not None else '?'} to finish"
    )
    running = [trial for trial in trials if trial.state in ("training", "accounting")]
    return Group(Text(headline, style="bold"), *([_running(running)] if running else []))


def _running(trials: Sequence[TrialStatus]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("trial", "progress", "step", "epsilon so far", "test accuracy", ""):
        table.add_column(column, header_style="dim", no_wrap=column != "trial", overflow="fold")
    for trial in trials[:_SHOWN_AT_ONCE]:
        table.add_row(
            trial.key,
            ProgressBar(total=trial.total_steps, completed=trial.step, width=24),
            f"{trial.step}/{trial.total_steps}",
            _epsilon(trial.epsilon),
            percent(trial.accuracy),
            "accounting" if trial.state == "accounting" else "",
        )
    return table


def _epsilon(value: float | None) -> str:
    return "none (not private)" if value == math.inf else number(value)
