"""An MLflow server of somebody else's: what it answers writes nothing outside, takes no login away, and ends."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from orchestration.tracking import mlflow
from orchestration.tracking.locations import require_location
from orchestration.tracking.mlflow import MlflowTracker
from orchestration.tracking.protocol import TrackedSweep, TrackingUnavailable

RUN = "0123456789abcdef" * 2
Answer = Callable[[str, str], Any]


class Server(ThreadingHTTPServer):
    """Answers every request by a function of its method and path, and notes the requests."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.asked, self.logins = answer, list[str](), list[str | None]()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0].rpartition("mlflow/")[2]
        self.server.asked.append(path)
        self.server.logins.append(self.headers.get("Authorization"))
        found = self.server.answer(self.command, path)
        self.send_response(307 if isinstance(found, str) else 200)
        content = b"" if isinstance(found, str) else json.dumps(found).encode()
        for name, value in {"Location": found, "Content-Length": len(content)}.items():
            if name != "Location" or isinstance(found, str):
                self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_PATCH = do_GET

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def served() -> Iterator[Callable[[Answer], Server]]:
    running: list[Server] = []

    def start(answer: Answer) -> Server:
        running.append(Server(answer))
        threading.Thread(target=running[-1].serve_forever, args=(0.01,), daemon=True).start()
        return running[-1]

    yield start
    for each in running:
        each.shutdown()
        each.server_close()


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
        if path.startswith("experiments"):
            return experiment()
        return {} if path == "runs/search" else run_in(f"{scheme}{tmp_path}")

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


def test_answers_without_end_end(
    served: Callable[[Answer], Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow, "MOST_PAGES", 5)

    def answer(method: str, path: str) -> Any:
        return experiment() if path.startswith("experiments") else {"next_page_token": "more"}

    server = served(answer)
    tracker = MlflowTracker(server.address)
    with pytest.raises(TrackingUnavailable, match="no end of runs"):
        tracker.open_sweep(sweep(tmp_path))
    assert server.asked.count("runs/search") == 5


def test_a_redirection_gets_no_login(
    served: Callable[[Answer], Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
    elsewhere = served(lambda method, path: experiment())
    other = elsewhere.address.replace("127.0.0.1", "localhost")
    server = served(lambda method, path: f"{other}/api/2.0/mlflow/{path}")
    with pytest.raises(TrackingUnavailable):
        MlflowTracker(server.address).open_sweep(sweep(tmp_path))
    assert "Bearer secret" in server.logins
    assert set(elsewhere.logins) <= {None}


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
