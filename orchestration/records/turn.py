"""Whose sweep it is, and when its trials begin beside other sweeps on the same cluster."""

from __future__ import annotations

import getpass
import os
from dataclasses import dataclass
from typing import Final

from dpsweep.accounting.errors import require_whole


def this_user() -> str:
    """Return the name of the user that runs this process; its number where it has no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


@dataclass(frozen=True)
class Turn:
    """The place of a sweep among the sweeps of a running cluster.

    `priority`: trials of a sweep with a higher one begin first. `most`: trials of all the owner's sweeps that may train
    at once, as far as this sweep begins any; None for as many as fit. `submitted`: seconds since 1970 UTC. The owner is
    empty where none was named.
    """

    owner: str = ""
    priority: int = 0
    most: int | None = None
    submitted: float = 0.0

    def __post_init__(self) -> None:
        require_whole("--priority", self.priority, at_least=-1000, at_most=1000)
        if self.most is not None:
            require_whole("--max-concurrent", self.most, at_least=1)


FIRST_COME: Final = Turn()
"""The turn of a sweep for which none was asked: Ray places its trials as they come."""
