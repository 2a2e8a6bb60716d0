"""Which trial of a running sweep shows no progress, and for how long; a long epoch is no standstill."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.orchestration.execution.notices import Notices
from dpsweep.orchestration.execution.status_file import StatusFile
from dpsweep.orchestration.store.published import TrialState
from dpsweep.orchestration.store.status import QUIET_AT_FIRST, QUIET_FOR, SweepStatus, TrialStatus
from dpsweep.orchestration.store.status_snapshot import read_snapshot
from dpsweep.workers.evaluation.scores import Evaluation
from dpsweep.workers.training.history import Progress
from tests.known import known


class Watched:
    """A sweep of two trials, on a clock that a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.status = SweepStatus([TrialStatus("a", 100), TrialStatus("b", 100)], lambda trial: None)
        self.status.change("a", state=TrialState.TRAINING)

    def quiet_after(self, seconds: float, key: str = "a") -> float | None:
        self.now += seconds
        return self.status.quiet(key)

    def epoch(self, number: int, after: float) -> None:
        self.now += after
        evaluation = Evaluation(0.5, 1.0, (), {})
        self.status.change("a", progress=Progress(number, 10 * number, 100, 1.0, Trace(100), evaluation))


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def test_a_trial_that_reports_no_more_is_quiet_until_it_does(watched: Watched) -> None:
    watched.epoch(1, after=600.0)
    watched.epoch(2, after=20.0)
    assert watched.quiet_after(QUIET_FOR) is None
    assert watched.quiet_after(1.0) == QUIET_FOR + 1.0
    watched.epoch(3, after=0.0)
    assert watched.quiet_after(2.9 * QUIET_FOR) is None, "an epoch has taken as long before"
    assert watched.quiet_after(0.2 * QUIET_FOR) is not None
    watched.status.change("a", state=TrialState.FAILED)
    assert watched.quiet_after(86400.0) is None


def test_more_time_is_given_where_no_pause_tells_how_long_it_takes(watched: Watched) -> None:
    """To the first epoch, to what follows the last one, and to accounting, until a part is accounted."""
    assert watched.quiet_after(QUIET_AT_FIRST) is None
    assert watched.quiet_after(1.0) is not None
    assert watched.quiet_after(86400.0, "b") is None, "it waits"
    for number in range(1, 11):
        watched.epoch(number, after=1.0)
    assert watched.quiet_after(QUIET_AT_FIRST) is None
    assert watched.quiet_after(1.0) is not None
    watched.status.change("a", state=TrialState.ACCOUNTING)
    assert watched.quiet_after(QUIET_AT_FIRST) is None
    watched.status.accounted_part()
    assert watched.quiet_after(QUIET_AT_FIRST) is None
    assert watched.quiet_after(1.0) is not None


def test_time_to_finish_is_unknown_while_steps_are_done_and_accounting_is_not(watched: Watched) -> None:
    assert watched.status.seconds_left() is None
    watched.status.change("b", state=TrialState.FINISHED)
    watched.epoch(5, after=50.0)
    assert watched.status.seconds_left() == pytest.approx(50.0 / 150.0 * 50.0)
    watched.epoch(10, after=50.0)
    watched.status.change("a", state=TrialState.ACCOUNTING)
    assert watched.status.seconds_left() is None
    watched.status.change("a", state=TrialState.FINISHED)
    assert watched.status.seconds_left() == 0.0


def test_the_status_file_has_it_by_trial(watched: Watched, tmp_path: Path) -> None:
    uri = str(tmp_path / "status.json")
    notices = Notices((), uri, (), lambda sentence: None)
    status = watched.status
    file = StatusFile(uri, "s", "id", "none", status, lambda *_: None, lambda text: None, lambda seen: None, notices)
    watched.now += QUIET_AT_FIRST + 7.0
    with file.kept_current(period=86400.0):
        assert {each.key: each.quiet for each in known(read_snapshot(uri)).trials} == {
            "a": QUIET_AT_FIRST + 7.0,
            "b": None,
        }
