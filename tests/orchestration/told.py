"""What a run told whoever watches it."""

from __future__ import annotations

from dpsweep.orchestration.pipeline import NoDisplay
from dpsweep.orchestration.store.status import TrialStatus


class Told(NoDisplay):
    """Keeps the warnings, and the keys of the trials that ended."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.keys: list[str] = []

    def warn(self, message: str) -> None:
        self.warnings.append(message)

    def ended(self, trial: TrialStatus) -> None:
        self.keys.append(trial.key)
