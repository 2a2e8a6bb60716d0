"""Private selection in a sweep, from its file to its report, in one process: what leaves it, and what never does."""

from __future__ import annotations

import json
import math
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpsweep.accounting import RandomTrials, account, account_selection, individual_epsilons, privacy_curve
from dpsweep.accounting.errors import DataCorruption, InvalidInput, UnsupportedMechanism
from dpsweep.accounting.records.traces import read_trace
from dpsweep.orchestration.comparison.across_sweeps import compare
from dpsweep.orchestration.comparison.claims import unfounded
from dpsweep.orchestration.comparison.evidence import NO_EVIDENCE
from dpsweep.orchestration.comparison.stored import stored_record
from dpsweep.orchestration.execution.environment import IN_PROCESS
from dpsweep.orchestration.execution.reaccounting import ReaccountingRequest, account_trials_again
from dpsweep.orchestration.execution.upkeep import damaged_files, prune_norms
from dpsweep.orchestration.pipeline import Outcome, RunRequest, render_again, run, run_sweep
from dpsweep.orchestration.report.board import Board
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.limits import Limits
from dpsweep.orchestration.sweeps.manifest import read_manifest
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.orchestration.sweeps.tune import candidates_of
from dpsweep.workers.trials.trial import run_trial
from tests.known import known
from tests.orchestration.invoking import printed, refused
from tests.orchestration.sample_grids import in_process, tuned
from tests.orchestration.sample_results import sample_record

TUNE = {
    "parameters": {"clipping.bound": [0.01, 1.0], "optimizer.learning_rate": [0.01, 1.0]},
    "privacy": "private_selection",
    "trials": 4,
}
LAW = RandomTrials(4)
TARGET = 5.0


def text_of(**changes: object) -> str:
    privacy = {"target_epsilon": TARGET, "delta": 1e-4, "accountant": "rdp"}
    data = {"name": "digits", "public_fraction": 0.2}
    return tuned(**{"data": data, "epochs": 1, "privacy": privacy, "tune": TUNE, **changes})


def request(folder: Path, **changes: object) -> RunRequest:
    return in_process(text_of(**changes), folder / "out")


@pytest.fixture(scope="module")
def selected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Path]:
    """A finished sweep, and a copy of its candidates as they were before they were deleted."""
    folder = tmp_path_factory.mktemp("selected")
    kept = folder / "candidates"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "delete_folder", lambda uri: shutil.move(uri, kept))
        patch.setattr("dpsweep.orchestration.sweeps.tuning_stages.RandomTrials.number_at", lambda law, uniform: 3)
        return run_sweep(replace(request(folder), tracking_uri=None)), kept


def test_each_trial_is_the_best_of_its_candidates_and_the_very_run(selected: tuple[Outcome, Path]) -> None:
    outcome, kept = selected
    candidates = stored_record(SweepFiles(str(kept)))
    drawn = candidates.sweep.adapted.drawn if candidates.sweep.adapted else {}
    assert len(drawn) == 4
    assert len(candidates.points) == sum(map(len, drawn.values())) == len({p.spec.seed for p in candidates.points})
    for point in outcome.record.points:
        mine = [each for each in candidates.points if each.setting == point.setting]
        scores = {}
        for each in mine:
            result = known(candidates.finished(each.key))
            public = known(result.training.history[-1].public)
            scores[each.key] = public.main
        assert scores[point.key] == max(scores.values())
        assert next(key for key in scores if scores[key] == max(scores.values())) == point.key, "the earliest"
        for name in ("model.pt", "trace.arrow", "result.json"):
            ours, theirs = Path(outcome.files.trial(point.key).root, name), kept / "trials" / point.key / name
            assert ours.read_bytes() == theirs.read_bytes()


def test_the_epsilon_is_that_after_the_selection_wherever_it_is_said(selected: tuple[Outcome, Path]) -> None:
    outcome, _ = selected
    files = outcome.files
    rows = {row["key"]: row for row in json.loads(Path(files.results).read_text())}
    for point in outcome.record.points:
        row = rows[point.key]
        (note,) = [note for note in row["notes"] if note.startswith("private selection: ")]
        assert "(4 expected, drawn from 4) by accuracy on the public part of the data" in note
        assert row["tuning"] == "private_selection"
        if not point.is_private:
            continue
        trace = read_trace(files.trial(point.key).trace)
        assert trace.selection == LAW
        one = replace(trace, selection=None)
        after = account_selection(one, LAW, 1e-4, "rdp").epsilon
        assert row["epsilon"] == pytest.approx(after)
        assert 0.99 * TARGET < after <= TARGET
        assert account(one, 1e-4, "rdp").epsilon < 0.7 * after
        assert (row["kind"], row["accountant"], row["risks"]) == ("guarantee", "selection-rdp", [])
        result = known(outcome.record.finished(point.key))
        assert set(result.epsilons) == {result.worst_case.epsilon}, "nothing of the run is shown before it is chosen"
        assert row["composed"]["trial"]["epsilon"] == row["epsilon"] < row["composed"]["sweep"]["epsilon"]
        assert note in Path(files.report).read_text()
    with sqlite3.connect(files.database) as store:
        query = "select value from latest_metrics where key like '%epsilon' and key not like 'deviation/%'"
        shown = {value for (value,) in store.execute(query)}
    assert shown
    assert all(value >= 0.99 * TARGET for value in shown)


def test_seeds_stay_one_setting_beside_other_sweeps_whatever_each_has_chosen(
    selected: tuple[Outcome, Path], tmp_path: Path
) -> None:
    records = {"a": selected[0].record, "b": sample_record(tmp_path)[0]}
    found = compare(records, {"a": NO_EVIDENCE, "b": NO_EVIDENCE})
    ours = [line for each in found.settings for line in each.lines if line.folder == "a"]
    assert [len(line.setting.trials) for line in ours] == [2, 2]
    assert "one of 0.01, 1.0" in [value for each in found.between for value in each.values["a"]]


def test_only_the_best_and_nothing_of_their_number_leaves_the_selection(selected: tuple[Outcome, Path]) -> None:
    outcome, kept = selected
    out = Path(outcome.files.root)
    keys = {point.key for point in outcome.record.points}
    losers = {path.name for path in (kept / "trials").iterdir()} - keys
    assert losers
    assert {path.name for path in (out / "trials").iterdir()} == keys
    assert not Path(outcome.files.selection).exists()
    seeds = {str(point.spec.seed) for point in stored_record(SweepFiles(str(kept))).points if point.key in losers}
    for path in filter(Path.is_file, out.rglob("*")):
        content = path.read_bytes()
        assert not any(name.encode() in content for name in losers | seeds), path
    with sqlite3.connect(outcome.files.database) as store:
        (runs,) = store.execute("select count(*) from runs").fetchone()
    assert runs == 1 + len(keys) + 2, "the sweep, its trials, and its two settings over seeds"
    for point in outcome.record.points:
        result = known(outcome.record.finished(point.key))
        assert not point.is_private or (result.started, result.ended) == (0.0, 0.0)


def test_it_is_verified_reported_and_continued_without_another_selection(selected: tuple[Outcome, Path]) -> None:
    outcome, _ = selected
    record = stored_record(outcome.files)
    assert damaged_files(outcome.files, record) == []
    again = run_sweep(request(Path(outcome.files.root).parent))
    assert [point.key for point in again.record.points] == [point.key for point in outcome.record.points]
    assert render_again(outcome.files.root).record.sweep.adapted == outcome.record.sweep.adapted
    point = next(point for point in record.points if point.is_private)
    result = known(record.finished(point.key))
    trace = read_trace(outcome.files.trial(point.key).trace)
    alone = account(replace(trace, selection=None), 1e-4, "rdp")
    status = record.status(point.key)
    forged = replace(status, result=replace(result, worst_case=alone))
    claims = replace(record, statuses={**record.statuses, point.key: forged})
    assert any("but its trace costs" in line for line in unfounded(outcome.files, claims))
    for compute in (
        lambda: privacy_curve(trace),
        lambda: individual_epsilons([0], [[1.0]], trace, 1e-4),
        lambda: list(
            account_trials_again(
                outcome.files, ReaccountingRequest(point.key, None, None, (), "", False), IN_PROCESS, print, print
            )
        ),
    ):
        with pytest.raises(UnsupportedMechanism, match="best of a random number of runs"):
            compute()


class Killed(BaseException):
    """What nothing catches."""


@pytest.mark.long
def test_a_killed_selection_goes_on_with_the_runs_that_were_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained: list[str] = []
    train = run_trial

    def killed(spec: Any, *rest: Any, **options: Any) -> Any:
        if len(trained) == 2:
            raise Killed
        trained.append(spec.key)
        return train(spec, *rest, **options)

    asked = request(tmp_path, seeds=[0], clipping=["none", "flat"], tune={**TUNE, "trials": 6})
    files = SweepFiles(asked.files.root)
    monkeypatch.setattr("dpsweep.orchestration.sweeps.tuning_stages.RandomTrials.number_at", lambda law, uniform: 3)
    monkeypatch.setattr("dpsweep.workers.trials.trial.run_trial", killed)
    with pytest.raises(Killed):
        run_sweep(asked)
    stage = files.of_selection
    drawn = known(stored_record(stage).sweep.adapted)
    assert not Path(files.manifest).exists()
    assert Path(files.private).stat().st_mode & 0o077 == 0
    assert "how far it has come is not shown" in refused(InvalidInput, "status", files.root)
    with pytest.raises(InvalidInput, match="unfinished private selection of another version"):
        run_sweep(request(tmp_path, seeds=[0], clipping=["none", "flat"], tune={**TUNE, "trials": 7}))
    before = list(trained)
    monkeypatch.setattr("dpsweep.orchestration.sweeps.tuning_stages.RandomTrials.number_at", lambda law, uniform: 50)

    def counted(spec: Any, *rest: Any, **options: Any) -> Any:
        trained.append(spec.key)
        return train(spec, *rest, **options)

    monkeypatch.setattr("dpsweep.workers.trials.trial.run_trial", counted)
    outcome = run_sweep(asked)
    assert len(trained) == len(set(trained)) == 6
    assert trained[:2] == before
    assert {point.key for point in outcome.record.points} <= set(trained)
    assert {p.spec.seed for p in outcome.record.points} <= {r.seed for runs in drawn.drawn.values() for r in runs}
    assert prune_norms(outcome.files, 0.0)

    result = outcome.files.trial(outcome.record.points[1].key).result
    Path(result).unlink()
    with pytest.raises(DataCorruption, match="have no result; restore them from a backup"):
        run_sweep(asked)
    with pytest.raises(InvalidInput, match="holds another version of this sweep"):
        run_sweep(request(tmp_path, seeds=[0, 1], clipping=["none", "flat"], tune={**TUNE, "trials": 6}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"limits": Limits(trials=1)}, "--max-trials"),
        ({"retry": ("all",)}, "--retry"),
        ({"sources": ("elsewhere",)}, "--from"),
        ({"output": "s3://bucket/sweep"}, "an object store"),
    ],
)
def test_a_run_that_would_show_or_repeat_a_selection_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        run_sweep(replace(request(tmp_path), **changes))


def test_encryption_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPSWEEP_KEY", "0" * 64)
    with pytest.raises(InvalidInput, match="goes without DPSWEEP_KEY"):
        run_sweep(request(tmp_path))


def test_a_plan_shows_the_epsilon_after_selection_and_what_other_ways_cost() -> None:
    plan = plan_sweep(parse_sweep(text_of(tune={**TUNE, "trials": 14})))
    assert plan.refusals == ()
    private = [trial for trial in plan.trials if trial.spec.is_private]
    assert len(private) == len(candidates_of(parse_sweep(text_of()).tune or pytest.fail("no tune")))
    for trial in private:
        assert trial.worst_case.epsilon == pytest.approx(TARGET, rel=0.01)
        assert trial.worst_case.accountant == "selection-rdp"
    assert "and to release 14 of them" in plan.notes[-1]
    words = plan.notes[-1].replace(",", " ").replace(";", " ").split()
    alone, every = float(words[words.index("alone") + 2]), float(words[-1])
    assert alone < TARGET < every < math.inf


def test_candidates_that_cost_differently_are_refused() -> None:
    clipping = ["none", {"name": "dpsgd_f", "count_noise_multiplier": 5.0}]
    tune = {**TUNE, "parameters": {"clipping.count_noise_multiplier": [5.0, 10.0]}}
    plan = plan_sweep(parse_sweep(text_of(clipping=clipping, tune=tune)))
    assert any("is another mechanism than others of its setting" in refusal.reason for refusal in plan.refusals)


def test_a_draw_is_kept_whatever_stops_the_run_and_space_is_asked_for_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawing again until the number fits would change the law of the number that is accounted for."""
    asked = request(tmp_path)
    free = {"bytes": 1}
    usage = type("Usage", (), {"free": property(lambda _: free["bytes"])})
    monkeypatch.setattr("dpsweep.orchestration.execution.storage_checks.shutil.disk_usage", lambda _: usage())
    with pytest.raises(InvalidInput, match="MiB free, but the sweep may write"):
        run_sweep(asked)
    candidates = asked.files.of_selection
    assert not Path(candidates.root).exists(), "nothing was drawn"
    free["bytes"] = 2**40

    def lost(*_: object, **__: object) -> None:
        free["bytes"] = 1
        raise InvalidInput("no node is left")

    monkeypatch.setattr("dpsweep.orchestration.pipeline.stage.backend", lost)
    with pytest.raises(InvalidInput, match="no node is left"):
        run_sweep(asked)
    drawn = known(stored_record(candidates).sweep.adapted)
    assert drawn.drawn
    with pytest.raises(InvalidInput) as told:
        run_sweep(asked)
    assert str(told.value) == "no node is left", "with a full disk, the number of candidates is not told"
    assert stored_record(candidates).sweep.adapted == drawn


def test_a_draw_of_any_number_is_stored_and_no_list_tells_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = request(tmp_path)
    monkeypatch.setattr("dpsweep.orchestration.sweeps.tuning_stages.RandomTrials.number_at", lambda *_: 12_000)

    def lost(*_: object, **__: object) -> None:
        raise InvalidInput("no node is left")

    monkeypatch.setattr("dpsweep.orchestration.pipeline.stage._planned", lost)
    with pytest.raises(InvalidInput, match="no node is left"):
        run_sweep(asked)
    candidates = asked.files.of_selection
    drawn = known(parse_sweep(read_text_of(candidates)).adapted)
    assert {len(runs) for runs in drawn.drawn.values()} == {12_000}
    assert len(drawn.drawn) * 12_000 > 40_000, "more than a sweep file may have values"
    (found,) = json.loads(printed("list", tmp_path, "--json"))["sweeps"]
    assert (found["folder"], found["state"], found["trials"]) == (asked.files.root, "private selection", {})
    board = Board([str(tmp_path)])
    board.refresh()
    assert "12000" not in json.dumps(board.state())
    said = printed("delete", asked.files.root, "--yes")
    assert (said.strip(), "12000" in said) == (f"deleted the unfinished private selection in {asked.files.root}", False)
    assert not Path(asked.files.root).exists()


def read_text_of(files: SweepFiles) -> str:
    manifest = known(read_manifest(files))
    return manifest.text
