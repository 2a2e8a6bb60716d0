"""The states of a trial: what they are called and how they look wherever a sweep is shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class TrialState(StrEnum):
    """Where a trial is; STOPPED: by the scheduler, on purpose, before its end."""

    PENDING = "pending"
    TRAINING = "training"
    ACCOUNTING = "accounting"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def has_ended(self) -> bool:
        return self in (TrialState.FINISHED, TrialState.STOPPED, TrialState.FAILED)

    @property
    def is_running(self) -> bool:
        return self in (TrialState.TRAINING, TrialState.ACCOUNTING)

    @property
    def word(self) -> str:
        """What results.json, the report and MLflow call it."""
        return _APPEARANCES[self].word

    @property
    def style(self) -> str:
        """Its style on a terminal, as rich names styles."""
        return _APPEARANCES[self].style


@dataclass(frozen=True)
class _Appearance:
    word: str
    style: str


_APPEARANCES: Mapping[TrialState, _Appearance] = {
    TrialState.PENDING: _Appearance("pending", "yellow"),
    TrialState.TRAINING: _Appearance("running", "bold"),
    TrialState.ACCOUNTING: _Appearance("running", "cyan"),
    TrialState.FINISHED: _Appearance("finished", "green"),
    TrialState.STOPPED: _Appearance("stopped", "yellow"),
    TrialState.FAILED: _Appearance("failed", "red"),
}
