"""Parts that commands share: arguments, options, lists of numbers, output."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.records.local_files import UnsafeFile, others_can_write, replace_file
from dpsweep.orchestration.comparison.formats import UNBOUNDED, Fitting, plain_text
from dpsweep.workers.machine.folders import at_home

Folder = Annotated[str, typer.Argument(help="Folder or URI that `dpsweep run` wrote.", metavar="DIR")]
AllowCode = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODULE",
        help="A module or file.py that the sweep may run besides those in its own folder; may be repeated.",
    ),
]
SweepFile = Annotated[Path, typer.Argument(help="The sweep file (YAML).", metavar="SWEEP", readable=False)]
"""Whether it can be read is found when it is, and said in one line."""
Retry = Annotated[
    list[str] | None,
    typer.Option(
        metavar="failed|all|KEY",
        help="Trials to train anew, from nothing, though they have failed or finished; what they have released "
        "stays counted. May be repeated.",
    ),
]
MaxHours = Annotated[
    float | None, typer.Option(help="Stop after this time; the same command continues.", metavar="HOURS")
]
MaxGpuHours = Annotated[
    float | None,
    typer.Option(help="Stop when trials have held GPUs for so long, all together.", metavar="HOURS"),
]
MaxTrials = Annotated[int | None, typer.Option(min=1, help="Train at most this many trials in this run.")]
StopAfterFailures = Annotated[int | None, typer.Option(min=1, help="Stop when this many trials have failed.")]
Until = Annotated[
    Literal["told-apart"] | None,
    typer.Option(help="Add seeds until every method is told from the best; each costs privacy, which is counted."),
]
_MOST_SEEDS: Final = 20
MaxSeeds = Annotated[
    int | None, typer.Option(min=2, help=f"With --until: most seeds of a setting (default: {_MOST_SEEDS}).")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout.")]
TrackingUri = Annotated[
    str | None,
    typer.Option(
        envvar="MLFLOW_TRACKING_URI", help="MLflow (default: a SQLite store in the sweep's folder), or 'none'."
    ),
]

CLUSTER_ADDRESS: Any = typer.Option(
    envvar="RAY_API_SERVER_ADDRESS", metavar="URL", help="The cluster's dashboard, such as http://HEAD:8265."
)

_MOST_NUMBERS = 10_000
"""Longest list of numbers in an option such as --group-size."""


def most_seeds(until: Until, max_seeds: MaxSeeds) -> int | None:
    """Return the number of seeds up to which a run adds them; None for a run that adds none."""
    return None if until is None else max_seeds or _MOST_SEEDS


def whole_numbers(flag: str, text: str, at_least: int) -> list[int]:
    """Return the numbers in a flag such as 1,2,4 or 1..64, each once. Raises: InvalidInput for anything else."""
    numbers: list[int] = []
    for item in map(str.strip, text.split(",")):
        first, dots, last = item.partition("..")
        ends = (first, last) if dots else (first, first)
        if not all(end.isdecimal() and len(end) < 20 for end in ends) or not at_least <= int(ends[0]) <= int(ends[1]):
            raise InvalidInput(
                f"{flag} has {item!r}, but needs whole numbers of at least {at_least}, such as 1,2,4 or 1..64"
            )
        if len(numbers) + int(ends[1]) - int(ends[0]) >= _MOST_NUMBERS:
            raise InvalidInput(f"{flag} has {item!r}: more than {_MOST_NUMBERS} numbers; give fewer")
        numbers += range(int(ends[0]), int(ends[1]) + 1)
    return list(dict.fromkeys(numbers))


def write_file(option: str, path: Path, content: bytes, private: bool) -> None:
    """Write a new file in place of an existing one, under a temporary name first; the mode of its folder stays.

    `private`: only its owner can read it (mode 0600); else its mode is 0644 less the umask, as of other public files. A
    private file goes only into a folder in which nobody else can replace it. Links on the way to the folder are the
    user's own.
    Raises: InvalidInput naming ``option``.
    """
    folder = os.path.realpath(at_home(path).parent)
    try:
        if private and others_can_write(folder):
            raise InvalidInput(
                f"{option} {path} is private, but other users can change {folder}; name a file in a folder that only "
                "you can change, or `chmod go-w` it"
            )
        replace_file(f"{folder}/{path.name}", (content,), private)
    except OSError as error:
        raise InvalidInput(f"{option} {path} cannot be written: {error.strerror}; name another file") from error
    except UnsafeFile as error:
        raise InvalidInput(f"{option} {path} cannot be written: {error}") from error


def warn(sentence: str) -> None:
    """Print a warning to stderr."""
    typer.echo(plain_text(f"warning: {sentence}"), err=True)


_LINE_INTERVAL: Final = 5.0
"""Least seconds between two lines on the progress of one work."""


class Pace:
    """Tells when a line on the progress of a work is due: at most once every `_LINE_INTERVAL` seconds."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def is_due(self) -> bool:
        """Return whether a line is due; it then counts as printed."""
        now = time.monotonic()
        if now < self._last + _LINE_INTERVAL:
            return False
        self._last = now
        return True


def stdout() -> Console:
    """Return the standard output as a rich console."""
    return Console(markup=False)


def show(renderable: RenderableType) -> None:
    """Print tables and text so that words, such as the keys of trials, are never broken.

    On a terminal, text wraps between words, and a table that is too wide is stacked (`Fitting`). Elsewhere each row and
    each text is one line.
    """
    if isinstance(renderable, Group):  # so that a long address widens no table
        for part in renderable.renderables:
            show(part)
        return
    console = stdout()
    shown = Fitting(renderable) if console.is_terminal and isinstance(renderable, Table) else renderable
    needed = Measurement.get(console, console.options.update(width=UNBOUNDED), shown)
    console.width = max(console.width, needed.minimum) if console.is_terminal else max(1, needed.maximum)
    console.print(shown)
