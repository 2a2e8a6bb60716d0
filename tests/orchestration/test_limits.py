"""Runs that stop early, and trials that start anew."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from rich.console import Console

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.records.files import exists
from dpsweep.orchestration.commands.status_command import headline, picture
from dpsweep.orchestration.execution.environment import IN_PROCESS
from dpsweep.orchestration.pipeline import Outcome, RunRequest, run_sweep
from dpsweep.orchestration.store.attempts import read_attempts
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.limits import NO_LIMITS, Limits, Spent
from dpsweep.orchestration.store.published import TrialState
from dpsweep.orchestration.store.results import TrialResult
from dpsweep.orchestration.store.status import SweepStatus, TrialStatus
from dpsweep.orchestration.store.status_snapshot import read_snapshot
from dpsweep.orchestration.sweeps.grid import grid
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.orchestration.sweeps.user_code import permitted
from dpsweep.orchestration.tracking.tracker import NO_TRACKING
from dpsweep.workers.own_code.imports import NO_CODE
from tests.known import known
from tests.orchestration.sample_grids import key_in, small
from tests.orchestration.sample_results import result_of

ONE: Mapping[str, Any] = {"model": "logistic", "clipping": "flat", "noise": "constant", "seeds": [0, 1, 2], "epochs": 2}
STUMBLES = """
import math
import pathlib
from torch import nn


def build(feature_shape, num_classes):
    return Stumbles(math.prod(feature_shape), num_classes)


class Stumbles(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.layer = nn.Linear(inputs, outputs)

    def forward(self, features):
        if self.training and len(features) > 8 and pathlib.Path({flag!r}).exists():
            raise RuntimeError("it stumbled")
        return self.layer(features.flatten(1))
"""


def run(
    folder: Path,
    *retry: str,
    limits: Limits = NO_LIMITS,
    address: str = IN_PROCESS,
    tracking_uri: str | None = NO_TRACKING,
    **changes: object,
) -> Outcome:
    text = small(**{**ONE, **changes})
    sweep = parse_sweep(text)
    code = permitted(sweep, folder) if sweep.own_components else NO_CODE
    request = RunRequest(sweep, text, str(folder / "out"), address, tracking_uri, code=code, limits=limits, retry=retry)
    return run_sweep(request)


def states(outcome: Outcome) -> list[TrialState]:
    return [outcome.record.status(point.key).state for point in outcome.record.points]


def said(files: SweepFiles) -> tuple[str, str]:
    snapshot = known(read_snapshot(files.status))
    return snapshot.state, headline(snapshot).plain


def test_a_run_trains_as_many_trials_as_it_may_and_the_next_one_the_rest(tmp_path: Path) -> None:
    first = run(tmp_path, limits=Limits(trials=2))
    assert states(first) == [TrialState.FINISHED, TrialState.FINISHED, TrialState.PENDING]
    state, line = said(first.files)
    assert state == "stopped"
    assert line.endswith("(--max-trials); 1 trial is left, and the same command continues")
    assert str(first.stopped) in line
    second = run(tmp_path, limits=Limits(trials=2))
    assert (states(second), second.stopped) == ([TrialState.FINISHED] * 3, None)
    assert said(second.files)[0] == "finished"


@pytest.mark.long
def test_a_trial_that_is_stopped_at_an_epoch_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under Ray, where the scheduler's stops must be told from those of the run: see `execution/test_limits.py`."""

    def after_one_epoch(status: SweepStatus) -> str | None:
        return "enough" if any(trial.progress for trial in status.trials) else None

    with monkeypatch.context() as patched:
        patched.setattr(SweepStatus, "must_stop", property(after_one_epoch))
        outcome = run(tmp_path, seeds=0, epochs=3)
    (point,) = outcome.record.points
    trial = outcome.files.trial(point.key)
    assert exists(trial.checkpoint)
    assert not exists(trial.result)
    assert outcome.stopped == "enough; 1 trial is left, and the same command continues"
    again, whole = run(tmp_path, seeds=0, epochs=3), run(tmp_path / "whole", seeds=0, epochs=3)
    models = [Path(each.files.trial(point.key).model).read_bytes() for each in (again, whole)]
    assert models[0] == models[1]
    assert len(read_attempts(again.files, point.key)) == 1


@pytest.fixture
def stumbling(tmp_path: Path) -> Path:
    (tmp_path / "flag").touch()
    (tmp_path / "stumbles.py").write_text(STUMBLES.replace("{flag!r}", repr(str(tmp_path / "flag"))))
    return tmp_path


@pytest.mark.long
def test_after_enough_failures_a_run_stops_and_what_failed_starts_anew(stumbling: Path) -> None:
    outcome = run(stumbling, limits=Limits(failures=2), model="stumbles:build")
    assert states(outcome) == [TrialState.FAILED, TrialState.FAILED, TrialState.PENDING]
    assert "2 trials have failed (--stop-after-failures 2); 1 trial is left" in said(outcome.files)[1]
    (stumbling / "flag").unlink()
    failed = [point.key for point in outcome.record.points][:2]
    noted = Path(outcome.files.trial(failed[0]).private, "left.txt")
    noted.write_text("of the attempt that failed")
    again = run(stumbling, "failed", limits=Limits(trials=1), model="stumbles:build")
    assert not noted.exists()
    assert states(again) == [TrialState.FINISHED, TrialState.PENDING, TrialState.PENDING]


@pytest.mark.long
def test_a_finished_trial_starts_anew_when_asked_and_both_starts_are_counted(tmp_path: Path) -> None:
    first = run(tmp_path, seeds=[0, 1], clipping=["none", "flat"], noise_source="os_entropy")
    key, other = key_in(first.files.root, "flat-seed0"), key_in(first.files.root, "flat-seed1")
    before = {name: Path(first.files.trial(name).model).read_bytes() for name in (key, other)}
    again = run(tmp_path, key[:-4], seeds=[0, 1], clipping=["none", "flat"], noise_source="os_entropy")
    after = {name: Path(again.files.trial(name).model).read_bytes() for name in (key, other)}
    assert (after[key] != before[key], after[other] == before[other]) == (True, True)
    rows = {row["key"]: row for row in json.loads(Path(again.files.results).read_text())}
    assert rows[key]["composed_epsilon"] > 1.2 * rows[key]["epsilon"]
    assert math.isclose(rows[other]["composed_epsilon"], rows[other]["epsilon"])


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("name", "message"),
    [("nothing", "is no trial of the sweep; give failed, all, or one of: flat-"), ("flat-", "fits 3 trials")],
)
def test_a_name_that_fits_no_trial_or_several_is_refused(tmp_path: Path, name: str, message: str) -> None:
    files = run(tmp_path, limits=Limits(trials=1)).files
    before = sorted(path for path in Path(files.trials).rglob("*"))
    with pytest.raises(InvalidInput, match=message):
        run(tmp_path, name)
    assert sorted(path for path in Path(files.trials).rglob("*")) == before


def test_time_and_failures_stop_a_run() -> None:
    trials = [TrialStatus(key, 10) for key in "abc"]
    status = SweepStatus(trials, lambda trial: None, Limits(hours=1.0, failures=2))
    assert (status.must_stop, status.stopped_by) == (None, status.stopped_by)
    status.change("a", state=TrialState.FAILED)
    assert status.must_stop is None
    status.began -= 3601.0  # the clock jumps
    assert status.must_stop is None
    status._began -= 3601.0
    assert status.must_stop == "its time is over (--max-hours 1)"
    status._began += 3601.0
    status.change("b", state=TrialState.FAILED)
    assert status.stopped_by == (
        "2 trials have failed (--stop-after-failures 2); 1 trial is left, and the same command continues"
    )
    status.change("c", state=TrialState.FINISHED)
    assert status.stopped_by is None


def test_gpu_hours_are_those_that_trials_of_this_run_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    for clock in ("time", "monotonic"):
        monkeypatch.setattr(time, clock, lambda: now)
    trials = [TrialStatus(key, 10) for key in "abc"]
    status = SweepStatus(trials, lambda trial: None, Limits(gpu_hours=2.0), gpus=dict.fromkeys("abc", 0.5))
    status.restore(result_of_an_earlier_run("c"))
    status.change("a", state=TrialState.TRAINING)
    now += 3600.0
    status.change("b", state=TrialState.TRAINING)
    status.change("a", state=TrialState.ACCOUNTING)
    now += 7200.0
    assert status.spent == Spent(10800.0, 0.5 * (3600.0 + 7200.0), 0)
    assert status.must_stop is None
    now += 3600.0
    assert status.must_stop == "its GPU-hours are used (--max-gpu-hours 2)"


@pytest.mark.parametrize("jump", [-864000.0, 259200.0])
def test_a_clock_that_is_set_while_a_trial_trains_changes_neither_its_duration_nor_what_is_spent(
    monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    wall, since = 1e9, 50.0
    monkeypatch.setattr(time, "time", lambda: wall)
    monkeypatch.setattr(time, "monotonic", lambda: since)
    status = SweepStatus([TrialStatus(key, 10) for key in "ab"], lambda trial: None, gpus={"a": 1.0, "b": 1.0})
    status.change("a", state=TrialState.TRAINING)
    wall, since = wall + jump + 60.0, since + 60.0
    assert status.spent == Spent(60.0, 60.0, 0)
    status.change("a", state=TrialState.ACCOUNTING)
    status.change("b", state=TrialState.TRAINING)
    wall, since = wall + 30.0, since + 30.0
    for key in "ab":
        status.change(key, state=TrialState.FAILED)
    assert status["a"].trained == 1e9 + 60.0
    assert status["a"].ended == 1e9 + 90.0, "not before it began"
    assert status.spent == Spent(90.0, 90.0, 2)


def result_of_an_earlier_run(key: str) -> TrialResult:
    return replace(result_of(grid(parse_sweep(small()))[0], 0.5), key=key, started=10.0, ended=900.0)


@pytest.mark.long
def test_a_driver_that_its_job_starts_again_has_what_the_earlier_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its limits are those of the job, and --retry is done once: a trial that is trained anew again costs again."""
    monkeypatch.setenv("DPSWEEP_JOB", "small-1")
    first = run(tmp_path, limits=Limits(hours=1.0, trials=1), noise_source="os_entropy")
    snapshot = known(read_snapshot(first.files.status))
    assert snapshot.limits == ("--max-hours 1", "--max-trials 1")
    assert snapshot.spent.trials == 1
    again = run(tmp_path, "all", limits=Limits(hours=1.0, trials=1), noise_source="os_entropy")
    assert states(again) == [TrialState.FINISHED, TrialState.PENDING, TrialState.PENDING]
    assert len(read_attempts(again.files, again.record.points[0].key)) == 1
    more = known(read_snapshot(again.files.status))
    assert more.spent.seconds > snapshot.spent.seconds
    monkeypatch.setenv("DPSWEEP_JOB", "small-2")
    other = run(tmp_path, limits=Limits(trials=1), noise_source="os_entropy")
    assert states(other) == [TrialState.FINISHED, TrialState.FINISHED, TrialState.PENDING]


def test_gpu_hours_without_gpus_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"the trials hold no GPU \(resources\.gpus is 0\)"):
        run(tmp_path, limits=Limits(gpu_hours=1.0))
    assert not (tmp_path / "out").exists()


def test_what_a_run_is_limited_to_stands_in_its_status(tmp_path: Path) -> None:
    outcome = run(tmp_path, limits=Limits(trials=1), seeds=[0, 1])
    snapshot = known(read_snapshot(outcome.files.status))
    console = Console(width=200)
    with console.capture() as captured:
        console.print(picture(snapshot))
        console.print(picture(replace(snapshot, state="finished")))
    assert captured.get().count("limits of this run: --max-trials 1") == 1
    assert (snapshot.steps, snapshot.parts) == (snapshot.trials[0].step, 1)
    assert snapshot.shard_bytes > 0


def curves(outcome: Outcome, key: str) -> tuple[str, int]:
    """The id of the trial's run, and how many epochs its curves have."""
    client = MlflowClient(outcome.tracking_uri)
    (experiment,) = client.search_experiments(filter_string="name = 'dpsweep'")
    (found,) = client.search_runs([experiment.experiment_id], f"tags.`dpsweep.trial_key` = '{key}'")
    return str(found.info.run_id), len(client.get_metric_history(found.info.run_id, "epoch"))


@pytest.mark.long
def test_the_curves_of_a_trial_that_starts_anew_start_anew(tmp_path: Path) -> None:
    first = run(tmp_path, tracking_uri=None, seeds=[0, 1])
    again, other = (point.key for point in first.record.points)
    before = curves(first, again), curves(first, other)
    second = run(tmp_path, again, tracking_uri=None)
    assert curves(second, again) != before[0]
    assert curves(second, again)[1] == before[0][1] == 2
    assert curves(second, other) == before[1]


@pytest.mark.parametrize(
    "limits", [{"gpu_hours": 0.0}, {"hours": 0.0}, {"hours": math.nan}, {"trials": 0}, {"failures": -1}]
)
def test_limits_that_allow_nothing_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=r"the (maximum|number) of (hours|GPU-hours|trials|failures)"):
        Limits(**limits)


def test_candidates_and_trials_have_their_limits_together(tmp_path: Path) -> None:
    tune = {"parameters": {"optimizer.learning_rate": [0.1, 1.0]}, "privacy": "unaccounted"}
    data = {"name": "digits", "public_fraction": 0.2}
    outcome = run(tmp_path, limits=Limits(trials=3), data=data, tune=tune)
    assert states(outcome) == [TrialState.FINISHED, TrialState.PENDING, TrialState.PENDING], "after two candidates"
    assert outcome.spent.trials == 3
