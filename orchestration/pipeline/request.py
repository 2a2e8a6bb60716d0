"""The request for a run, its outcome, and the way its progress is shown."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from dpsweep.orchestration.comparison.record import SweepRecord
from dpsweep.orchestration.execution.environment import EMBEDDED
from dpsweep.orchestration.records.layout import SweepFiles, output_files
from dpsweep.orchestration.records.limits import FIRST_COME, NO_LIMITS, Limits, Turn
from dpsweep.orchestration.records.status import Recording, SweepStatus, TrialStatus
from dpsweep.orchestration.sweeps.schema import SweepSpec
from dpsweep.workers.own_code.imports import NO_CODE, UserCode


@dataclass(frozen=True)
class Outcome:
    """The record of a run, its files and its MLflow store, which may be `NO_TRACKING`.

    `seconds`: duration of the run. `stopped`: the limit that ended the run early, else None. `recording`: in MLflow,
    which may be incomplete; None without MLflow. `decision`: what to take, in sentences, as its report says.
    """

    record: SweepRecord
    files: SweepFiles
    tracking_uri: str
    seconds: float
    stopped: str | None = None
    recording: Recording | None = None
    decision: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunRequest:
    """A sweep to run, and where.

    `text`: content of the sweep file. `output`: folder or URI; None for runs/NAME. `address`: ``--address``.
    `tracking_uri`: None for the SQLite store in the sweep's folder, `NO_TRACKING` for none. `code`: the user's own
    modules that may be imported. `limits`: when the run stops early. `retry`: trials to train again from nothing:
    ``failed``, ``all``, keys or unique prefixes of keys; ignored by a driver that its job has restarted, which
    continues within the same limits. `sources`: folders of sweeps whose finished trials are copied instead of training
    them. `turn`: the place of the sweep among those that share a running cluster. `name`: of the sweep in MLflow; by
    default that of the sweep file, or the one that an earlier run of the folder was given. `most_seeds`: add seeds, up
    to this number, until settings can be told apart (`dpsweep.orchestration.pipeline.run`); None for the seeds of the
    file. `submitted_from`: `places` on the machine that submitted the sweep, if another one did.
    """

    sweep: SweepSpec
    text: str
    output: str | None = None
    address: str = EMBEDDED
    tracking_uri: str | None = None
    code: UserCode = NO_CODE
    limits: Limits = NO_LIMITS
    retry: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    turn: Turn = FIRST_COME
    name: str | None = None
    most_seeds: int | None = None
    submitted_from: Mapping[str, str] | None = None

    @property
    def places(self) -> Mapping[str, str]:
        """Return where the user's own modules were read, as `UserCode.places`."""
        return self.code.places if self.submitted_from is None else self.submitted_from

    @functools.cached_property
    def files(self) -> SweepFiles:
        """Paths of the files of the sweep; its folder is looked at once."""
        return output_files(self.output, self.sweep.name)


class Display(Protocol):
    """Shows the progress of a run."""

    def warn(self, message: str) -> None:
        """Show a warning, one sentence."""

    def ended(self, trial: TrialStatus) -> None:
        """Show that a trial has ended; called in the thread that ended the trial."""

    def watching(self, status: SweepStatus) -> AbstractContextManager[None]:
        """Show the state of the sweep for the duration of a ``with`` block."""


class NoDisplay:
    """A `Display` that shows nothing; the default of `run_sweep`."""

    def warn(self, message: str) -> None:
        return

    def ended(self, trial: TrialStatus) -> None:
        return

    def watching(self, status: SweepStatus) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


NO_DISPLAY = NoDisplay()
