"""The states of a trial, with the word and the terminal style in which each is shown."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class TrialState(StrEnum):
    """State of a trial. STOPPED: stopped early by the scheduler.

    >>> TrialState.ACCOUNTING.word, TrialState.ACCOUNTING.is_running, TrialState.STOPPED.has_ended
    ('running', True, True)
    """

    PENDING = "pending"
    TRAINING = "training"
    ACCOUNTING = "accounting"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def has_ended(self) -> bool:
        """Return whether the trial is finished, stopped or failed."""
        return self in (TrialState.FINISHED, TrialState.STOPPED, TrialState.FAILED)

    @property
    def is_running(self) -> bool:
        """Return whether the trial is training or being accounted."""
        return self in (TrialState.TRAINING, TrialState.ACCOUNTING)

    @property
    def word(self) -> str:
        """The word for the state in results.json, the report and MLflow."""
        return "running" if self.is_running else self.value

    @property
    def style(self) -> str:
        """The rich style of the state on a terminal."""
        return _STYLES[self]


_STYLES: Mapping[TrialState, str] = {
    TrialState.PENDING: "yellow",
    TrialState.TRAINING: "bold",
    TrialState.ACCOUNTING: "cyan",
    TrialState.FINISHED: "green",
    TrialState.STOPPED: "yellow",
    TrialState.FAILED: "red",
}
