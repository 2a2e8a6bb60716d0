"""A tuned sweep from its file to its report, in one process: candidates first, then the best of each setting."""

from __future__ import annotations

import csv
import io
import itertools
import json
import shutil
import statistics
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dpsweep.accounting import account_together
from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.comparison.record import rows
from dpsweep.orchestration.comparison.stored import stored_record
from dpsweep.orchestration.comparison.trials_table import as_csv, trial_table
from dpsweep.orchestration.pipeline import NoDisplay, Outcome, RunRequest, render_again, run, run_sweep
from dpsweep.orchestration.pipeline.stage import run_stage
from dpsweep.orchestration.pipeline.winners import best_candidates
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.published import TrialState
from dpsweep.orchestration.store.status import RecordingStatus
from tests.known import known
from tests.orchestration.reference import assert_same_trial
from tests.orchestration.sample_grids import in_process, small

CLIPPING = ["none", {"name": "flat", "bound": 1.0}]


def request(folder: Path, **changes: object) -> RunRequest:
    tune = {
        "parameters": {"clipping.bound": [0.01, 1.0], "optimizer.learning_rate": [1e-6, 1.0]},
        "privacy": "unaccounted",
    }
    text = small(
        **{
            "data": {"name": "digits", "public_fraction": 0.2},
            "model": "logistic",
            "clipping": CLIPPING,
            "noise": "constant",
            "seeds": [0],
            "privacy": {"target_epsilon": 5, "delta": 1e-4, "accountant": "rdp"},
            "tune": tune,
            **changes,
        }
    )
    return in_process(text, folder / "out")


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run_sweep(replace(request(tmp_path_factory.mktemp("tuned")), tracking_uri=None))


def test_the_best_candidate_of_each_setting_is_trained_with_the_sweeps_seeds(outcome: Outcome) -> None:
    record = outcome.record
    assert [point.spec.seed for point in record.points] == [0, 0]
    assert {point.spec.optimizer.params["learning_rate"] for point in record.points} == {1.0}
    tuning = stored_record(outcome.files.of_tuning)
    assert len(tuning.points) == 2 + 4
    assert {point.spec.seed for point in tuning.points} == {1_000_000}
    chosen = best_candidates(tuning)
    assert known(record.sweep.adapted).winners == chosen
    for setting, winner in chosen.items():
        tried = [point for point in tuning.points if point.setting == setting]
        scores = {}
        for point in tried:
            result = known(tuning.finished(point.key))
            public = known(result.training.history[-1].public)
            scores[point.candidate] = public.main
        assert winner.score == max(scores.values())
        assert winner.candidates == len(tried) == len(winner.tried)
        assert sorted(each.score or 0.0 for each in winner.tried) == sorted(scores.values())
    baseline, private = (known(outcome.record.trial(point).tuning) for point in outcome.record.points)
    assert {place for values, _ in baseline.tried for place in values} == {"optimizer.learning_rate"}
    assert dict(private.chosen) in [values for values, _ in private.tried]
    page = Path(outcome.files.root, "report.html").read_text()
    assert "accuracy, as tuned, against clipping bound" in page


@pytest.mark.long
def test_a_clock_that_jumps_changes_no_result(
    outcome: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is set by years, to and fro, whenever it is read, from the first candidate to the report."""
    now, jumps = time.time, itertools.count()
    monkeypatch.setattr(time, "time", lambda: now() + (-1.0) ** next(jumps) * 1e8)
    again = run_sweep(replace(request(tmp_path), tracking_uri=None))
    assert next(jumps) > 50
    assert again.record.sweep.adapted == outcome.record.sweep.adapted
    assert {trial.state for trial in again.record.data().trials} == {TrialState.FINISHED}
    for point in outcome.record.points:
        assert_same_trial(outcome.files.trial(point.key), again.files.trial(point.key), point.spec.is_private)


def test_it_says_wherever_a_trial_is_shown_that_no_epsilon_counts_the_choice(outcome: Outcome) -> None:
    words = "research mode: candidates were trained on the private data, and no ε counts that one was chosen"
    baseline, private = json.loads(Path(outcome.files.root, "results.json").read_text())
    for row, places in ((baseline, 1), (private, 2)):
        assert row["tuning"] == "unaccounted"
        for together in row.get("composed", {}).values():
            assert together["kind"] == "estimate", "what candidates showed chose what was trained"
            assert {"known_seed", "unaccounted_tuning"} <= {*together["reasons"]}
            assert together["candidates"] == 4
        (note,) = [note for note in row["notes"] if note.startswith("tuned: ")]
        assert words in note
        assert note.partition(", the best of ")[0].count(",") == places - 1
    assert words in Path(outcome.files.root, "report.html").read_text()
    above = words[0].upper() + words[1:]  # among the cautions, as all trials share it
    assert above in Path(outcome.files.tuning, "report.html").read_text()


def test_its_exported_table_holds_the_notes_as_text(outcome: Outcome) -> None:
    table = trial_table(outcome.record)
    notes = [row["notes"] for row in json.loads(Path(outcome.files.results).read_text())]
    assert all(len(each) > 1 for each in notes)
    assert [row["notes"] for row in table] == ["; ".join(each) for each in notes]
    exported = csv.DictReader(io.StringIO(as_csv(table).decode()))
    assert [row["notes"] for row in exported] == [row["notes"] for row in table]


def test_the_ledger_counts_the_candidates(outcome: Outcome, tmp_path: Path) -> None:
    tuning, (_, point) = stored_record(outcome.files.of_tuning), outcome.record.points
    runs = [each for key in tuning.attempts for each in tuning.attempts[key]]
    assert len(runs) == 4
    trace = outcome.record.attempts[point.key][0].trace
    every = account_together([trace, *(each.trace for each in runs)], 1e-4)
    row = json.loads(Path(outcome.files.root, "results.json").read_text())[1]
    for scope in ("trial", "seeds", "sweep"):
        assert row["composed"][scope]["epsilon"] == pytest.approx(every.epsilon)
    assert row["composed"]["sweep"]["epsilon"] > 1.5 * row["epsilon"]
    assert (
        "The private trial, 4 candidates of their tuning included, cost ε\xa0=\xa0"
        in Path(outcome.files.root, "report.html").read_text()
    )
    shutil.copytree(outcome.files.root, tmp_path / "copy", ignore=shutil.ignore_patterns("tuning"))
    (_, alone) = rows(stored_record(SweepFiles(str(tmp_path / "copy"))))
    assert alone["composed"]["sweep"]["kind"] == "estimate"
    assert "candidates_not_counted" in alone["composed"]["sweep"]["reasons"]


def test_it_continues_and_reports_again_with_what_it_chose(outcome: Outcome) -> None:
    again = run_sweep(request(Path(outcome.files.root).parent))
    assert [point.key for point in again.record.points] == [point.key for point in outcome.record.points]
    assert [status.result and status.result.ended for status in again.record.statuses.values()] == [
        status.result and status.result.ended for status in outcome.record.statuses.values()
    ]
    assert render_again(outcome.files.root).record.sweep.adapted == outcome.record.sweep.adapted


@pytest.mark.long
def test_a_sweep_that_grows_tunes_only_what_is_new(tmp_path: Path) -> None:
    first = run_sweep(request(tmp_path, clipping="flat"))
    before = {status.key: status.result and status.result.ended for status in first.record.statuses.values()}
    second = run_sweep(request(tmp_path, clipping=["flat", "automatic"], seeds=[0, 1]))
    assert len(second.record.points) == 4
    assert all(point.is_asked for point in second.record.points)
    after = {status.key: status.result and status.result.ended for status in second.record.statuses.values()}
    assert before.items() <= after.items()
    assert len(stored_record(second.files.of_tuning).points) == 2 * 4
    wider = {"parameters": {"clipping.bound": [0.02]}, "privacy": "unaccounted"}
    third = run_sweep(request(tmp_path, clipping="flat", tune=wider)).record
    (asked,) = [point for point in third.points if point.is_asked]
    assert asked.spec.clipping.params == {"bound": 0.02}
    for point in third.points:
        (note,) = [note for note in third.trial(point).notes if note.startswith("tuned")]
        assert "no ε counts that one was chosen" in note
        assert ("clipping.bound 0.02, the best of 1" in note) == point.is_asked


@pytest.mark.long
def test_public_tuning_never_trains_on_the_private_data(tmp_path: Path) -> None:
    tune = {
        "parameters": {"optimizer.learning_rate": [1e-6, 1.0]},
        "privacy": "public",
        "data": {"name": "breast_cancer"},
        "select_by": "loss",
        "seeds": [7, 8],
    }
    outcome = run_sweep(request(tmp_path, tune=tune, data="digits", clipping="flat"))
    tuning = stored_record(outcome.files.of_tuning)
    assert {point.spec.data.name for point in tuning.points} == {"breast_cancer"}
    assert {point.spec.seed for point in tuning.points} == {7, 8}
    (point,) = outcome.record.points
    assert (point.spec.data.name, point.spec.optimizer.params["learning_rate"]) == ("digits", 1.0)
    (note,) = [note for note in outcome.record.trial(point).notes if note.startswith("tuned: ")]
    assert note.endswith("the best of 2 by loss on breast_cancer, declared public, without reading these data")


@pytest.mark.long
def test_optuna_goes_on_from_what_each_setting_has_scored(tmp_path: Path) -> None:
    tune = {
        "parameters": {"optimizer.learning_rate": {"log_uniform": [1e-6, 1.0]}},
        "privacy": "unaccounted",
        "search": "optuna",
        "samples": 8,
    }
    asked = request(tmp_path, tune=tune, clipping="flat")
    outcome = run_sweep(asked)
    tuning = stored_record(outcome.files.of_tuning)
    assert len(tuning.points) == 8
    (point,) = outcome.record.points
    found = known(outcome.record.trial(point).tuning)
    rates = [float(str(values["optimizer.learning_rate"])) for values, _ in found.tried]
    assert len(set(rates)) == 8
    best = max(found.tried, key=lambda each: each[1] or 0.0)
    assert point.spec.optimizer.params["learning_rate"] == best[0]["optimizer.learning_rate"]
    assert statistics.median(rates[4:]) > max(rates[:4]), "where more is learnt"
    Path(outcome.files.manifest).unlink()  # as if it had died between the tuning and the sweep
    again = stored_record(run_sweep(asked).files.of_tuning)
    assert [each.key for each in again.points] == [each.key for each in tuning.points]
    assert {status.result and status.result.ended for status in again.statuses.values()} == {
        status.result and status.result.ended for status in tuning.statuses.values()
    }


def test_candidates_that_mlflow_lacks_are_named_at_the_end(
    outcome: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are trained all the same where MLflow has gone away, and were refused."""
    asked = replace(request(tmp_path, seeds=[0], tune=None, clipping="flat"), tracking_uri="http://127.0.0.1:1")
    lacking = RecordingStatus(recorded=1, trials=2, failure="away", command=f"dpsweep record {asked.files.tuning}")
    monkeypatch.setattr(run, "_run_candidates", lambda asked, display: replace(outcome, recording=lacking))
    monkeypatch.setattr(run, "_run_tuned", lambda asked, display, winners: run_stage(asked, display))
    monkeypatch.setattr(run, "best_candidates", lambda record: {})
    recording = known(run.run_tuning(asked, NoDisplay()).recording)
    assert recording.missing().endswith(f"`dpsweep record {asked.files.root}` records the rest")


def test_a_setting_without_a_usable_candidate_is_an_error(outcome: Outcome) -> None:
    with pytest.raises(InvalidInput, match="is no tuning"):
        best_candidates(outcome.record)
