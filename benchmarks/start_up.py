# ruff: noqa: E402
"""Overhead of a sweep of many short trials besides training: before the first trial, for each trial, and in requests.

    python benchmarks/start_up.py [--trials 200] [--s3-trials 10] [--address local] [--json]

A sweep of --trials private trials of 11 steps each, in ten settings with their own calibration, runs on a Ray cluster
that it starts. `--address in-process` runs without Ray, an address on a running cluster, with the variables of a
submitted driver. Its runs go to MLFLOW_TRACKING_URI, if that is set. With --s3-trials, as many trials run again whose
results go to an S3 server on this machine (moto, of `pip install 'dpsweep[test]'`), and requests are counted.

- `first_s`: seconds from the start of the command to the first file of a trial.
- `plan_s`: seconds until the plan is stored, with imports and the start of Ray.
- `driver_cpu_s`: CPU seconds of the driver's process per trial, from the first trial to the end of the command.
- `wall_s`: elapsed seconds per trial in the same time.
- `after_last_s`: seconds from the last trial's result to the end of the command, when all is recorded.
- `before_mb`, `most_mb`: resident memory of the driver when the first trial begins, and at most.
- `requests`: number per trial, by what they are about.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).resolve().parents[1])
sys.path[0] = ROOT

from dpsweep.orchestration.execution.supervisor import FEW_ARENAS

SWEEP = """
name: start-up
data: {name: breast_cancer}
model: logistic
sampling: {method: poisson, batch_size: 41}
epochs: 1
clipping: [%(clipping)s]
noise: constant
seeds: [%(seeds)s]
privacy: {target_epsilon: [%(targets)s], delta: 1e-4}
"""
"""Each trial has 11 steps with batches of 41 out of 455 examples."""
_COMMAND = "from dpsweep.orchestration.commands.main import main; main()"
_POLL = 0.1


def main() -> int:
    options = _parser().parse_args()
    address = options.address
    with tempfile.TemporaryDirectory(prefix="start-up-") as folder:
        found = {"local": _run(Path(folder), options.trials, address)}
    if options.s3_trials:
        with tempfile.TemporaryDirectory(prefix="start-up-") as folder, _s3(Path(folder)) as (environment, requests):
            found["s3"] = _run(Path(folder), options.s3_trials, address, environment)
            counts = collections.Counter(map(_about, requests()))
            found["s3"]["requests"] = {
                what: round(count / options.s3_trials, 1) for what, count in counts.most_common()
            } | {"all": round(sum(counts.values()) / options.s3_trials, 1)}
    print(json.dumps(found) if options.json else "\n".join(f"{where}: {each}" for where, each in found.items()))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=200, help="of the local run; ten settings")
    parser.add_argument("--s3-trials", type=int, default=0, help="of the run whose results go to S3")
    parser.add_argument("--address", default="local", help="in-process, or of a running cluster (default: local)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _run(folder: Path, trials: int, address: str, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    settings = min(10, trials)
    targets = ", ".join(f"{4 + 0.5 * number}" for number in range(settings))
    seeds = ", ".join(map(str, range(-(-trials // settings))))
    file, output = folder / "sweep.yaml", "s3://bucket/out" if environment else str(folder / "out")
    file.write_text(SWEEP % {"clipping": "flat", "seeds": seeds, "targets": targets})
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH")))),
        "OMP_NUM_THREADS": "1",
        **(environment or {}),
    }
    if address not in ("local", "in-process"):
        variables = {**FEW_ARENAS, **variables}
    if environment:
        variables["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
    command = [sys.executable, "-c", _COMMAND, "run", str(file), "--output", output, "--address", address]
    began, first, planned, cpu_then, cpu = time.monotonic(), 0.0, 0.0, 0.0, 0.0
    before = most = 0.0
    with (folder / "log.txt").open("w") as log, subprocess.Popen(command, env=variables, stdout=log, stderr=log) as run:
        while run.poll() is None:
            cpu = _cpu(run.pid) or cpu
            most = _memory(run.pid) or most
            if not planned and (folder / "out" / "sweep.json").exists():
                planned = time.monotonic() - began
            if not first and any((folder / "out" / "trials").glob("*/*")):
                first, cpu_then, before = time.monotonic() - began, cpu, most
            time.sleep(_POLL)
    if run.returncode:
        raise SystemExit((folder / "log.txt").read_text())
    wall, now = time.monotonic() - began, time.time()
    last = max((file.stat().st_mtime for file in (folder / "out" / "trials").glob("*/result.json")), default=now)
    return {
        "trials": trials,
        "plan_s": round(planned, 1),
        "first_s": round(first, 1),
        "wall_s": round((wall - first) / trials, 3),
        "driver_cpu_s": round((cpu - cpu_then) / trials, 3),
        "after_last_s": round(now - last, 1),
        "before_mb": round(before),
        "most_mb": round(most),
    }


def _cpu(pid: int) -> float:
    """CPU seconds of a process, without its children."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _memory(pid: int) -> float:
    """Most resident memory of a process so far, in MB."""
    with contextlib.suppress(OSError):
        found = re.search(r"VmHWM:\s*(\d+)", Path(f"/proc/{pid}/status").read_text())
        return int(found[1]) * 1024 / 1e6 if found else 0.0
    return 0.0


@contextlib.contextmanager
def _s3(folder: Path) -> Iterator[tuple[dict[str, str], Callable[[], list[str]]]]:
    """Run an S3 server with one bucket; yields environment variables for its clients, and a function that returns the
    requests answered so far."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address, log = f"http://127.0.0.1:{port}", folder / "requests.txt"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    environment = {
        "AWS_ENDPOINT_URL": address,
        "MLFLOW_S3_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with log.open("wb") as sink, subprocess.Popen(command, stdout=sink, stderr=sink) as server:
        try:
            _make_bucket(f"{address}/bucket")
            yield environment, lambda: _requests(log)
        finally:
            server.terminate()


def _make_bucket(url: str) -> None:
    for _ in range(300):
        with contextlib.suppress(OSError):
            urllib.request.urlopen(urllib.request.Request(url, method="PUT")).close()
            return
        time.sleep(0.1)
    raise SystemExit("the S3 server does not answer")


def _requests(log: Path) -> list[str]:
    text = re.sub(r"\x1b\[[0-9;]*m", "", log.read_bytes().decode(errors="replace"))
    return re.findall(r'"((?:GET|PUT|POST|HEAD|DELETE) [^"]*) HTTP', text)


def _about(request: str) -> str:
    """Method and subject of a request, without the names of trials."""
    method, _, path = request.partition(" ")
    listed = re.search(r"[?&]prefix=([^&]*)", path)
    name = listed[1].replace("%2F", "/") if listed else path.partition("?")[0].removeprefix("/bucket/")
    name = re.sub(r"(trials|attempts|tune/[^/]+)/[^/]+", r"\1/*", name.removeprefix("out/"))
    name = re.sub(r"\d{6,}|[0-9a-f]{8,}", "N", name)
    return f"{'LIST' if listed else method} {name}"


if __name__ == "__main__":
    sys.exit(main())
