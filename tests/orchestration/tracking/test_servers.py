"""MLflow behind a server and on PostgreSQL, and stores that cannot be used."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg2
import pytest

from orchestration.tracking.embedded import embedded_tracking_uri
from orchestration.tracking.mlflow import MlflowTracker
from orchestration.tracking.protocol import TrackingUnavailable
from tests.orchestration.sample_sweeps import sample_trial
from tests.orchestration.tracking.test_mlflow import NOTHING, SWEEP, content, record, tracked

from mlflow import MlflowClient  # isort: skip  (after orchestration.tracking.mlflow, which keeps it quiet)


def closed_port() -> int:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.mark.parametrize("uri", ["http://127.0.0.1:{port}", "postgresql://me:secret@127.0.0.1:{port}/mlflow"])
def test_an_unreachable_server_is_one_clear_error_before_anything_starts(uri: str) -> None:
    where = uri.format(port=closed_port())
    with pytest.raises(TrackingUnavailable, match=r"cannot use MLflow at .*127\.0\.0\.1.*refused") as caught:
        MlflowTracker(where)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_store_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrackingUnavailable, match="cannot use MLflow at sqlite"):
        MlflowTracker(embedded_tracking_uri(tmp_path / "file"))


POSTGRES = next(
    (
        path
        for path in (*Path("/usr/lib/postgresql").glob("*/bin"), Path(shutil.which("initdb") or "/nowhere").parent)
        if (path / "initdb").exists() and (path / "postgres").exists()
    ),
    None,
)


@contextmanager
def postgres() -> Iterator[str]:
    """A PostgreSQL of its own on a free port; the server refuses to run as root, so root hands it to another user."""
    assert POSTGRES is not None
    port = closed_port()
    folder = tempfile.mkdtemp(prefix="dpsweep-postgres-")
    user = "postgres" if os.geteuid() == 0 else None
    if user is not None:
        shutil.chown(folder, user)
    common: dict[str, Any] = {"cwd": folder, "user": user, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(
        [POSTGRES / "initdb", "-D", "data", "-U", "dpsweep", "-A", "trust", "-E", "UTF8", "--no-sync"],
        check=True,
        **common,
    )
    options = ["-D", "data", "-h", "127.0.0.1", "-p", str(port), "-k", folder, "-c", "fsync=off"]
    server = subprocess.Popen([POSTGRES / "postgres", *options], **common)
    try:
        address = f"dpsweep@127.0.0.1:{port}/postgres"
        wait_until(lambda: psycopg2.connect(f"postgresql://{address}").close(), psycopg2.OperationalError)
        yield f"postgresql+psycopg2://{address}"
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(timeout=30)
        shutil.rmtree(folder)


@contextmanager
def mlflow_server(store: str, artifacts: Path) -> Iterator[str]:
    port = closed_port()
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", store, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--artifacts-destination", str(artifacts), "--workers", "1"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        wait_until(lambda: connect_to(server, port), ConnectionRefusedError)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=30)


def connect_to(server: subprocess.Popen[bytes], port: int) -> None:
    assert server.poll() is None, "the server ended by itself"
    socket.create_connection(("127.0.0.1", port), timeout=5).close()


def wait_until(attempt: Callable[[], object], failure: type[Exception], seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            attempt()
        except failure:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return


@pytest.mark.skipif(POSTGRES is None, reason="no PostgreSQL binaries (initdb, postgres)")
def test_a_server_on_postgresql_and_the_database_itself_are_the_same_store(tmp_path: Path) -> None:
    """What is recorded over HTTP is in the database, and a driver on the database continues it."""
    trials = [tracked(sample_trial(seed=seed, disclosure="none")) for seed in (0, 1)]
    with postgres() as database:
        with mlflow_server(database, tmp_path / "served") as server:
            over_http = MlflowTracker(server)
            sweep_run = over_http.open_sweep(SWEEP)
            over_http.log_trial(trials[0])
            over_http.log_report("<html></html>", NOTHING, {})
            over_http.close("KILLED")
            report = MlflowClient(server).download_artifacts(sweep_run, "report.html", str(tmp_path))
            assert Path(report).read_text() == "<html></html>"
        client = MlflowClient(database)
        over_http_only = content(client)
        assert Counter(status for status, *_ in over_http_only.values()) == {"FINISHED": 1, "KILLED": 1}
        direct = MlflowTracker(database, experiment="on the database", artifact_root=str(tmp_path / "direct"))
        assert direct.open_sweep(SWEEP) != sweep_run, "another experiment is another place"
        record(direct, trials)
        assert content(client) == over_http_only
        assert Counter(status for status, *_ in content(client, "on the database").values()) == {"FINISHED": 4}
