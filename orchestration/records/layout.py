"""The files of one sweep: the only place that spells their names (those of a trial: `accounting.records.layout`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from accounting.records.layout import TrialFiles


def absolute(location: str) -> str:
    """A local path made absolute; an object-store URI as it is. Workers run in other directories than the driver."""
    return location if "://" in location else str(Path(location).expanduser().resolve())


def default_output(name: str) -> str:
    """Where a sweep of this name is written unless the user says otherwise."""
    return f"runs/{name}"


@dataclass(frozen=True)
class SweepFiles:
    """Paths below a sweep's root, which is an absolute local path or an object-store URI."""

    root: str

    def _below(self, *names: str) -> str:
        return "/".join((self.root.rstrip("/"), *names))

    def trial(self, key: str) -> TrialFiles:
        return TrialFiles(self._below("trials", key))

    @property
    def manifest(self) -> str:
        """What was submitted and where it ran (JSON): sweep, versions, git state, hardware, seeds."""
        return self._below("sweep.json")

    @property
    def results(self) -> str:
        """The table of all trials, as ``dpsweep run --json`` prints it."""
        return self._below("results.json")

    @property
    def report(self) -> str:
        return self._below("report.html")

    @property
    def private_report(self) -> str:
        """The same report with the exact statistics of training examples: for the owner of the data only."""
        return self._below("private", "report.html")

    @property
    def error(self) -> str:
        """Text and tracebacks of the errors for which the plan of the sweep was refused."""
        return str(self.local_folder / "private" / "error.txt")

    @property
    def tune(self) -> str:
        """Ray Tune's own state; nothing in it is needed to resume."""
        return self._below("tune")

    @property
    def local_folder(self) -> Path:
        """Where the driver keeps what only it uses: its log and the embedded MLflow store."""
        return Path("runs", Path(self.root).name).resolve() if "://" in self.root else Path(self.root)

    @property
    def log(self) -> Path:
        return self.local_folder / "dpsweep.log"

    @property
    def artifacts(self) -> str:
        """Figures and reports of the embedded MLflow store."""
        return self._below("mlflow-artifacts")

    @property
    def claim(self) -> str:
        """Which driver runs the sweep (JSON), in an object store; a folder is locked instead."""
        return self._below("driver.json")

    @property
    def probe(self) -> str:
        """Written by the driver and read on every node, to prove that the storage is shared."""
        return self._below("storage-probe")
