"""Groups that are too small to be shown are named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dpsweep.orchestration.commands.printed_tables import print_outcome
from dpsweep.orchestration.comparison.evidence import NO_EVIDENCE
from dpsweep.orchestration.comparison.extremes import hidden_groups_note
from dpsweep.orchestration.comparison.findings import findings, warnings
from dpsweep.orchestration.comparison.record import SweepRecord
from dpsweep.orchestration.pipeline import Outcome
from dpsweep.orchestration.report.prose import headline
from dpsweep.orchestration.store.published import PublishedTrial
from dpsweep.orchestration.store.results import TrialResult
from dpsweep.orchestration.store.status import status_of
from tests.orchestration.sample_outcomes import outcomes, trial
from tests.orchestration.sample_results import sample_record

NOTE = (
    "1 of 3 groups is not shown: few\\x1b. It has fewer than min_group_size = 10 test examples, or would give "
    "another group away; raise test_fraction or lower min_group_size to see it."
)


def with_hidden(record: SweepRecord, *names: str) -> SweepRecord:
    """The record of trials whose data have more groups, none of them large enough to be shown."""

    def grown(result: TrialResult) -> TrialResult:
        return replace(result, training=replace(result.training, group_names=(*result.group_names, *names)))

    results = {
        key: status_of(grown(status.result)) if isinstance(status.result, TrialResult) else status
        for key, status in record.statuses.items()
    }
    return replace(record, statuses=results)


def test_report_and_run_name_the_groups_that_are_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record, files = sample_record(tmp_path)
    assert hidden_groups_note(record.data().trials) == ()
    hiding = with_hidden(record, "few\x1b")
    data = hiding.data()
    found = findings(data, NO_EVIDENCE)
    (said,) = [each for each in warnings(found) if "not shown" in each]
    assert said.replace("\x1b", "\\x1b") == NOTE
    assert said in headline(data, found)
    print_outcome(Outcome(hiding, files, "sqlite:///none.db", 1.0))
    assert NOTE in capsys.readouterr().out


def hiding(*names: str, seed: int = 0, shown: int = 2) -> PublishedTrial:
    found = trial(outcomes((0.9, 0.8)), "flat", seed)
    assert found.quality is not None
    return replace(found, quality=replace(found.quality, hidden=names, groups=found.quality.groups[:shown]))


def test_groups_that_other_splits_show_are_told_apart_and_hundreds_are_not_listed() -> None:
    (some,) = hidden_groups_note([hiding("few", shown=1), hiding(seed=1)])
    assert some.startswith("1 of 2 groups is not shown in some trials: few. It has")
    assert "min_group_size test examples" in some
    (many,) = hidden_groups_note([hiding(*map(str, range(100)))])
    assert many.startswith("100 of 102 groups are not shown: 0, 1, 2, 3, 4, 5, 6, 7 and 92 more. They")


def test_one_group_alone_is_everybody() -> None:
    assert hidden_groups_note([hiding("all", shown=0)]) == ()
