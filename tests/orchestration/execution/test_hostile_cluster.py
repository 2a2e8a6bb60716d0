"""What answers at the address of a dashboard is not believed: another server, another version, or somebody else's."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from accounting.errors import DpsweepError
from orchestration.commands.main import app
from tests.orchestration.odd_server import answering

VERSION = {"version": "4", "ray_version": "1.0.0", "ray_commit": "x", "session_name": "\x1b]0;t\x07"}
JOB = {
    "type": "SUBMISSION",
    "submission_id": "a",
    "status": "RUNNING",
    "entrypoint": "x",
    "metadata": {"dpsweep.id": "a"},
}
OUTSIDE = {**JOB, "metadata": {"dpsweep.id": "a", "dpsweep.output": "/proc/self/../../etc", "dpsweep.owner": "\x1b[2J"}}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("command", [("list",), ("status", "a"), ("logs", "a"), ("stop", "a")])
@pytest.mark.parametrize(
    "jobs",
    [[], {}, None, 7, "text", [7], [{}], [JOB], [OUTSIDE], [{**JOB, "status": "UNHEARD OF"}], {"a": JOB}],
    ids=lambda jobs: str(jobs)[:40],
)
def test_odd_answers_end_in_one_line(command: tuple[str, ...], jobs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a" * 64)

    def answer(method: str, path: str) -> Any:
        return VERSION if path.endswith("/version") else [jobs] if path.endswith("/jobs/") and jobs == "text" else jobs

    with answering(answer) as server:
        done = CliRunner().invoke(app, [*command, "--address", server.address])
    assert done.exit_code in (0, 1) or isinstance(done.exception, DpsweepError), done.exception
    assert done.exception is None or isinstance(done.exception, DpsweepError | SystemExit), repr(done.exception)
    assert "\x1b" not in done.output
