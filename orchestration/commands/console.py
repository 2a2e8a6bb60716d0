"""The standard output as the commands use it."""

from __future__ import annotations

from rich.console import Console


def stdout() -> Console:
    """The standard output as a rich console; 240 columns wide if it is no terminal, so that a trial is one line."""
    console = Console()
    return console if console.is_terminal else Console(width=240)
