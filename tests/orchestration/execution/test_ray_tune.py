"""Trials that a scheduler stops: neither finished nor failed, at the cost that they had when they were stopped."""

from __future__ import annotations

import csv
import json
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from dpsweep.accounting.accountants.account import account
from dpsweep.accounting.mechanism.reasons import weakened
from dpsweep.accounting.records.files import exists
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.published import PublishedEpoch
from dpsweep.orchestration.store.results import StoppedTrial, read_result
from dpsweep.orchestration.sweeps.grid import grid
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.planned import PlannedTrial
from dpsweep.orchestration.sweeps.schema import parse_sweep
from tests.orchestration.processes import dpsweep
from tests.orchestration.sample_grids import small


class Harmful:
    """What makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return Path.touch, (self.file,)


@pytest.mark.long
def test_a_state_of_tune_from_somebody_else_is_not_unpickled(tmp_path: Path) -> None:
    from ray.tune import ExperimentAnalysis  # late: other tests here do without

    from dpsweep.orchestration.execution.ray_tune import _nothing_unpickled

    harm = {"_type": "CLOUDPICKLE_FALLBACK", "value": pickle.dumps(Harmful(tmp_path / "ran")).hex()}
    (tmp_path / "tune").mkdir()
    (tmp_path / "tune" / "experiment_state-2026-01-31_12-00-00.json").write_text(json.dumps({"trial_data": harm}))
    with _nothing_unpickled():
        assert ExperimentAnalysis(tmp_path / "tune", trials=[]).trials == []
    assert not (tmp_path / "ran").exists()
    with pytest.raises(TypeError):  # so much for what Tune does by itself
        ExperimentAnalysis(tmp_path / "tune", trials=[])
    assert (tmp_path / "ran").exists()


EPOCHS = 5
SWEEP = small(
    data={"name": "digits", "public_fraction": 0.1},
    optimizer=[{"name": "sgd", "learning_rate": rate} for rate in (0.5, 0.001, 0.5)],
    clipping=["none", {"name": "flat", "bound": 1.0}],
    noise=["constant", "constant", {"name": "constant", "noise_multiplier": 50.0}],
    zip=["optimizer", "noise"],
    seeds=0,
    epochs=EPOCHS,
    scheduler={"name": "asha", "grace_epochs": 2, "reduction_factor": 2},
    resources={"max_concurrent": 1},
)
"""One trial after the other. Of the two that differ in the learning rate alone, the one that hardly learns is stopped
when it is first compared with the other; a baseline and a setting with much noise learn as little, and go on."""
GOOD, STOPPED, NOISY = (point.key for point in grid(parse_sweep(SWEEP)) if point.is_private)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> SweepFiles:
    folder = tmp_path_factory.mktemp("asha")
    (folder / "sweep.yaml").write_text(SWEEP)
    return SweepFiles(str(folder / "out"))


@pytest.fixture(scope="module")
def trials(files: SweepFiles) -> dict[str, dict[str, Any]]:
    """Of two drivers, the second of which compares its trials with those of the first."""
    first = run(files, "--max-trials", "3")
    assert {key for key, trial in first.items() if trial["status"] == "finished"} >= {GOOD}
    assert first[STOPPED]["status"] == "pending"
    return run(files)


def run(files: SweepFiles, *options: str) -> dict[str, dict[str, Any]]:
    done = dpsweep("run", Path(files.root).parent / "sweep.yaml", "--output", files.root, "--json", *options)
    assert done.returncode == 0, done.stderr
    return {trial["key"]: trial for trial in json.loads(done.stdout)["trials"]}


@pytest.mark.long
def test_a_stopped_trial_costs_what_it_ran(files: SweepFiles, trials: dict[str, dict[str, Any]]) -> None:
    assert [key for key, trial in trials.items() if trial["status"] == "stopped"] == [STOPPED]
    assert [trial["status"] for key, trial in trials.items() if key != STOPPED] == ["finished"] * 4
    assert trials[NOISY]["accuracy"] < trials[GOOD]["accuracy"] - 0.2
    assert (
        trials[STOPPED]["error"] == "by the scheduler after epoch 2 of 5; its accuracy and ε are those of that moment"
    )
    stopped = read_result(files.trial(STOPPED).result)
    assert isinstance(stopped, StoppedTrial)
    planned = next(planned for planned in plan_sweep(parse_sweep(SWEEP)).trials if planned.spec.key == STOPPED)
    ran = planned.trace.until(2 * planned.trace.steps // EPOCHS)
    assert stopped.trace == replace(ran, ended_by_results=True)
    assert stopped.worst_case.kind == "estimate"
    assert stopped.worst_case == weakened(account(stopped.trace, 1e-5, stopped.worst_case.accountant), ("known_seed",))
    assert trials[STOPPED]["epsilon"] == stopped.worst_case.epsilon < trials[GOOD]["epsilon"]
    assert [epoch.metrics["epsilon"] for epoch in stopped.history][-1] >= stopped.worst_case.epsilon
    assert not exists(files.trial(STOPPED).checkpoint), "it holds the key of the noise"


@dataclass
class Seen:
    """Observes epochs of earlier drivers."""

    epochs: dict[str, tuple[PublishedEpoch, ...]]

    def seen(self) -> Iterator[tuple[PlannedTrial, tuple[PublishedEpoch, ...]]]:
        for planned in plan_sweep(parse_sweep(SWEEP)).trials:
            yield planned, self.epochs.get(planned.key, ())


@pytest.mark.long
@pytest.mark.parametrize(
    ("own", "epoch", "accuracy", "decision"),
    [
        ((), 2, 0.6, "CONTINUE"),
        ((), 2, 0.4, "STOP"),
        ((0.4, 0.6), 3, 0.1, "CONTINUE"),  # it was compared after two epochs
        ((0.4,), 2, 0.4, "STOP"),
    ],
)
def test_a_trial_is_compared_with_what_other_drivers_saw(
    own: tuple[float, ...], epoch: int, accuracy: float, decision: str
) -> None:
    """The other trial reached 0.5 after two epochs; its last one does not count, as ASHA ignores last ones."""
    from ray.tune.experiment import Trial  # late: other tests here do without

    from dpsweep.orchestration.execution.ray_tune import _AshaByGroup

    seen = Seen({GOOD: epochs(0.0, 0.5, 0.0, 0.0, 1.0), STOPPED: epochs(*own)})
    scheduler: Any = _AshaByGroup(parse_sweep(SWEEP).scheduler, seen)  # type: ignore[arg-type]
    trial = Trial("f", config={"key": STOPPED}, stub=True)
    scheduler.on_trial_add(None, trial)
    assert scheduler.on_trial_result(None, trial, {"epoch": epoch, "public_accuracy": accuracy}) == decision


def epochs(*accuracies: float) -> tuple[PublishedEpoch, ...]:
    steps = plan_sweep(parse_sweep(SWEEP)).trials[-1].trace.steps // EPOCHS
    return tuple(
        PublishedEpoch(number, steps * (1 + number), 1.0, metrics={"test_accuracy": 0.0, "public_accuracy": accuracy})
        for number, accuracy in enumerate(accuracies)
    )


@pytest.mark.long
def test_the_report_says_when_it_was_stopped(files: SweepFiles, trials: dict[str, dict[str, Any]]) -> None:
    page = Path(files.report).read_text()
    assert "4 of 5 trials finished" in page
    assert "The scheduler stopped 1 trial, which is in no average" in page
    assert "by the scheduler after epoch 2 of 5" in page


@pytest.mark.long
def test_every_table_marks_it(files: SweepFiles, trials: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(small(clipping="flat", noise="constant", seeds=0))
    other = ("run", tmp_path / "sweep.yaml", "--output", tmp_path / "other", "--address", "in-process")
    assert dpsweep(*other).returncode == 0
    again = dpsweep("run", Path(files.root).parent / "sweep.yaml", "--output", files.root, COLUMNS="200")
    (row,) = [line for line in again.stdout.splitlines() if line.split()[:1] == [STOPPED] and "%" in line]
    assert row.split()[1] == "(stopped)"
    assert f"{STOPPED}  stopped" in dpsweep("status", files.root, COLUMNS="200").stdout
    assert "4 finished, 1 stopped" in dpsweep("list", files.root, COLUMNS="200").stdout
    compared = dpsweep("compare", files.root, tmp_path / "other", COLUMNS="200").stdout
    assert f"left out, because a scheduler stopped them early: {STOPPED} in " in compared
    dpsweep("export", files.root, "--to", tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open() as rows:
        assert {row["status"] for row in csv.DictReader(rows) if row["key"] == STOPPED} == {"stopped"}
