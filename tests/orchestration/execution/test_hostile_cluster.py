"""What answers at the address of a dashboard is not believed: another server, another version, or somebody else's."""

from __future__ import annotations

import time
from email.utils import formatdate
from typing import Any

import pytest
import ray

from dpsweep.accounting.errors import DpsweepError, InvalidInput
from dpsweep.orchestration.execution import submission
from dpsweep.orchestration.execution.submission import SubmittedSweeps
from dpsweep.orchestration.tracking import requests
from tests.orchestration import odd_server
from tests.orchestration.invoking import invoked, printed, refused
from tests.orchestration.odd_server import answering

VERSION = {"version": "4", "ray_version": ray.__version__, "ray_commit": "x", "session_name": "\x1b]0;t\x07"}
OLDER = {**VERSION, "ray_version": "1.0.0"}
JOB: dict[str, Any] = {
    "type": "SUBMISSION",
    "submission_id": "a",
    "status": "RUNNING",
    "entrypoint": "x",
    "metadata": {"dpsweep.id": "a"},
}
OUTSIDE = {**JOB, "metadata": {"dpsweep.id": "a", "dpsweep.output": "/proc/self/../../etc", "dpsweep.owner": "\x1b[2J"}}


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a" * 64)


@pytest.mark.parametrize("slow", ["version", "jobs"])
def test_an_answer_that_comes_byte_by_byte_is_given_up(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on as long as the test, so nothing else ends the command."""
    monkeypatch.setattr(submission, "_ANSWER_WITHIN", 0.1 if slow == "version" else 60.0)
    monkeypatch.setattr(submission, "_limit", lambda method: 0.1)

    def answer(method: str, path: str) -> Any:
        return VERSION if slow == "jobs" and path.endswith("/version") else b"HTTP/1.1 200 OK\r\nX: a"

    with answering(answer) as server:
        assert "no complete answer within 0." in refused(InvalidInput, "list", "--address", server.address)


def test_an_answer_that_fills_the_memory_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "LARGEST", 100_000)
    with answering(lambda method, path: VERSION if path.endswith("/version") else [" " * 200_000]) as server:
        assert "answers with more than 0 MiB" in refused(InvalidInput, "list", "--address", server.address)


def test_an_older_cluster_is_refused_in_one_line() -> None:
    with answering(lambda method, path: OLDER) as server:
        assert "Jobs API is not supported" in refused(InvalidInput, "list", "--address", server.address)


@pytest.mark.parametrize("command", [("list",), ("status", "a"), ("logs", "a"), ("stop", "a")])
def test_another_server_is_no_cluster(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a web page, and a gateway to a head that is gone."""
    with answering(lambda method, path: b"HTTP/1.0 200 OK\r\nContent-Length: 6\r\n\r\n<html>") as server:
        assert "is no Ray cluster of a version that" in refused(InvalidInput, *command, "--address", server.address)
    for code, words in ((404, "Not Found"), (503, "Service Unavailable")):
        monkeypatch.setattr(odd_server.Handler, "do_GET", lambda handler, code=code: handler.send_error(code))
        with answering(lambda method, path: None) as server:
            said = refused(InvalidInput, *command, "--address", server.address)
        assert f"no Ray dashboard answers at {server.address} (HTTP {code} {words}); give the address" in said


@pytest.mark.parametrize("begun", [b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 1\r\n\r\n", b"nothing", None])
def test_a_job_whose_cluster_goes_away_can_be_told_without_it(begun: bytes | None) -> None:
    """While it is followed: a gateway that has lost its head, another server, and no connection at all."""
    own = {**JOB, "metadata": {**JOB["metadata"], "dpsweep.output": "/out"}}

    def answer(method: str, path: str) -> Any:
        if path.endswith("/logs/tail"):
            if begun is None:
                raise OSError("closed")
            return begun
        return VERSION if path.endswith("/version") else [own]

    with answering(answer) as server:
        said = refused(InvalidInput, "logs", "a", "--follow", "--address", server.address)
    assert f"the connection to the Ray cluster at {server.address} broke (" in said
    assert "`dpsweep status /out` reads the sweep without it, and the same `dpsweep submit` continues it" in said


@pytest.mark.parametrize("ahead", [-7200.0, 7200.0])
def test_the_age_of_a_sweep_is_by_the_clock_of_the_cluster(ahead: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """It began some two minutes ago, which the clock of this machine would not tell."""
    there = time.time() + ahead
    monkeypatch.setattr(odd_server.Handler, "date_time_string", lambda self: formatdate(there, usegmt=True))
    begun = {
        **OUTSIDE,
        "metadata": {**JOB["metadata"], "dpsweep.output": "/o"},
        "start_time": int(1000 * (there - 125)),
    }
    with answering(lambda method, path: VERSION if path.endswith("/version") else [begun]) as server:
        assert "2 min" in printed("list", "--address", server.address)
        assert abs(SubmittedSweeps(server.address).now() - there) < 2.0


@pytest.mark.thinned(2)
@pytest.mark.parametrize("command", [("list",), ("status", "a"), ("logs", "a"), ("stop", "a")])
@pytest.mark.parametrize(
    "jobs",
    [[], {}, None, 7, "text", [7], [{}], [JOB], [OUTSIDE], [{**JOB, "status": "UNHEARD OF"}], {"a": JOB}],
    ids=lambda jobs: str(jobs)[:40],
)
def test_odd_answers_end_in_one_line(command: tuple[str, ...], jobs: Any) -> None:

    def answer(method: str, path: str) -> Any:
        return VERSION if path.endswith("/version") else [jobs] if path.endswith("/jobs/") and jobs == "text" else jobs

    with answering(answer) as server:
        done = invoked(*command, "--address", server.address)
        assert any("/jobs" in path for path in server.asked)
    assert done.exit_code in (0, 1) or isinstance(done.exception, DpsweepError), done.exception
    assert done.exception is None or isinstance(done.exception, DpsweepError | SystemExit), repr(done.exception)
    assert "\x1b" not in done.output
