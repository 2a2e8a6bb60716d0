"""Sweeps as jobs of a cluster that requires a token: submitted, followed, killed, stopped, and finished unattended."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.records.files import exists
from dpsweep.orchestration.execution import submission
from dpsweep.orchestration.execution.environment import reread_environment
from dpsweep.orchestration.execution.on_ray import SWEEP_GAUGES
from dpsweep.orchestration.execution.submission import ShippedCode, SubmittedSweep, SubmittedSweeps
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.limits import Turn
from dpsweep.orchestration.store.status_snapshot import SweepSnapshot, read_snapshot
from dpsweep.orchestration.sweeps.manifest import read_manifest
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.orchestration.sweeps.user_code import permitted
from tests.known import known
from tests.orchestration.processes import dpsweep, kill, script, wait_until
from tests.orchestration.reference import assert_same_trial, run_undisturbed
from tests.orchestration.sample_grids import keys_of, small
from tests.orchestration.test_canaries import WORD, canary_sweep, leaks

HEAD = """
import sys
from ray.cluster_utils import Cluster
dashboard, agent, metrics = map(int, sys.argv[1:])
arguments = {"num_cpus": 2, "include_dashboard": True, "dashboard_port": dashboard}
arguments["dashboard_agent_listen_port"] = agent  # by default a fixed port, which another cluster here may have taken
arguments["metrics_export_port"] = metrics
cluster = Cluster(initialize_head=True, head_node_args=arguments)
print("ready", flush=True)
sys.stdin.read()
cluster.shutdown()
"""
"""A head with a dashboard and a job server, until stdin closes."""
ROOT = Path(__file__).parents[3]
TOKEN = "a1" * 32
CLOSED = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": TOKEN,
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on 127.0.0.1 only
    "RAY_metrics_report_interval_ms": "1000",
}
MODELS = """
import math
from torch import nn

def narrow(feature_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(feature_shape), 8), nn.Tanh(), nn.Linear(8, num_classes))
"""
SWEEP = small(
    clipping=["none", "individual"],
    model="my_models:narrow",
    noise={"name": "exponential", "decay": 0.02},
    seeds=0,
    epochs=40,
    execution={"checkpoint_every_epochs": 0.3},
    accounting={"individual": "rdp"},
)
"""Long enough for a kill to hit a trial in the middle."""
KEYS = {key: name.startswith("individual") for name, key in keys_of(SWEEP).items()}
"""Whether the trial is private, by key."""


@dataclass(frozen=True)
class Head:
    """A cluster for jobs. home: of its processes; it holds the token, as a user's does. metrics: Prometheus' port."""

    url: str
    home: Path
    metrics: int

    def run(self, *arguments: object, **changes: str) -> subprocess.CompletedProcess[str]:
        """A command of a user whose token is in the home folder."""
        return dpsweep(*arguments, "--address", self.url, HOME=str(self.home), **changes)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    home = tmp_path_factory.mktemp("home")
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text(TOKEN)
    with contextlib.ExitStack() as servers:
        free = [servers.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        port, agent, metrics = (server.getsockname()[1] for server in free)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    said = home / "stderr"
    with script(HEAD, port, agent, metrics, errors=said, **CLOSED, HOME=str(home), PATH=path) as process:
        assert process.stdout is not None
        assert any("ready" in line for line in process.stdout), said.read_text()
        yield Head(f"http://127.0.0.1:{port}", home, metrics)


@pytest.fixture
def sweep_file(tmp_path: Path) -> Path:
    (tmp_path / "my_models.py").write_text(MODELS)
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    return tmp_path / "sweep.yaml"


def now(files: SweepFiles) -> SweepSnapshot:
    return known(read_snapshot(files.status))


def has_ended(files: SweepFiles) -> bool:
    return exists(files.status) and now(files).state != "running"


def trains_in_the_middle(files: SweepFiles) -> bool:
    trial = files.trial(next(key for key, private in KEYS.items() if private))
    return exists(trial.checkpoint) and not exists(trial.training)


def only_error(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def job_in(submitted: str) -> str:
    """The id of a job of two trials, from what `submit` printed."""
    found = re.search(r"^(small-[0-9a-f]{10}): 2 trials, \w+ at", submitted, re.MULTILINE)
    assert found is not None, submitted
    return found[1]


@pytest.mark.long
def test_a_killed_driver_finishes_unattended(head: Head, sweep_file: Path, tmp_path: Path) -> None:
    files = SweepFiles(str(tmp_path / "out"))
    submitted = head.run("submit", sweep_file, "--output", files.root, "--env", "DPSWEEP_NOTE=7")
    assert submitted.returncode == 0, submitted.stderr
    job = job_in(submitted.stdout)
    assert "sent: sweep.yaml (" in submitted.stdout
    assert "my_models.py (" in submitted.stdout
    assert "INFO" not in submitted.stderr

    def logs() -> str:
        return head.run("logs", job).stdout

    wait_until(lambda: trains_in_the_middle(files) or has_ended(files), "a trial to train")
    first = now(files)
    assert (first.state, first.job) == ("running", job), logs()
    assert "libtorch" not in Path(f"/proc/{first.pid}/maps").read_text(), "most of the memory of a driver"
    kill(first.pid)
    again = head.run("submit", sweep_file, "--output", files.root)
    assert f"{job}: 2 trials, running" in again.stdout, "the job that runs already"
    other = head.run("submit", sweep_file, "--output", tmp_path / "other", "--dry-run")
    assert re.search(r"^small-[0-9a-f]{10}: 2 trials would be", other.stdout, re.MULTILINE), other.stderr
    assert job not in other.stdout, "a team that runs the same file elsewhere"

    wait_until(lambda: has_ended(files), "the next driver to finish the sweep")
    seen = dpsweep("status", files.root, "--json")
    assert seen.returncode == 0, seen.stderr
    printed = json.loads(seen.stdout)
    assert (printed["state"], printed["job"]) == ("finished", job), logs()
    assert printed["pid"] != first.pid
    assert printed["counts"]["finished"] == 2
    by_id = head.run("status", job)
    assert by_id.stdout.startswith("small: finished, 2 of 2 trials done"), by_id.stderr

    said = head.run("logs", files.root, "--follow")
    assert said.returncode == 0, said.stdout
    assert "supervisor: the driver was killed by SIGKILL" in said.stdout
    assert "which is continued" in said.stdout
    reference = parse_sweep(SWEEP)
    undisturbed = run_undisturbed(reference, tmp_path / "undisturbed", permitted(reference, tmp_path))
    for key, is_private in KEYS.items():
        assert_same_trial(files.trial(key), undisturbed.trial(key), is_private)

    once_more = head.run("submit", sweep_file, "--output", files.root)
    assert f"{job}-2: 2 trials" in once_more.stdout, once_more.stderr
    stopped = head.run("stop", job)
    assert f"{job}-2 is told to stop" in stopped.stdout, stopped.stderr
    listed = head.run("list")
    assert listed.returncode == 0, listed.stderr
    rows = [line.split() for line in listed.stdout.splitlines()[1:]]
    assert [row[0] for row in rows] == [job, f"{job}-2"]
    assert rows[0][1:4] == [getpass.getuser(), "0", "succeeded"]


@pytest.mark.long
def test_whoever_watches_a_job_that_is_killed_with_its_driver_is_told(
    head: Head, sweep_file: Path, tmp_path: Path
) -> None:
    files = SweepFiles(str(tmp_path / "killed"))
    submitted = head.run("submit", sweep_file, "--output", files.root)
    job = job_in(submitted.stdout)
    wait_until(lambda: trains_in_the_middle(files) or has_ended(files), "a trial to train")
    driver = now(files).pid
    supervisor = re.search(r"^PPid:\t(\d+)$", Path(f"/proc/{driver}/status").read_text(), re.MULTILINE)
    for pid in (known(supervisor)[1], driver):
        kill(int(pid))
    watched = head.run("status", job, "--watch")
    assert watched.returncode == 0, watched.stderr
    assert watched.stdout.splitlines()[-1].startswith("small: stale: no sign of its driver for 1 min")
    assert f"warning: {job} has failed, and its driver did not say how" in watched.stderr


@pytest.mark.long
def test_no_canary_is_in_what_commands_print_of_a_job(head: Head, tmp_path: Path) -> None:
    """Its models print and raise a word and a feature of the data; nothing of it leaves the private folders."""
    files, made = SweepFiles(str(tmp_path / "out")), tmp_path / "tmp"
    sweep = canary_sweep(tmp_path, ["prints", "raises"], "none")

    def say(*arguments: object) -> str:
        done = head.run(*arguments)
        (made / f"{arguments[0]}.txt").write_text(done.stdout + done.stderr)
        return done.stdout

    submitted = say("submit", sweep, "--output", files.root, "--env", f"MENDED={tmp_path / 'mended'}")
    job = job_in(submitted)
    wait_until(lambda: has_ended(files), "the job to end")
    assert now(files).state == "failed", "of one trial, whose model raises"
    assert "ValueError" in say("logs", files.root, "--follow")
    assert say("status", job).startswith("small: failed, 2 of 2 trials done, 0 running, 0 waiting, 1 failed")
    assert job in say("list")
    assert "has ended already" in say("stop", job)
    (errors,) = (tmp_path / "out").glob("trials/*/private/error.txt")
    assert WORD in errors.read_text()
    assert leaks(tmp_path) == []


@pytest.mark.long
def test_a_job_that_is_refused_on_the_cluster_is_told_of_once(head: Head, sweep_file: Path, tmp_path: Path) -> None:
    """No trial has begun, and no status is written: whom the sweep names would wait for ever."""
    told = tmp_path / "told"
    asks = {"resources": {"gpus": 1}, "notify": f"sh -c 'cat >> {told}'"}
    sweep_file.write_text(yaml.safe_dump({**yaml.safe_load(SWEEP), **asks}))
    submitted = head.run("submit", sweep_file, "--output", tmp_path / "out")
    assert submitted.returncode == 0, submitted.stderr
    job = job_in(submitted.stdout)
    said = head.run("logs", job, "--follow")
    assert "a trial reserves 1 CPU and 1 GPU, but no single node has that" in said.stdout
    content = json.loads(told.read_text())
    assert (content["event"], content["sweep"]) == ("failed", "small")
    assert content["message"] == f"its driver ended with exit code 2; `dpsweep logs {job}` shows what it printed"


def scraped(port: int) -> str:
    """What Prometheus would read of the node."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        return str(answer.read().decode())


@pytest.mark.long
def test_a_job_ends_by_its_limit_and_prometheus_sees_its_numbers(head: Head, sweep_file: Path, tmp_path: Path) -> None:
    """Every metric that the dashboard in deploy/ names is served by a real head while a sweep runs."""
    dashboard = (ROOT / "deploy" / "grafana-dashboard.json").read_text()
    named = set(re.findall(r"ray_dpsweep_\w+", dashboard))
    assert named == {f"ray_{metric.name}" for metric in SWEEP_GAUGES}
    files = SweepFiles(str(tmp_path / "out"))
    sweep_file.write_text(yaml.safe_dump({**yaml.safe_load(SWEEP), "clipping": "individual", "seeds": [0, 1]}))
    limits = ("--max-trials", 1, "--max-hours", 2)
    submitted = head.run("submit", sweep_file, "--output", files.root, *limits)
    assert submitted.returncode == 0, submitted.stderr
    seen: dict[str, str] = {}

    def all_are_served() -> bool:
        lines = [line for line in scraped(head.metrics).splitlines() if 'sweep="small"' in line]
        seen.update({line.partition("{")[0]: line for line in lines})
        return named <= seen.keys() or (has_ended(files) and not lines)

    wait_until(all_are_served, "the numbers of the sweep")
    assert named <= seen.keys(), f"missing: {named - seen.keys()}"
    assert all("individual" not in line for line in seen.values()), "no number of a single trial"
    wait_until(lambda: has_ended(files), "the limit")
    last = now(files)
    assert (last.state, last.limits, last.spent.trials) == ("stopped", ("--max-hours 2", "--max-trials 1"), 1)
    assert "(--max-trials); 1 trial is left" in str(last.reason)


@pytest.mark.long
def test_a_job_adds_seeds_until_its_limit_and_the_same_command_goes_on(
    head: Head, sweep_file: Path, tmp_path: Path
) -> None:
    """Two methods that cannot be told apart; the first job is stopped in the middle of a look."""
    files = SweepFiles(str(tmp_path / "out"))
    sweep_file.write_text(yaml.safe_dump({**yaml.safe_load(SWEEP), "clipping": ["flat", "individual"], "epochs": 2}))
    submit = ("submit", sweep_file, "--output", files.root, "--until", "told-apart", "--max-seeds", 3, "--follow")
    stopped = head.run(*submit, "--max-trials", 3)
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert now(files).spent.trials == 3
    ended = head.run(*submit)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "not told apart with 3 seeds, as many as --max-seeds allows" in ended.stdout
    grown = parse_sweep(known(read_manifest(files)).text)
    assert (grown.seeds, grown.compare.looks) == ((0, 1, 2), 2)
    assert len(list((tmp_path / "out" / "trials").iterdir())) == 6


@pytest.mark.long
def test_a_missing_or_wrong_token_is_one_line(head: Head, sweep_file: Path, tmp_path: Path) -> None:
    submit = ("submit", sweep_file, "--output", tmp_path / "out")
    without = dpsweep(*submit, "--address", head.url, HOME=str(tmp_path))
    assert f"the Ray cluster at '{head.url}' requires a token" in only_error(without)
    wrong = head.run(*submit, RAY_AUTH_TOKEN="b2" * 32)
    assert f"the Ray cluster at '{head.url}' requires a token" in only_error(wrong)


def test_a_full_head_takes_no_further_driver(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    reread_environment()
    jobs = SubmittedSweeps(head.url)
    wait_until(lambda: jobs._memory_of_head() is not None, "the dashboard to tell the memory of the head")
    monkeypatch.setattr(submission, "DRIVER_BYTES", 2**50)
    refused = r"the head at .* has [0-9.]+ GiB of memory left, where \d+ sweeps run, .*; submit it when one has ended"
    with pytest.raises(InvalidInput, match=refused):
        jobs.submit("small-1", "/out", ShippedCode((), (), (), 0), {}, Turn("ann"), print)


def test_a_job_that_another_command_began_meanwhile_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, seen = SubmittedSweep("small-1", "small-1", "/out", "PENDING", 1.0, "bob"), list[SubmittedSweep]()
    jobs = object.__new__(SubmittedSweeps)
    jobs._address = "http://head:8265"

    def start(**job: object) -> None:
        seen.append(theirs)
        with jobs._errors_as_invalid_input():
            raise RuntimeError("status code 500: Traceback (most recent call last):\n  File ...\nValueError: taken\n.")

    for name, fake in (("_start", start), ("all", lambda: tuple(seen)), ("_require_room", lambda *given: None)):
        monkeypatch.setattr(jobs, name, fake)
    assert jobs.submit("small-1", "/out", ShippedCode((), (), (), 0), {}, Turn("ann"), print) is theirs
    seen[:] = []
    theirs = replace(theirs, id="other")
    with pytest.raises(InvalidInput, match=r"head:8265 refused \(ValueError: taken\)$"):
        jobs.submit("small-1", "/out", ShippedCode((), (), (), 0), {}, Turn("ann"), print)


def test_an_unknown_id_is_one_line(head: Head) -> None:
    assert "has the id or output 'nothing'; there are: " in only_error(head.run("logs", "nothing"))


def test_no_dashboard_is_one_line_within_seconds(sweep_file: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    began = time.monotonic()
    done = dpsweep("list", "--address", f"http://127.0.0.1:{port}")
    assert f"no Ray dashboard answers at http://127.0.0.1:{port}" in only_error(done)
    assert time.monotonic() - began < 60.0, "of which most is Python's start on a busy machine"
