"""What is run on the hosts: a small sweep, where it is at a moment, and what it left."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.hosts.cluster import TOKEN, Cluster
from tests.hosts.network import Host
from tests.orchestration.sample_grids import small

WATCH = """
import json, sys, time
from dpsweep.accounting.errors import DpsweepError
from dpsweep.orchestration.store.status_snapshot import read_snapshot
while True:
    try:
        found = read_snapshot(sys.argv[1] + "/status.json")
    except (DpsweepError, OSError):
        found = None
    if found is not None:
        counts = {state.value: count for state, count in found.counts().items()}
        now = {"state": found.state, "counts": counts, "trials": len(found.trials), "pid": found.pid}
        print(json.dumps(now), flush=True)
    time.sleep(0.3)
"""
"""Prints the status of a sweep again and again, so that whoever waits for one sees one that holds already."""
DIGESTS = """
import hashlib, json, os, sys
from dpsweep.orchestration.comparison.metrics import final_metrics
from dpsweep.orchestration.comparison.stored import stored_record
from dpsweep.orchestration.store.layout import SweepFiles
from tests.orchestration.servers import objects_in
start = sys.argv[1] + "/trials/"
found = objects_in("bucket", dict(os.environ))
kept = {name[len(start):]: hashlib.sha256(content).hexdigest() for name, content in found.items()
        if name.startswith(start) and "/private/" in name and name.endswith(".arrow")}
of_machine = ("system/", "final/wall_seconds")
results = {trial.key: repr(sorted((name, value) for name, value in final_metrics(trial).items()
                                  if not name.startswith(of_machine)))
           for trial in stored_record(SweepFiles("s3://bucket/" + sys.argv[1])).data().trials}
print(json.dumps({"objects": kept, "trials": results}))
"""
"""Prints the sha256 of every object with norms or epsilons of a sweep, and all numbers of every trial but those of the
machine."""
RECORDED = """
import json, os, sys
from mlflow import MlflowClient
client = MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
experiment = client.get_experiment_by_name("dpsweep")
runs = client.search_runs([experiment.experiment_id], max_results=1000)
parents = {run.info.run_id for run in runs if run.data.tags.get("mlflow.runName") == sys.argv[1]}
trials = [run for run in runs if run.data.tags.get("mlflow.parentRunId") in parents
          and run.data.tags.get("dpsweep.kind") == "trial"]
print(json.dumps({
    "finished": sum(run.info.status == "FINISHED" for run in trials), "trials": len(trials),
    "parents": sorted(run.info.status for run in runs if run.info.run_id in parents),
}))
"""
"""Prints how many trials of a sweep MLflow has as finished, and the states of its parent runs."""


def text_of(name: str, seeds: int, **changes: object) -> str:
    """A sweep of ``seeds`` trials whose norms are stored and accounted."""
    return small(
        **{
            "name": name,
            "clipping": "flat",
            "noise": "constant",
            "seeds": list(range(seeds)),
            "epochs": 12,
            "norms": {"refreshes_per_epoch": 1, "rows_per_part": 128},
            "accounting": {"individual": "rdp"},
            **changes,
        }
    )


JOB = """
import http.client, json, sys, time, urllib.request
address, token, output = sys.argv[1:]
asked = urllib.request.Request(address + "/api/jobs/", headers={"Authorization": "Bearer " + token})
deadline, state = time.monotonic() + 900.0, ""
while state not in ("SUCCEEDED", "FAILED", "STOPPED") and time.monotonic() < deadline:
    time.sleep(0.5)
    try:
        jobs = json.load(urllib.request.urlopen(asked, timeout=10))
    except (OSError, ValueError, http.client.HTTPException):  # its head may be lost meanwhile
        continue
    ours = [job for job in jobs if (job["metadata"] or {}).get("dpsweep.output") == output]
    state = max(ours, key=lambda job: job["start_time"] or 0)["status"] if ours else ""
print(json.dumps(state))
"""
"""Prints the state that the newest job of a sweep ends in; far lighter than `dpsweep list` again and again."""


@dataclass
class Submitted:
    """A sweep that a client has submitted."""

    client: Host
    cluster: Cluster
    environment: Mapping[str, str]
    name: str
    output: str

    def end(self) -> str:
        """Wait for the end of its newest job, and return the state that it ends in."""
        return str(answer(self.client, JOB, self.cluster.dashboard, TOKEN, self.output))


def submitted(
    client: Host, cluster: Cluster, environment: Mapping[str, str], text: str, name: str, output: str, *options: object
) -> Submitted:
    """Submit a sweep. environment: by which all find its storage and MLflow. Raises: AssertionError if refused."""
    file = client.folder / f"{name}.yaml"
    file.write_text(text)
    variables = [f"--env={key}={value}" for key, value in environment.items()]
    arguments = ("submit", file, "--address", cluster.dashboard, "--output", output, *variables, *options)
    done = client.dpsweep(*arguments, **environment)
    assert done.returncode == 0, done.stderr
    return Submitted(client, cluster, environment, name, output)


class Watcher:
    """Follows the status of a sweep from the client's host. Use it as a context manager."""

    def __init__(self, sweep: Submitted) -> None:
        self._sweep = sweep

    def __enter__(self) -> Watcher:
        sweep = self._sweep
        self._process = sweep.client.watch(sys.executable, "-c", WATCH, sweep.output, **sweep.environment)
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.wait()

    def wait(self, holds: Callable[[dict[str, Any]], bool], seconds: float = 600.0) -> dict[str, Any]:
        """The first status from now on for which ``holds``.

        Raises: AssertionError if there is none in time, or before the sweep has finished.
        """
        assert self._process.stdout is not None
        deadline, line = time.monotonic() + seconds, ""
        while time.monotonic() < deadline:
            line = self._process.stdout.readline() or line
            if line and holds(found := json.loads(line)):
                return dict(found)
            assert not line or found["state"] != "finished", f"the sweep finished before: {line}"
        raise AssertionError(f"not in {seconds:g} s; at last {line}")


def answer(host: Host, code: str, *arguments: str, **environment: str) -> Any:
    """What a script prints as JSON on a host."""
    done: subprocess.CompletedProcess[str] = host.run(sys.executable, "-c", code, *arguments, **environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
