"""MLflow behind a server and on PostgreSQL, and stores that cannot be used."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.store.status import RecordingStatus
from dpsweep.orchestration.tracking import recorder
from dpsweep.orchestration.tracking.access import sealed
from dpsweep.orchestration.tracking.access import unsealed as opened_access
from dpsweep.orchestration.tracking.embedded import embedded_tracking_uri
from dpsweep.orchestration.tracking.mlflow import MlflowTracker
from dpsweep.orchestration.tracking.recorder import TrackingRecorder
from dpsweep.orchestration.tracking.tracker import TrackingUnavailable
from tests.orchestration.processes import dpsweep
from tests.orchestration.sample_grids import small
from tests.orchestration.sample_sweeps import sample_trial
from tests.orchestration.servers import POSTGRES, closed_port, has_s3, mlflow_server, objects_in, paused, postgres, s3
from tests.orchestration.tracking.recordings import NOTHING, SWEEP, content, pages, record, runs_of, tracked

from mlflow import MlflowClient  # isort: skip  (after dpsweep.orchestration.tracking.mlflow, which keeps it quiet)


SMALLEST = small(model="logistic", clipping="flat", noise="constant", seeds=0)
OVER_HTTP, DIRECT, AWAY = "over HTTP", "on the database", "away"
"""Experiments."""


@pytest.mark.parametrize("uri", ["http://127.0.0.1:{port}", "postgresql://me:secret@127.0.0.1:{port}/mlflow"])
def test_an_unreachable_server_is_one_clear_error_before_anything_starts(uri: str) -> None:
    where = uri.format(port=closed_port())
    with pytest.raises(TrackingUnavailable, match=r"cannot use MLflow at .*127\.0\.0\.1.*refused") as caught:
        MlflowTracker(where)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_host_that_is_unknown_or_silent_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with pytest.raises(TrackingUnavailable, match=r"host name is not known on this machine; correct the address$"):
        MlflowTracker("http://nowhere.invalid:5000")
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(TrackingUnavailable) as caught:
        MlflowTracker(f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert str(caught.value).endswith(
        "it does not answer in time; see whether the server is busy, or unreachable from here"
    )


def test_what_is_no_address_is_one_clear_error() -> None:
    with pytest.raises(TrackingUnavailable, match=r"cannot use MLflow at .*Invalid IPv6 URL"):
        MlflowTracker("http://[::1")


def test_a_store_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrackingUnavailable, match="cannot use MLflow at sqlite"):
        MlflowTracker(embedded_tracking_uri(tmp_path / "file"))


USER = {"MLFLOW_TRACKING_USERNAME": "admin", "MLFLOW_TRACKING_PASSWORD": "a-long-password"}
REAL = pytest.mark.skipif(
    POSTGRES is None or not has_s3(), reason="no PostgreSQL binaries, or no moto for an S3 server"
)


@dataclass(frozen=True)
class Served:
    """An MLflow server with accounts, whose runs are in ``database`` and whose artifacts in ``store``; all are real."""

    address: str
    database: str
    store: dict[str, str]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    accounts = folder / "auth.ini"
    accounts.write_text(
        f"[mlflow]\ndefault_permission = READ\ndatabase_uri = sqlite:///{folder}/auth.db\nadmin_username = admin\n"
        "admin_password = a-long-password\n"
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
    )
    with postgres() as database, s3("artifacts") as store:
        options = ["--app-name", "basic-auth"]
        secrets = {**store, "MLFLOW_AUTH_CONFIG_PATH": str(accounts), "MLFLOW_FLASK_SERVER_SECRET_KEY": "a" * 32}
        with mlflow_server(database, "s3://artifacts/mlflow", options, secrets) as address:
            yield Served(address, database, store)


@pytest.mark.long
@REAL
def test_a_server_on_postgresql_and_the_database_itself_are_the_same_store(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is recorded over HTTP is in the database, and a driver on the database continues it."""
    for name, value in USER.items():
        monkeypatch.setenv(name, value)
    trials = [tracked(sample_trial(seed=seed, disclosure="none")) for seed in (0, 1)]
    over_http = MlflowTracker(served.address, experiment=OVER_HTTP)
    sweep_run = over_http.open_sweep(SWEEP)
    over_http.log_trial(trials[0])
    with pages("<html></html>") as folder:
        over_http.log_report(folder, NOTHING)
    over_http.close("KILLED")
    report = MlflowClient(served.address).download_artifacts(sweep_run, "report.html", str(tmp_path))
    assert Path(report).read_text() == "<html></html>"
    client = MlflowClient(served.database)
    over_http_only = content(client, OVER_HTTP)
    assert Counter(status for status, *_ in over_http_only.values()) == {"FINISHED": 1, "KILLED": 1}
    direct = MlflowTracker(served.database, experiment=DIRECT, artifact_root=str(tmp_path / "direct"))
    assert direct.open_sweep(SWEEP) != sweep_run, "another experiment is another place"
    record(direct, trials)
    assert content(client, OVER_HTTP) == over_http_only
    assert Counter(status for status, *_ in content(client, DIRECT).values()) == {"FINISHED": 4}


@REAL
@pytest.mark.parametrize(
    ("number", "away_after"),
    [
        pytest.param(6, {"database": 1}, marks=pytest.mark.long),
        pytest.param(20, {"address": 4, "database": 12}, marks=pytest.mark.long),
    ],
)
def test_a_server_that_is_away_while_trials_are_recorded_loses_and_doubles_none(
    number: int, away_after: dict[str, int], served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is paused with eight requests under way, which it answers later; its database after so many trials."""
    for name, value in {**USER, "MLFLOW_HTTP_REQUEST_TIMEOUT": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(recorder, "PAUSES", (0.2, 1.0))
    seeds = range(number)
    trials = {trial.key: trial for trial in (tracked(sample_trial(seed=seed, disclosure="none")) for seed in seeds)}
    faults, experiment = {after: getattr(served, name) for name, after in away_after.items()}, f"{AWAY} {number}"

    def told(recording: RecordingStatus) -> None:
        for due in [trials for trials in faults if trials <= recording.recorded]:
            threading.Thread(target=away, args=(faults.pop(due),)).start()

    def away(address: str) -> None:
        with paused(address):
            time.sleep(4.0)

    tracker = MlflowTracker(served.address, experiment=experiment)
    tracker.open_sweep(SWEEP)
    following = TrackingRecorder(tracker, lambda key: trials[key], RecordingStatus(), told)
    following.finish(trials, [lambda tracker: tracker.close()])
    assert not faults
    assert following.recording.is_complete
    assert following.recording.count == f"{number} of {number}"
    runs = runs_of(MlflowClient(served.database), experiment)
    assert Counter(run.data.tags["dpsweep.kind"] for run in runs) == {"sweep": 1, "trial": number, "average": 1}
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert {run.data.tags.get("dpsweep.trial_key") for run in runs} == {*trials, None}


@REAL
def test_two_users_record_as_themselves(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each from what it submitted: the other's experiment is refused in one line, with the way out."""
    from mlflow.server import get_app_client  # late: the collection of every process would load the server

    for user in ("ann", "ben"):
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", USER["MLFLOW_TRACKING_PASSWORD"])
        get_app_client("basic-auth", tracking_uri=served.address).create_user(user, f"password of {user}")
    for user in ("ann", "ben"):
        access = {
            "MLFLOW_TRACKING_URI": served.address,
            "MLFLOW_EXPERIMENT_NAME": f"sweeps of {user}",
            "MLFLOW_TRACKING_USERNAME": user,
            "MLFLOW_TRACKING_PASSWORD": f"password of {user}",
        }
        text = sealed(access, "the cluster's token")
        assert user not in text
        with pytest.raises(InvalidInput, match="another token"):
            opened_access(text, "another")
        for name, value in opened_access(text, "the cluster's token").items():
            monkeypatch.setenv(name, value)
        tracker = MlflowTracker(served.address)
        tracker.open_sweep(replace(SWEEP, sweep_id=user))
        record(tracker, [tracked(sample_trial(disclosure="none"))])
        runs = runs_of(MlflowClient(served.database), f"sweeps of {user}")
        assert len(runs) == 2, "the sweep and its trial"
        assert {run.info.status for run in runs} == {"FINISHED"}
    with pytest.raises(TrackingUnavailable, match=r"as 'ben' for this \(403\).*MLFLOW_EXPERIMENT_NAME"):
        MlflowTracker(served.address, experiment="sweeps of ann").open_sweep(SWEEP)


@pytest.mark.long
@REAL
def test_a_name_that_the_server_does_not_allow_is_one_line_with_its_option(served: Served) -> None:
    port = urlsplit(served.address).port
    name = socket.gethostname()
    try:
        socket.create_connection((name, port or 0), timeout=1).close()
    except OSError:
        pytest.skip(f"this machine does not reach itself as {name} on loopback")
    with pytest.raises(TrackingUnavailable, match=f"403 Invalid Host header.*--allowed-hosts {name}:{port}"):
        MlflowTracker(f"http://{name}:{port}")


@pytest.mark.long
@REAL
def test_a_server_with_accounts_keeps_artifacts_in_an_object_store(served: Served, tmp_path: Path) -> None:
    """The sweep knows the server's address and its user's password, and no key of the bucket."""
    (tmp_path / "sweep.yaml").write_text(SMALLEST)
    run = ("run", tmp_path / "sweep.yaml", "--address", "in-process", "--tracking-uri", served.address)
    for known in ({}, {**USER, "MLFLOW_TRACKING_PASSWORD": "wrong"}):
        refused = dpsweep(*run, "--output", tmp_path / "refused", **known)
        assert refused.returncode == 2
        (line,) = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
        assert f"cannot use MLflow at {served.address}" in line
        assert "(401); set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD" in line
        assert not (tmp_path / "refused" / "sweep.json").exists()
    done = dpsweep(*run, "--output", tmp_path / "out", "--json", **USER)
    assert done.returncode == 0, done.stderr
    assert "a-long-password" not in done.stdout + done.stderr
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{served.address}/api/2.0/mlflow/experiments/search?max_results=5", timeout=30)
    kinds = Counter(status for status, *_ in content(MlflowClient(served.database), "dpsweep").values())
    assert set(kinds) == {"FINISHED"}
    assert any(name.endswith("/report.html") for name in objects_in("artifacts", served.store))
    (trial,) = json.loads(done.stdout)["trials"]
    assert trial["status"] == "finished"
