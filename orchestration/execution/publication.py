"""The parts of a sweep that MLflow gets besides its trials: report, data, groups, comparison, and how it ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dpsweep.orchestration.comparison.findings import Findings
from dpsweep.orchestration.comparison.record import SweepRecord
from dpsweep.orchestration.records.published import PublishedSweep
from dpsweep.orchestration.report.catalogue import figures_for_mlflow
from dpsweep.orchestration.report.prose import headline
from dpsweep.orchestration.tracking.tracker import RunStatus, Tracker


def publication(
    record: SweepRecord, data: PublishedSweep, page: str, found: Findings
) -> Sequence[Callable[[Tracker], None]]:
    """Return the steps that publish a sweep whose trials are recorded; each can be repeated, and the last one closes
    its runs.

    `page`: the report under the sweep's release mode; "" if there is none yet.
    """
    figures, sentences = figures_for_mlflow(data, found.useless), headline(data, found)
    return (
        lambda tracker: tracker.log_report(page, data, figures),
        lambda tracker: tracker.log_comparison(found, sentences),
        lambda tracker: tracker.close(_status(record, data)),
    )


def _status(record: SweepRecord, data: PublishedSweep) -> RunStatus:
    if any(trial.is_asked and not trial.state.has_ended for trial in data.trials):
        return "KILLED"
    return "FAILED" if record.failed else "FINISHED"
