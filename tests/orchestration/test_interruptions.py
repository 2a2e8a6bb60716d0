"""Killed workers, killed drivers, interrupted commands: the results are those of an undisturbed sweep."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from mlflow.entities import Run

from dpsweep.accounting.records.files import exists
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.sweeps.schema import parse_sweep
from tests.orchestration.processes import (
    PATIENCE,
    able_to_write,
    descendants,
    dpsweep,
    is_alive,
    kill,
    start,
    training_workers,
    wait_until,
)
from tests.orchestration.reference import assert_same_trial, run_undisturbed
from tests.orchestration.sample_grids import keys_of, small
from tests.orchestration.tracking.recordings import client_of, runs_of

EPOCHS = 120
SWEEP = small(
    clipping=["none", "individual"],
    noise={"name": "exponential", "decay": 0.02},
    seeds=[0, 1],
    epochs=EPOCHS,
    norms={"refreshes_per_epoch": 0.5},
    execution={"checkpoint_every_epochs": 0.3},
    accounting={"individual": "rdp"},
)
"""Long enough for a kill to hit a trial in the middle."""
KEYS = {key: name.startswith("individual") for name, key in keys_of(SWEEP).items()}
"""Whether the trial is private, by key."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> SweepFiles:
    return run_undisturbed(parse_sweep(SWEEP), tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture
def sweep_file(tmp_path: Path) -> Path:
    file = tmp_path / "sweep.yaml"
    file.write_text(SWEEP)
    return file


def trains_in_the_middle(files: SweepFiles) -> bool:
    """Whether a private trial has a checkpoint, but is not trained to its end."""
    private = [files.trial(key) for key, is_private in KEYS.items() if is_private]
    return any(exists(trial.checkpoint) and not exists(trial.training) for trial in private)


def assert_complete(files: SweepFiles, undisturbed: SweepFiles) -> None:
    for key, is_private in KEYS.items():
        assert exists(files.trial(key).result), key
        assert_same_trial(files.trial(key), undisturbed.trial(key), is_private)


def runs(files: SweepFiles) -> dict[str, list[Run]]:
    """Every MLflow run, by the key of its trial."""
    found: dict[str, list[Run]] = {}
    for run in runs_of(client_of(Path(files.root))):
        found.setdefault(run.data.tags.get("dpsweep.trial_key", "sweep"), []).append(run)
    return found


def statuses(files: SweepFiles) -> dict[str, list[str]]:
    """Status of every MLflow run, by the key of its trial."""
    return {key: [run.info.status for run in of_trial] for key, of_trial in runs(files).items()}


def is_watched_training(files: SweepFiles) -> bool:
    """Whether MLflow shows a private trial that trains: its parameters, and what it has reached and cost so far."""
    return any(
        run.info.status == "RUNNING"
        and "test_accuracy" in run.data.metrics
        and "epsilon" in run.data.metrics
        and float(run.data.params["spec.noise.initial_noise_multiplier"]) > 0.0
        for key, of_trial in runs(files).items()
        for run in of_trial
        if KEYS.get(key)
    )


OF_THE_MODEL = ("final/", "privacy/", "fairness/", "deviation/", "setting/", "system/")


def doubled(files: SweepFiles) -> list[str]:
    """Series that hold two points of one step, and numbers of the trained model, which MLflow keeps for the run and for
    its logged model, that hold two values. The run of the sweep has the counts and the composed cost of the trials that
    had ended as each driver left it."""
    client = client_of(Path(files.root))
    found = []
    for key, run in ((key, run) for key, of_trial in runs(files).items() for run in of_trial):
        for name in run.data.metrics:
            if key == "sweep" and name.startswith(("trials/", "privacy/composed_")):
                continue
            points = client.get_metric_history(run.info.run_id, name)
            steps = {point.step for point in points}
            kept = {point.value for point in points} if name.startswith(OF_THE_MODEL) else points
            found += [name] if len(kept) > len(steps) else []
    return found


@pytest.mark.long
def test_killed_training_workers_change_nothing(sweep_file: Path, tmp_path: Path, undisturbed: SweepFiles) -> None:
    """Some while they start, then all that train when a trial is in the middle."""
    files = SweepFiles(str(tmp_path / "out"))
    driver = start("run", sweep_file, "--output", files.root, "--json", log=tmp_path / "log")
    killed: set[int] = set()

    def new_workers() -> list[int]:
        return [pid for pid in training_workers(descendants(driver.pid)) if pid not in killed]

    def kill_new_workers() -> None:
        for victim in new_workers():
            kill(victim)
            killed.add(victim)

    for _ in range(2):
        wait_until(lambda: bool(new_workers()) or driver.poll() is not None, "a worker")
        kill_new_workers()
    starting = len(killed)
    wait_until(lambda: trains_in_the_middle(files) or driver.poll() is not None, "a trial to train", pause=0.1)
    kill_new_workers()
    assert 2 <= starting < len(killed)
    assert driver.wait(PATIENCE) == 0, (tmp_path / "log").read_text()
    assert_complete(files, undisturbed)


@pytest.mark.long
def test_an_interrupted_and_then_killed_driver_is_resumed(
    sweep_file: Path, tmp_path: Path, undisturbed: SweepFiles
) -> None:
    """The third run trains the rest in its own process, which gives the same bits as Ray."""
    files = SweepFiles(str(tmp_path / "out"))
    _interrupt(sweep_file, files, tmp_path / "first")
    _kill_when_watched(sweep_file, files, tmp_path / "second")
    finished = [files.trial(key).result for key in KEYS if exists(files.trial(key).result)]
    before = {path: Path(path).stat().st_mtime_ns for path in finished}
    assert 0 < len(before) < len(KEYS)

    resumed = dpsweep("run", sweep_file, "--output", files.root, "--json", "--address", "in-process")
    assert resumed.returncode == 0, resumed.stderr
    assert {path: Path(path).stat().st_mtime_ns for path in finished} == before
    assert_complete(files, undisturbed)
    assert all(trial["status"] == "finished" for trial in json.loads(resumed.stdout)["trials"])
    found = statuses(files)
    assert all(found[key] == ["FINISHED"] for key in KEYS), found
    assert {status for of_trial in found.values() for status in of_trial} == {"FINISHED"}
    assert doubled(files) == []
    for key in KEYS:
        (run,) = runs(files)[key]
        points = client_of(Path(files.root)).get_metric_history(run.info.run_id, "test_accuracy")
        assert len(points) == EPOCHS


def _interrupt(sweep_file: Path, files: SweepFiles, log: Path) -> None:
    """Interrupt a run in the middle of a trial: it says how to go on, and leaves nothing that runs."""
    driver = start("run", sweep_file, "--output", files.root, log=log)
    wait_until(lambda: trains_in_the_middle(files) or driver.poll() is not None, "a trial to train", pause=0.1)
    below = descendants(driver.pid)
    driver.send_signal(signal.SIGINT)
    assert driver.wait(PATIENCE) == 130
    said = log.read_text()
    assert said.splitlines()[-1] == "interrupted; the same command continues where it stopped"
    assert "Traceback" not in said
    wait_until(lambda: not any(map(is_alive, below)), "the embedded cluster to end", pause=0.1)
    assert "RUNNING" not in {status for of_trial in statuses(files).values() for status in of_trial}
    assert any(run.data.tags.get("dpsweep.outcome") == "interrupted" for (run, *_) in runs(files).values())


def _kill_when_watched(sweep_file: Path, files: SweepFiles, log: Path) -> None:
    """Kill the driver once there is a result, and a trial in the middle that MLflow shows."""
    driver = start("run", sweep_file, "--output", files.root, log=log)
    wait_until(lambda: exists(files.trial(next(iter(KEYS))).result) or driver.poll() is not None, "a result", pause=0.1)
    wait_until(lambda: trains_in_the_middle(files) or driver.poll() is not None, "a trial to train", pause=0.1)
    shown = "MLflow to show a trial that trains"
    wait_until(lambda: is_watched_training(files) or driver.poll() is not None, shown, pause=1.0)
    assert driver.poll() is None, log.read_text()
    below = descendants(driver.pid)
    kill(driver.pid)
    driver.wait(PATIENCE)
    wait_until(lambda: not able_to_write(below), "the embedded cluster to end with its driver", pause=0.1)
