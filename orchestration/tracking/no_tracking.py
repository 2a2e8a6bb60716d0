"""No tracking: the results of a sweep stay in its folder, with its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from orchestration.comparison.findings import Findings
from orchestration.records.published import PublishedSweep, PublishedTrial
from orchestration.tracking.protocol import RunStatus, TrackedSweep

NO_TRACKING: Final = "none"
"""In place of an address of MLflow."""


class NoTracker:
    """A `Tracker` that records nothing. A later run of the sweep with MLflow records all of its trials there."""

    address: Final = ""

    def open_sweep(self, sweep: TrackedSweep, anew: Sequence[str] = ()) -> str:
        return ""

    def log_trial(self, trial: PublishedTrial) -> str:
        return ""

    def log_report(self, page: str, data: PublishedSweep, figures: Mapping[str, str]) -> None:
        return

    def log_comparison(self, found: Findings, sentences: Sequence[str]) -> None:
        return

    def close(self, status: RunStatus = "FINISHED") -> None:
        return
