"""Limits on a run of a sweep, whose sweep it is, and when its trials begin beside others."""

from __future__ import annotations

import getpass
import os
from dataclasses import dataclass
from typing import Final

from dpsweep.accounting.errors import InvalidInput, require_finite, require_whole


@dataclass(frozen=True)
class Limits:
    """Limits at which a run of a sweep stops early, to be continued later; None means no limit.

    `hours`: hours since the run began.
    `trials`: number of trials that it trains.
    `failures`: number of failed trials.
    `gpu_hours`: GPU-hours that its trials hold together.
    """

    hours: float | None = None
    trials: int | None = None
    failures: int | None = None
    gpu_hours: float | None = None

    def __post_init__(self) -> None:
        for unit, most in (("hours", self.hours), ("GPU-hours", self.gpu_hours)):
            if most is not None:
                require_finite(f"the maximum of {unit}", most, above=0.0)
        for what, number in (("the maximum of trials", self.trials), ("the number of failures", self.failures)):
            if number is not None:
                require_whole(what, number, at_least=1)

    def require_use(self, gpus: float) -> None:
        """Raise InvalidInput for a limit on GPU-hours if a trial holds no GPUs."""
        if self.gpu_hours is not None and not gpus:
            raise InvalidInput(
                f"--max-gpu-hours is {self.gpu_hours:g}, but the trials hold no GPU (resources.gpus is 0); use "
                "--max-hours, or give them one"
            )

    def given(self) -> tuple[str, ...]:
        """Return the limits as they are written on the command line.

        >>> Limits(hours=2.5, failures=3).given()
        ('--max-hours 2.5', '--stop-after-failures 3')
        """
        options = (
            ("--max-hours", self.hours),
            ("--max-gpu-hours", self.gpu_hours),
            ("--max-trials", self.trials),
            ("--stop-after-failures", self.failures),
        )
        return tuple(f"{option} {most:g}" for option, most in options if most is not None)


NO_LIMITS: Final = Limits()


@dataclass(frozen=True)
class Spent:
    """Amounts that count towards the limits of a run: seconds, GPU-seconds, and trials that have ended."""

    seconds: float = 0.0
    gpu_seconds: float = 0.0
    trials: int = 0


NOTHING_SPENT: Final = Spent()


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
