"""Notices to a server and to a command on this machine: each event once, whatever happens in between."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from dpsweep.orchestration.execution import notices
from dpsweep.orchestration.execution.notices import IDLE_FOR, MISSING_FOR, SILENT_FOR, Notices
from dpsweep.orchestration.execution.status_file import JOB_VARIABLE, StatusFile, tell_failed
from dpsweep.orchestration.execution.supervisor import how_it_ended
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.published import TrialState
from dpsweep.orchestration.store.status import SweepStatus, TrialStatus
from dpsweep.orchestration.store.status_snapshot import ClusterSnapshot, SweepSnapshot, TrialSnapshot, read_snapshot
from dpsweep.orchestration.sweeps.schema import parse_sweep
from tests.known import known
from tests.orchestration.sample_grids import small
from tests.orchestration.sample_snapshots import snapshot_of


class Server:
    """What was posted, and the statuses to answer with; 200 when there are no more."""

    def __init__(self) -> None:
        self.posted: list[dict[str, object]] = []
        self.answers: list[int] = []
        this = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["Content-Length"]))
                status = this.answers.pop(0) if this.answers else 200
                if status == 200:
                    this.posted.append(json.loads(content))
                self.send_response(status)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                return

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.http.server_port}/hook"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(notices, "_PAUSES", (0.0, 0.0, 0.0))
    made = Server()
    thread = threading.Thread(target=made.http.serve_forever)
    thread.start()
    yield made
    made.http.shutdown()
    thread.join()
    made.http.server_close()


def snapshot(*states: TrialState, steps: int = 0, cluster: ClusterSnapshot | None = None) -> SweepSnapshot:
    trials = tuple(TrialSnapshot(str(number), state, 0, 10) for number, state in enumerate(states))
    return snapshot_of(*trials, cluster=cluster, steps=steps)


def run(uri: Path, given: Notices, *ends: TrialState, error: BaseException | None = None) -> None:
    """The course of a run whose trials end so, or which ends with an error."""
    status = SweepStatus([TrialStatus(str(number), 10) for number, _ in enumerate(ends)], lambda trial: None)
    file = StatusFile(
        str(uri), "small", "id", "none", status, lambda waiting, training: None, print, lambda shown: None, given
    )
    with file.kept_current():
        for number, state in enumerate(ends):
            status.change(str(number), state=state, error="ValueError" if state is TrialState.FAILED else None)
        if error is not None:
            raise error


FINISHED, FAILED = TrialState.FINISHED, TrialState.FAILED


@pytest.mark.parametrize(
    ("ends", "event", "message"),
    [
        ((FINISHED, FINISHED), "finished", "2 trials are done"),
        ((FINISHED, FAILED), "failed", "1 of 2 trials have failed"),
    ],
)
def test_a_server_and_a_command_are_told_once(
    ends: tuple[TrialState, ...],
    event: str,
    message: str,
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A driver that is started again after it told does not tell again, and a server that is busy is asked again."""
    monkeypatch.setenv("HOOK", server.address)
    server.answers = [503, 503]
    command = f"sh -c 'cat >> {tmp_path}/told; echo \" $DPSWEEP_EVENT\" >> {tmp_path}/told'"
    warned: list[str] = []
    first = Notices(["${HOOK}", command], "s3://bucket/small", (), warned.append)
    run(tmp_path / "status.json", first, *ends)
    stored = known(read_snapshot(str(tmp_path / "status.json")))
    run(tmp_path / "status.json", Notices(["${HOOK}", command], "s3://bucket/small", stored.told, warned.append), *ends)
    (posted,) = server.posted
    assert (posted["event"], posted["message"]) == (event, message)
    assert (posted["sweep"], posted["output"]) == ("small", "s3://bucket/small")
    content, variable = (tmp_path / "told").read_text().rsplit(" ", 1)
    assert (json.loads(content), variable.strip()) == (posted, event)
    assert warned == []


def test_a_driver_that_breaks_has_failed_and_one_that_is_interrupted_tells_nobody(
    server: Server, tmp_path: Path
) -> None:
    for error in (RuntimeError("with a word of the data"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            run(tmp_path / "status.json", Notices([server.address], "/out", (), print), FINISHED, error=error)
    (posted,) = server.posted
    assert (posted["event"], posted["message"]) == ("failed", "its driver ended with RuntimeError")


def test_what_cannot_be_told_is_a_warning(server: Server, tmp_path: Path) -> None:
    warned: list[str] = []
    server.answers = [404]
    run(tmp_path / "s.json", Notices([server.address, "false", "${NOT_SET}"], "/out", (), warned.append), FINISHED)
    assert len(warned) == 3
    assert any("404" in each for each in warned)
    assert any("NOT_SET is not set where the driver runs" in each for each in warned)


def test_no_warning_shows_the_value_of_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK_TOKEN", "hunter2 swordfish")
    monkeypatch.setattr(notices, "TIMEOUT", 0.5)
    warned: list[str] = []
    targets = ["http://127.0.0.1:9/${HOOK_TOKEN}", "sh -c 'exit 3' ${HOOK_TOKEN}", "sh -c 'sleep 9' ${HOOK_TOKEN}"]
    run(tmp_path / "s.json", Notices(targets, "/out", (), warned.append), FINISHED)
    said = " ".join(sorted(warned))
    assert "hunter2" not in said
    assert "swordfish" not in said
    for reason in ("its address holds a blank", "exit status 3", "it took more than 0 s"):
        assert reason in said


def test_the_end_of_a_job_is_told_unless_its_driver_has_told(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that is refused before its sweep begins, or killed again and again, tells nobody itself."""
    monkeypatch.setenv(JOB_VARIABLE, "small-1")
    files, refused = SweepFiles(str(tmp_path / "refused")), how_it_ended(2, "small-1")
    tell_failed([server.address], files, "small", refused, print)
    (posted,) = server.posted
    assert (posted["event"], posted["sweep"], posted["output"]) == ("failed", "small", files.root)
    assert posted["message"] == "its driver ended with exit code 2; `dpsweep logs small-1` shows what it printed"
    told = SweepFiles(str(tmp_path / "told"))
    Path(told.root).mkdir()
    run(Path(told.status), Notices([server.address], told.root, (), print), FINISHED, FAILED)
    tell_failed([server.address], told, "small", refused, print)
    assert [each["output"] for each in server.posted] == [files.root, told.root]


WAITS = ClusterSnapshot((), {"GPU": 1.0}, {}, 1, {"GPU": 1.0})
PENDING, TRAINING = TrialState.PENDING, TrialState.TRAINING


@pytest.mark.parametrize(
    ("shown", "after", "message"),
    [
        (snapshot(TRAINING, PENDING, cluster=WAITS), MISSING_FOR, "1 trial waits: no node can give a trial GPU 1"),
        (snapshot(PENDING, PENDING), IDLE_FOR, "no trial has begun for 15 minutes, and 2 wait"),
        (snapshot(TRAINING), SILENT_FOR, "1 trial runs, but none has shown progress for 60 minutes"),
    ],
)
def test_a_sweep_that_is_stuck_is_told_of_once(
    shown: SweepSnapshot, after: float, message: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, warned = 1000.0, list[str]()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    given = Notices([server.address], "/out", (), warned.append)
    given.watch(shown)
    now += after - 1.0
    given.watch(shown)
    assert not given.told
    now += 2.0
    for _ in range(3):
        given.watch(shown)
    assert list(given.told) == ["stuck"]
    given.wait()
    (posted,) = server.posted
    assert str(posted["message"]).startswith(message)
    assert warned == [f"the sweep is stuck: {posted['message']}"]


def test_a_driver_warns_once_that_its_sweep_is_stuck_where_nobody_is_to_be_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, warned = 1000.0, list[str]()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    given = Notices([], "/out", (), warned.append)
    given.watch(snapshot(TRAINING))
    now += SILENT_FOR + 1.0
    given.watch(snapshot(TRAINING))
    given.watch(snapshot(TRAINING))
    (line,) = warned
    assert line.endswith("if a process or a node hangs, end it, and its trial continues from its checkpoint")


def test_long_epochs_are_no_standstill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials tell their steps at the end of an epoch: as long as before, and four times, is waited."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    given = Notices(["false"], "/out", (), print)
    for steps in range(3):
        given.watch(snapshot(TRAINING, steps=steps))
        now += 3000.0
    now += 6000.0
    given.watch(snapshot(TRAINING, steps=2))
    assert not given.told
    now += 6000.0
    given.watch(replace(snapshot(TRAINING, steps=2)))
    assert list(given.told) == ["stuck"]
    given.wait()


def test_the_sweep_file_names_them() -> None:
    assert parse_sweep(small(notify="https://example.org/${TOKEN}")).notify == ("https://example.org/${TOKEN}",)
    assert parse_sweep(small(notify=["sh tell.sh", "https://a"])).notify == ("sh tell.sh", "https://a")
