# ruff: noqa: E402
"""Requests and seconds that recording a trial in MLflow takes, beside Ray's own logger.

    python benchmarks/tracking.py [--trials 300] [--sweep DIR] [--database URI] [--auth] [--ray] [--json]

A sweep of --trials private trials of 11 steps each runs without MLflow and without Ray, or the stored one in --sweep is
taken. Then `dpsweep record` records it into SQLite, and into an MLflow server on loopback, whose runs are in --database
(by default SQLite; such as postgresql+psycopg2://USER@HOST/NAME). With --auth, once more into a
server with basic authentication, which checks the password again at every request; then once more with the
`auth_cache_ttl_seconds` that docs/cluster.md recommends. With --ray, Ray's `MLflowLoggerCallback` records the
same parameters and numbers in the same stores, one trial after the other, as Tune calls it. It makes no parent run, no
averages, no comparison and no models.

- `requests`: by HTTP, per trial, those for the whole sweep included.
- `seconds`: elapsed per trial. `whole_s`: of all trials.
- `server_cpu_s`: CPU seconds of the server per trial.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import requests

sys.path[0] = str(Path(__file__).resolve().parents[1])  # so that `benchmarks` is found wherever it starts

from benchmarks.start_up import _COMMAND, SWEEP

_USER = {"MLFLOW_TRACKING_USERNAME": "admin", "MLFLOW_TRACKING_PASSWORD": "a-long-password"}
_ACCOUNTS = """[mlflow]
default_permission = READ
database_uri = sqlite:///{folder}/auth.db
admin_username = admin
admin_password = a-long-password
authorization_function = mlflow.server.auth:authenticate_request_basic_auth
{more}
"""
_REMEMBERED = "auth_cache_ttl_seconds = 60"


def main() -> int:
    options = _parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="tracking-") as name:
        folder = Path(name)
        sweep = options.sweep or _trained(folder, options.trials)
        found = {"SQLite": _measured(folder, sweep, f"sqlite:///{folder}/mlflow.db", None, options.ray)}
        database = options.database or f"sqlite:///{folder}/server.db"
        kinds: dict[str, str | None] = {"server": None}
        kinds |= {"server with authentication": "", "that remembers passwords": _REMEMBERED} if options.auth else {}
        for name, accounts in kinds.items():
            with _server(folder, database, accounts) as (address, pid):
                found[name] = _measured(folder, sweep, address, pid, options.ray)
    print(json.dumps(found) if options.json else "\n".join(_lines(found)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=300, help="in settings of ten seeds each")
    parser.add_argument("--sweep", type=Path, help="a stored sweep to record (default: one is run)")
    parser.add_argument("--database", help="of the server's runs (default: SQLite)")
    parser.add_argument("--auth", action="store_true", help="also a server with basic authentication")
    parser.add_argument("--ray", action="store_true", help="also Ray's MLflowLoggerCallback")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _lines(found: dict[str, dict[str, dict[str, float]]]) -> Iterator[str]:
    for store, by_whom in found.items():
        for who, numbers in by_whom.items():
            yield f"{store}, {who}: {', '.join(f'{name} {value:g}' for name, value in numbers.items())}"
        if len(by_whom) == 2:
            ours, theirs = (by_whom[who]["seconds"] for who in by_whom)
            yield f"{store}: Ray's logger takes {theirs / ours:.2g} times as long"


def _trained(folder: Path, trials: int) -> Path:
    """Return the folder of a sweep that ran without MLflow."""
    settings = max(1, trials // 10)
    targets = ", ".join(f"{4 + 0.5 * number}" for number in range(settings))
    seeds = ", ".join(map(str, range(-(-trials // settings))))
    (folder / "sweep.yaml").write_text(SWEEP % {"clipping": "flat", "seeds": seeds, "targets": targets})
    arguments = ["run", folder / "sweep.yaml", "--output", folder / "out", "--address", "in-process"]
    subprocess.run(
        [sys.executable, "-c", _COMMAND, *map(str, arguments), "--tracking-uri", "none"],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[1])},
    )
    return folder / "out"


def _measured(folder: Path, sweep: Path, uri: str, pid: int | None, with_ray: bool) -> dict[str, dict[str, float]]:
    from dpsweep.orchestration.comparison.stored import stored_record
    from dpsweep.orchestration.pipeline import record_again
    from dpsweep.orchestration.store.layout import SweepFiles

    os.environ["MLFLOW_EXPERIMENT_NAME"] = uri  # servers share a database, and what is recorded is not recorded again
    trials = [each for each in stored_record(SweepFiles(str(sweep))).data().trials if each.state.has_ended]
    found = {"dpsweep record": _timed(lambda: record_again(str(sweep), uri), len(trials), pid)}
    if with_ray:
        found["MLflowLoggerCallback"] = _timed(lambda: _by_ray(trials, uri), len(trials), pid)
    return found


def _timed(record: Callable[[], object], trials: int, pid: int | None) -> dict[str, float]:
    count, send = [0], requests.Session.request

    def counted(*arguments: Any, **options: Any) -> Any:
        count[0] += 1
        return send(*arguments, **options)

    requests.Session.request = counted  # type: ignore[method-assign]
    cpu, began = _cpu(pid), time.monotonic()
    try:
        record()
    finally:
        requests.Session.request = send  # type: ignore[method-assign]
    took = time.monotonic() - began
    numbers = {"requests": count[0] / trials, "seconds": took / trials, "whole_s": took}
    numbers |= {"server_cpu_s": (_cpu(pid) - cpu) / trials} if pid else {}
    return {name: round(value, 3) for name, value in numbers.items()}


def _by_ray(trials: Any, uri: str) -> None:
    """Record the trials as Tune would: a call when a trial starts, one for each epoch, and one when it ends."""
    from ray.air.integrations.mlflow import MLflowLoggerCallback
    from ray.tune.experiment import Trial

    from dpsweep.orchestration.comparison.metrics import final_metrics
    from dpsweep.orchestration.tracking.tracker import epoch_metrics

    logger = MLflowLoggerCallback(tracking_uri=uri, experiment_name=f"{uri} by Ray")
    logger.setup()  # type: ignore[no-untyped-call]  # Ray's has no types
    for each in trials:
        trial = Trial(
            "dpsweep", config={name: str(value) for name, value in {**each.labels, **each.params}.items()}, stub=True
        )
        logger.log_trial_start(trial)
        for place, epoch in enumerate(each.history, 1):
            final = final_metrics(each) if place == len(each.history) else {}
            logger.log_trial_result(place, trial, {"training_iteration": place, **epoch_metrics(epoch), **final})
        logger.log_trial_end(trial, failed=False)


@contextlib.contextmanager
def _server(folder: Path, database: str, accounts: str | None) -> Iterator[tuple[str, int]]:
    """Address and process group of an MLflow server. accounts: further settings of its accounts; None without any."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "auth.ini").write_text(_ACCOUNTS.format(folder=folder, more=accounts or ""))
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", database, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--artifacts-destination", str(folder / "artifacts"), "--workers", "1"]
    variables = {
        **os.environ,
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_AUTH_CONFIG_PATH": str(folder / "auth.ini"),
        "MLFLOW_FLASK_SERVER_SECRET_KEY": "a" * 32,
    }
    server = subprocess.Popen(
        [*command, *([] if accounts is None else ["--app-name", "basic-auth"])],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=variables,
    )
    os.environ.update({} if accounts is None else _USER)
    try:
        while True:
            with contextlib.suppress(OSError):  # listening is not enough: it imports for a while after that
                requests.get(f"http://127.0.0.1:{port}/health", timeout=120)
                break
            if server.poll() is not None:
                raise SystemExit("the MLflow server ended by itself")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}", server.pid
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()


def _cpu(group: int | None) -> float:
    """CPU seconds of the processes of a group."""
    total = 0
    for entry in Path("/proc").glob("[0-9]*/stat") if group else ():
        with contextlib.suppress(OSError):
            fields = entry.read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12]) if int(fields[2]) == group else 0
    return total / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
