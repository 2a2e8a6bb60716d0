"""The progress of recording a sweep in MLflow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Recording:
    """The number of trials of a sweep that are recorded in MLflow.

    `recorded`, `trials`: trials recorded as they ended, of those to record; both 0 until all trials have ended.
    `per_second`: recent pace. `store`: tracking URI with its secrets masked. `page`: address of the comparison of
    trials, on the server, or on the one that `mlflow ui` starts for a database. `experiment`: its name in MLflow.
    `is_complete`: whether all trials and their comparison are recorded. `is_closed`: whether no run of the sweep is
    RUNNING. `failure`: why the driver ended before all was recorded; None while it goes on. `command`: records the
    rest.
    """

    recorded: int = 0
    trials: int = 0
    per_second: float = 0.0
    store: str = ""
    page: str = ""
    experiment: str = ""
    is_complete: bool = False
    is_closed: bool = False
    failure: str | None = None
    command: str = ""

    @property
    def goes_on(self) -> bool:
        """Return whether all trials have ended, and their driver records what is left."""
        return self.trials > 0 and not self.is_complete and self.failure is None

    @property
    def count(self) -> str:
        """Return text such as ``39 of 300``."""
        return f"{self.recorded} of {self.trials}"

    def line(self) -> str:
        """Return text such as ``recording in MLflow, 39 of 300, 4 a second``."""
        pace = f"{self.per_second:.0f} a second" if self.per_second >= 1.0 else f"{60.0 * self.per_second:.0f} a minute"
        return f"recording in MLflow, {self.count}, {pace}"

    def missing(self) -> str:
        """Return what is not recorded, and the command that records it; "" if nothing is missing."""
        if self.is_complete or not self.trials:
            return ""
        what = f"{self.count} trials are recorded in MLflow"
        if self.recorded == self.trials:
            what = f"all {self.trials} trials are recorded in MLflow, but not their comparison"
        why = f" ({self.failure})" if self.failure else ""
        return f"{what}{why}; `{self.command}` records the rest"


NOTHING_RECORDED: Final = Recording()
