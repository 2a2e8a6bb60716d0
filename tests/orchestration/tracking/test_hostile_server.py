"""An MLflow server of somebody else's: what it answers writes nothing outside, takes no login away, and ends."""

from __future__ import annotations

import gzip
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dpsweep.orchestration.tracking import embedded, requests
from dpsweep.orchestration.tracking.addresses import require_location
from dpsweep.orchestration.tracking.mlflow import MlflowTracker
from dpsweep.orchestration.tracking.requests import MOST_LEFT, Timed
from dpsweep.orchestration.tracking.tracker import TrackedSweep, TrackingUnavailable
from tests.orchestration.odd_server import Answer, Server, answering

RUN = "0123456789abcdef" * 2


@pytest.fixture
def served() -> Iterator[Callable[[Answer], Server]]:
    with ExitStack() as running:
        yield lambda answer: running.enter_context(answering(answer))


def experiment() -> dict[str, Any]:
    return {"experiment": {"experiment_id": "1", "name": "dpsweep", "lifecycle_stage": "active"}}


def run_in(location: str) -> dict[str, Any]:
    info = {"run_id": RUN, "run_uuid": RUN, "experiment_id": "1", "status": "RUNNING", "start_time": 1}
    return {"run": {"info": {**info, "artifact_uri": location, "lifecycle_stage": "active"}, "data": {}}}


def sweep(folder: Path) -> TrackedSweep:
    return TrackedSweep("id", "<script>alert(1)</script>", "text", str(folder))


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_no_file_is_replaced_that_the_server_chooses(
    served: Callable[[Answer], Server], tmp_path: Path, scheme: str
) -> None:
    (tmp_path / "sweep.yaml").write_text("mine")

    def answer(method: str, path: str) -> Any:
        if "/experiments/" in path:
            return experiment()
        return {} if path.endswith("/runs/search") else run_in(f"{scheme}{tmp_path}")

    tracker = MlflowTracker(served(answer).address)
    with pytest.raises(TrackingUnavailable, match="so nothing was written"):
        tracker.open_sweep(sweep(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.yaml"]
    assert (tmp_path / "sweep.yaml").read_text() == "mine"


@pytest.mark.parametrize(
    ("uri", "owner", "taken"),
    [
        (f"/data/mlruns/1/{RUN}/artifacts", RUN, True),
        (f"file:///data/mlruns/1/models/m-{RUN}/artifacts", f"m-{RUN}", True),
        ("mlflow-artifacts:/1/x/artifacts", RUN, True),
        ("s3://bucket/x", RUN, True),
        ("/home/me/project/artifacts", "project", False),
        (f"/home/me/{RUN}/artifacts/../..", RUN, False),
        (f"/home/%2e%2e/{RUN}/artifacts", RUN, False),
        ("/home/me", RUN, False),
    ],
)
def test_local_folders_are_those_that_mlflow_makes(uri: str, owner: str, taken: bool) -> None:
    if taken:
        require_location(uri, owner)
        return
    with pytest.raises(TrackingUnavailable, match=r"ID/artifacts"):
        require_location(uri, owner)


def test_an_answer_that_names_no_run_is_not_of_mlflow() -> None:
    """Such as ``{}``, which a gateway may give for any request."""
    with pytest.raises(TrackingUnavailable, match="names neither a run nor a model, so it is not MLflow's"):
        require_location("", "")


def test_answers_without_end_end(
    served: Callable[[Answer], Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "MOST_PAGES", 5)

    def answer(method: str, path: str) -> Any:
        return experiment() if "/experiments/" in path else {"next_page_token": "more"}

    server = served(answer)
    tracker = MlflowTracker(server.address)
    with pytest.raises(TrackingUnavailable, match="no end of runs"):
        tracker.open_sweep(sweep(tmp_path))
    assert sum(path.endswith("/runs/search") for path in server.asked) == 5


def test_a_redirection_gets_no_login(
    served: Callable[[Answer], Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
    elsewhere = served(lambda method, path: experiment())
    other = elsewhere.address.replace("127.0.0.1", "localhost")
    server = served(lambda method, path: f"{other}{path}")
    with pytest.raises(TrackingUnavailable):
        MlflowTracker(server.address).open_sweep(sweep(tmp_path))
    assert "Bearer secret" in server.logins
    assert set(elsewhere.logins) <= {None}


@pytest.mark.parametrize("begun", [b"HTTP/1.1 200 OK\r\nX: a", b"HTTP/1.1 200 OK\r\nContent-Length: 999999\r\n\r\n "])
def test_an_answer_that_comes_byte_by_byte_is_given_up(
    served: Callable[[Answer], Server], monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    """Every pause is short, so no timeout of a socket ends it; header and body go on as long as the test."""
    monkeypatch.setattr(embedded, "TIMES", 0.01)
    server = served(lambda method, path: begun)
    assert "no complete answer within 0.2 s" in refusal(server.address)
    assert len(server.asked) <= 1


@pytest.mark.parametrize("is_packed", [False, True])
def test_an_answer_that_fills_the_memory_is_given_up(
    served: Callable[[Answer], Server], monkeypatch: pytest.MonkeyPatch, is_packed: bool
) -> None:
    monkeypatch.setattr(requests, "LARGEST", 100_000)
    body = b"[" + b" " * 200_000
    packed = gzip.compress(body) if is_packed else body
    encoding = "Content-Encoding: gzip\r\n" if is_packed else ""
    head = f"HTTP/1.1 200 OK\r\n{encoding}Content-Length: {len(packed)}\r\n\r\n"
    assert "answers with more than 0 MiB" in refusal(served(lambda method, path: head.encode() + packed).address)


def test_after_several_unanswered_calls_no_more_are_made() -> None:
    answered, asked = threading.Event(), list[int]()

    class Slow:
        def ask(self, number: int) -> int:
            asked.append(number)
            answered.wait()
            return number

        def fail(self) -> None:
            raise TimeoutError("its own")

    client = Timed(Slow(), lambda name: 60.0 if answered.is_set() or name == "fail" else 0.0, "look at it")
    with pytest.raises(TimeoutError, match=r"^its own$"):
        client.fail()
    for number in range(MOST_LEFT):
        with pytest.raises(TimeoutError, match="no complete answer within 0 s; look at it"):
            client.ask(number)
    with pytest.raises(TimeoutError, match=f"{MOST_LEFT} earlier requests have no complete answer yet; look at it"):
        client.ask(MOST_LEFT)
    answered.set()
    for thread in threading.enumerate():
        if thread.name == "dpsweep-request":
            thread.join()
    assert client.ask(-1) == -1
    assert sorted(asked) == [-1, *range(MOST_LEFT)]


def refusal(address: str) -> str:
    """Why a server is not used; "" if it is."""
    try:
        MlflowTracker(address)
    except TrackingUnavailable as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "odd", [[], None, 7, {"experiment": 7}, {"experiment": {"experiment_id": "\x1b]0;t\x07\n<b>"}}]
)
def test_what_is_no_answer_is_one_line(served: Callable[[Answer], Server], odd: Any) -> None:
    assert "\n" not in refusal(served(lambda method, path: odd).address)


PAGE = b"<html><body>Log in</body></html>"


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (b"500 Internal Server Error", r"the server, or a proxy before it, fails \(500\); see its log"),
        (b"502 Bad Gateway", r"the server, or a proxy before it, fails \(502\); see its log"),
        (b"429 Too Many Requests", r"refuses so many requests \(429\); raise its limit, or try later"),
        (b"200 OK", "an answer is not MLflow's, but perhaps a page to log in or of a proxy; correct the address"),
    ],
)
def test_a_server_that_fails_is_told_with_the_next_step(
    served: Callable[[Answer], Server], status: bytes, reason: str
) -> None:
    head = b"Content-Type: text/html\r\nContent-Length: %d\r\n\r\n" % len(PAGE)
    found = refusal(served(lambda method, path: b"HTTP/1.1 " + status + b"\r\n" + head + PAGE).address)
    assert re.search(reason, found), found
    assert "html" not in found
    assert "Max retries" not in found
