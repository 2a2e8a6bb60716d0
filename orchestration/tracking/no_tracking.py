"""The tracker that records nothing: the results of a sweep are only in its folder, with its report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from dpsweep.orchestration.records.published import PublishedSweep, PublishedTrial
from dpsweep.orchestration.tracking.plain_comparison import Compared
from dpsweep.orchestration.tracking.tracker import RunStatus, TrackedSweep

NO_TRACKING: Final = "none"
"""Given in place of a tracking URI to switch tracking off."""


class NoTracker:
    """A `Tracker` that records nothing. A later run of the sweep with MLflow records all trials of the sweep there."""

    answered: Final = 0

    def __init__(self) -> None:
        self.in_flight = 1

    def address(self, sweep_id: str) -> str:
        return ""

    def open_sweep(self, sweep: TrackedSweep, anew: Sequence[str] = ()) -> str:
        return ""

    def compare_by(self, compared: Compared) -> None:
        return

    def log_trial(self, trial: PublishedTrial) -> str:
        return ""

    def log_report(self, pages: Path, data: PublishedSweep) -> None:
        return

    def log_comparison(self, compared: Compared, sentences: Sequence[str]) -> None:
        return

    def close(self, status: RunStatus = "FINISHED") -> None:
        return

    def interrupt(self) -> None:
        return
