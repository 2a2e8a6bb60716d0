"""The reports of a sweep, and the parts of it that MLflow gets besides its trials, such as comparison and figures.

Drawing takes more memory than all else that a driver does when trials have ended, and drivers share the head of a
running cluster. A driver there lets another process draw, which takes the memory with it when it ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dpsweep.accounting.records.files import delete_folder, exists, read_bytes
from dpsweep.accounting.records.local_files import make_private_folder
from dpsweep.orchestration.comparison.findings import Findings
from dpsweep.orchestration.comparison.record import SweepRecord
from dpsweep.orchestration.comparison.sanity import with_known_changes
from dpsweep.orchestration.comparison.stored import stored_findings
from dpsweep.orchestration.execution.apart import run_apart
from dpsweep.orchestration.execution.environment import EMBEDDED, IN_PROCESS
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.published import PublishedSweep
from dpsweep.orchestration.tracking.plain_comparison import TrackedComparison, comparison
from dpsweep.orchestration.tracking.tracker import RunStatus, Tracker


@dataclass(frozen=True)
class Published:
    """A sweep as it is published. `sentences`: the headline. `decision`: its first sentences, on what to take.

    `unknown_cost`: as of `Findings`.
    """

    sentences: Sequence[str]
    decision: tuple[str, ...]
    compared: TrackedComparison
    unknown_cost: str


Publish = Callable[[SweepFiles, SweepRecord, Path], Published]


@contextlib.contextmanager
def empty_pages(files: SweepFiles) -> Iterator[Path]:
    """Yield an empty folder for pages, which only this user can enter. It goes with the block, or after a kill when the
    next one begins: call it while no other driver can run in the sweep's folder.
    """
    delete_folder(files.pages)
    make_private_folder(files.pages)
    try:
        yield Path(files.pages)
    finally:
        delete_folder(files.pages)


def publisher(address: str) -> Publish:
    """Return the function that writes the reports of a sweep that runs at ``address``; see `published`."""
    if address in (IN_PROCESS, EMBEDDED):
        return published
    return lambda files, record, pages: run_apart("wrote the report", published, files, record, pages)


def published(files: SweepFiles, record: SweepRecord, pages: Path) -> Published:
    """Write the reports of a sweep, as `dpsweep.orchestration.report.writing.write_reports`.

    `pages`: an empty folder that gets what MLflow gets, the report under its release mode and pages with one figure,
    of 2 MB each. A driver does not hold them. Raises: DataCorruption for damaged statistics or outcomes, StorageError.
    """
    from dpsweep.orchestration.report.writing import write_reports  # late: it imports plotly

    page, found = write_reports(files, record)
    return _published(record.data(), page.encode(), found, pages)


def stored_publication(files: SweepFiles, data: PublishedSweep, pages: Path) -> Published:
    """Publish a stored sweep with the report that it has, if it has one. `pages` and raises: as `published`."""
    page = read_bytes(files.report) if exists(files.report) else b""
    return _published(data, page, stored_findings(files, data), pages)


def decided_on(data: PublishedSweep, found: Findings) -> tuple[str, ...]:
    """Return the sentences on what to take; none for a sweep without trials."""
    from dpsweep.orchestration.report.first_screen import decision

    return tuple(decision(found, data.delta)) if data.trials else ()


def steps(
    record: SweepRecord, data: PublishedSweep, shown: Published, pages: Path
) -> Sequence[Callable[[Tracker], None]]:
    """Return the steps that publish a sweep whose trials are recorded; each can be repeated, and the last one closes
    its runs. pages: as of `published`.
    """
    known = with_known_changes(data, shown.unknown_cost)
    return (
        lambda tracker: tracker.log_report(pages, known),
        lambda tracker: tracker.log_comparison(shown.compared, shown.sentences),
        lambda tracker: tracker.close(_status(record, data)),
    )


def _published(data: PublishedSweep, page: bytes, found: Findings, pages: Path) -> Published:
    from dpsweep.orchestration.report.catalogue import figures_for_mlflow
    from dpsweep.orchestration.report.prose import headline

    if page:
        (pages / "report.html").write_bytes(page)
    (pages / "figures").mkdir()
    for name, figure in figures_for_mlflow(with_known_changes(data, found.unknown_cost), found.useless).items():
        (pages / "figures" / f"{name}.html").write_text(figure, encoding="utf-8")
    return Published(headline(data, found), decided_on(data, found), comparison(found), found.unknown_cost)


def _status(record: SweepRecord, data: PublishedSweep) -> RunStatus:
    if any(trial.is_asked and not trial.state.has_ended for trial in data.trials):
        return "KILLED"
    return "FAILED" if record.failed else "FINISHED"
