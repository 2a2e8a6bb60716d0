"""`status.json`: what it holds while a sweep runs and after, what it may show, and that it never stops a sweep."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dpsweep.orchestration.execution.environment import IN_PROCESS
from dpsweep.orchestration.execution.notices import Notices
from dpsweep.orchestration.execution.status_file import StatusFile
from dpsweep.orchestration.pipeline import RunRequest, run_sweep
from dpsweep.orchestration.store.layout import LOCK, SweepFiles
from dpsweep.orchestration.store.ownership import exclusive
from dpsweep.orchestration.store.published import TrialState
from dpsweep.orchestration.store.status import SweepStatus, TrialStatus
from dpsweep.orchestration.store.status_snapshot import (
    LOST,
    ClusterSnapshot,
    NodeSnapshot,
    SweepSnapshot,
    read_snapshot,
    write_snapshot,
)
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.orchestration.sweeps.user_code import permitted
from dpsweep.orchestration.tracking.tracker import NO_TRACKING
from tests.known import known
from tests.orchestration.own_models import FAILING_MODEL, SECRET
from tests.orchestration.processes import wait_until
from tests.orchestration.sample_grids import small

SHORTAGE = ClusterSnapshot(
    (NodeSnapshot("10.0.0.1", {"CPU": 2.0}),), {"CPU": 1.0, "GPU": 1.0}, {"CPU": 2.0}, 1, {"GPU": 1.0}
)


def of(uri: str) -> SweepSnapshot:
    return known(read_snapshot(uri))


def status_file(
    uri: str,
    status: SweepStatus,
    told: list[str],
    cluster: ClusterSnapshot | None = None,
    show: Callable[[SweepSnapshot], None] = lambda snapshot: None,
    notices: Notices | None = None,
) -> StatusFile:
    notices = notices or Notices((), uri, (), told.append)
    return StatusFile(uri, "small", "id", "none", status, lambda waiting, training: cluster, told.append, show, notices)


def two_trials() -> SweepStatus:
    return SweepStatus([TrialStatus("a", 10), TrialStatus("b", 10)], lambda trial: None)


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_it_is_renewed_and_says_at_last_how_the_sweep_ended(tmp_path: Path, scheme: str) -> None:
    uri, status = f"{scheme}{tmp_path}/status.json", two_trials()
    with status_file(uri, status, []).kept_current(period=0.05):
        first = of(uri)
        assert (first.state, first.counts()[TrialState.PENDING]) == ("running", 2)
        status.change("a", state=TrialState.TRAINING)
        wait_until(lambda: of(uri).counts()[TrialState.TRAINING] == 1, "the change to be written")
        assert of(uri).heartbeat > first.heartbeat
        status.change("a", state=TrialState.FINISHED)
        status.change("b", state=TrialState.FAILED, error="ValueError in f (a.py:3)")
    last = of(uri)
    assert (last.state, last.trials[1].error, last.seconds_left) == ("failed", "ValueError in f (a.py:3)", None)
    assert not last.is_stale(time.time() + 1e6), "a sweep that has ended is not stale"


def test_a_sweep_to_which_the_run_adds_trials_is_not_over_and_tells_nobody(tmp_path: Path) -> None:
    uri, status = f"{tmp_path}/status.json", two_trials()
    notices = Notices([f"touch {tmp_path}/told"], uri, (), print)
    with status_file(uri, status, [], notices=notices).kept_current():
        for key in "ab":
            status.change(key, state=TrialState.FINISHED)
        status.adds_trials = True
    assert (of(uri).state, (tmp_path / "told").exists()) == ("running", False)


def test_an_interrupted_sweep_says_so(tmp_path: Path) -> None:
    uri = f"{tmp_path}/status.json"
    with pytest.raises(KeyboardInterrupt), status_file(uri, two_trials(), []).kept_current():
        raise KeyboardInterrupt
    assert of(uri).state == "interrupted"


def test_a_silent_driver_is_stale(tmp_path: Path) -> None:
    uri = f"{tmp_path}/status.json"
    with status_file(uri, two_trials(), []).kept_current():
        snapshot = of(uri)
        assert not snapshot.is_stale(snapshot.heartbeat + 59.0)
        assert snapshot.is_stale(snapshot.heartbeat + 61.0)


def test_a_shortage_is_told_once_and_stands_in_the_file(tmp_path: Path) -> None:
    uri, told = f"{tmp_path}/status.json", list[str]()
    with status_file(uri, two_trials(), told, SHORTAGE).kept_current(period=0.02):
        wait_until(lambda: of(uri).cluster is not None and bool(told), "the cluster to be written")
        time.sleep(0.2)
        cluster = known(of(uri).cluster)
        assert cluster.missing == {"GPU": 1.0}
    assert told == [SHORTAGE.shortage()]
    assert "no node can give a trial GPU 1" in told[0]


def test_a_file_that_cannot_be_written_does_not_stop_the_sweep(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    shown: list[SweepSnapshot] = []
    written = status_file(f"{tmp_path}/file/status.json", two_trials(), [], show=shown.append)
    with written.kept_current(period=0.02):
        wait_until(lambda: len(shown) > 2, "several snapshots")
    assert (shown[0].state, shown[-1].state) == ("running", "stopped"), "both trials are left for another run"


def test_that_it_cannot_be_written_is_told_at_once_and_once(tmp_path: Path) -> None:
    """As on a disk that is full, which trials and parts notice only once their retries are spent."""
    told, shown = list[str](), list[SweepSnapshot]()
    folder = tmp_path / "out"
    folder.touch()
    with status_file(f"{folder}/status.json", two_trials(), told, show=shown.append).kept_current(period=0.02):
        assert len(told) == 1, "by the first attempt"
        assert told[0].startswith(f"`dpsweep status` cannot show this run: {folder} is a file")
        wait_until(lambda: len(shown) > 2, "several attempts")
        assert len(told) == 1
        folder.unlink()
        wait_until(lambda: (folder / "status.json").exists(), "it to be written")


def test_a_driver_of_this_host_that_is_gone_is_known_at_once(tmp_path: Path) -> None:
    """By its lock, which ends with it; a driver elsewhere may hold one that is not seen here."""
    uri = f"{tmp_path}/status.json"
    with exclusive(SweepFiles(str(tmp_path))), status_file(uri, two_trials(), []).kept_current():
        running = of(uri)
        assert (running.state, running.is_over) == ("running", False)
    write_snapshot(uri, running, False)
    assert (of(uri).state, of(uri).is_over, of(uri).may_run_in_mlflow()) == (LOST, True, False)
    with exclusive(SweepFiles(str(tmp_path))):
        assert of(uri).state == "running"
    write_snapshot(uri, replace(running, host="elsewhere"), False)
    assert of(uri).state == "running"
    (tmp_path / LOCK).unlink()
    write_snapshot(uri, running, False)
    assert of(uri).state == "running", "nobody can tell"


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("release", "is_shown"), [("none", False), ("raw", True)])
def test_of_an_error_it_shows_what_the_release_mode_shows(tmp_path: Path, release: str, is_shown: bool) -> None:
    (tmp_path / "my_models.py").write_text(FAILING_MODEL)
    text = small(clipping="none", noise="constant", seeds=0, model=["mlp", "my_models.py:broken"], release=release)
    spec, files = parse_sweep(text), SweepFiles(str(tmp_path / "out"))
    run_sweep(RunRequest(spec, text, files.root, IN_PROCESS, NO_TRACKING, code=permitted(spec, tmp_path)))
    content, snapshot = Path(files.status).read_text(), of(files.status)
    assert (snapshot.state, snapshot.name) == ("failed", "small")
    finished, broken = snapshot.trials
    assert finished.state is TrialState.FINISHED
    assert finished.private is False
    assert finished.epsilon is None
    assert finished.accuracy is not None
    assert "RuntimeError" in str(broken.error)
    assert "my_models.py" in str(broken.error)
    assert (SECRET in content) is is_shown
    assert (Path(files.status).stat().st_mode & 0o077 == 0) is is_shown, "what may quote the data is for its owner"
    assert json.loads(content)["trials"][0]["state"] == "finished"
