"""Tuning by the exponential mechanism over disjoint parts, from a sweep's file to its report, in one process."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpsweep.accounting import ExponentialChoice, account
from dpsweep.accounting.errors import DataCorruption, InvalidInput
from dpsweep.accounting.records.traces import read_trace
from dpsweep.orchestration.comparison.stored import stored_record
from dpsweep.orchestration.execution.upkeep import damaged_files
from dpsweep.orchestration.pipeline import Outcome, RunRequest, run, run_sweep
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.workers.data import load_dataset
from dpsweep.workers.evaluation.outcomes import read_wrong
from dpsweep.workers.spec import DataPart, DataSpec
from tests.known import known
from tests.orchestration.sample_grids import in_process, tuned

BOUNDS = [0.01, 0.5, 1.0]
TUNE = {"parameters": {"clipping.bound": BOUNDS}, "privacy": "exponential_mechanism", "epsilon": 2.0}
TARGET, DELTA = 4.0, 1e-3


def text_of(**changes: object) -> str:
    privacy = {"target_epsilon": TARGET, "delta": DELTA, "accountant": "rdp"}
    return tuned(**{"data": {"name": "digits"}, "privacy": privacy, "tune": TUNE, **changes})


def request(folder: Path, **changes: object) -> RunRequest:
    return in_process(text_of(**changes), folder / "out")


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Path]:
    """A finished sweep of one seed, and a copy of its candidates as they were before they were deleted."""
    folder = tmp_path_factory.mktemp("chosen")
    kept = folder / "candidates"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "delete_folder", lambda uri: shutil.move(uri, kept))
        return run_sweep(request(folder, seeds=[0])), kept


def test_parts_are_disjoint_equal_and_cover_the_data() -> None:
    whole = load_dataset(DataSpec("digits"))
    parts = [load_dataset(DataSpec("digits", part=DataPart(place, 4))) for place in range(3)]
    last = known(parts[0].held_out)
    assert len({len(part.train) for part in parts}) == 1
    ids = np.concatenate([part.train.example_ids.numpy() for part in parts] + [last.example_ids.numpy()])
    assert sorted(ids) == sorted(whole.train.example_ids.numpy())
    for part in parts:
        assert np.array_equal(known(part.held_out).example_ids.numpy(), last.example_ids.numpy())
        assert len(part.test) == len(whole.test)
        assert part.digest() != whole.digest()
    fewer = load_dataset(DataSpec("digits", keep={"8": 0.5}, part=DataPart(0, 4)))
    assert not np.array_equal(fewer.train.example_ids.numpy(), parts[0].train.example_ids.numpy())
    for place, of in ((3, 4), (-1, 4), (0, 1)):
        with pytest.raises(InvalidInput):
            DataPart(place, of)
    with pytest.raises(InvalidInput, match="offer fewer candidates"):
        load_dataset(DataSpec("breast_cancer", part=DataPart(0, 700)))


@pytest.mark.long
def test_every_candidate_trains_on_its_own_part_and_one_is_taken_as_it_is(chosen: tuple[Outcome, Path]) -> None:
    outcome, kept = chosen
    candidates = stored_record(SweepFiles(str(kept)))
    runs: dict[str, list[DataPart]] = {}
    for point in candidates.points:
        assert point.spec.data.part is not None
        runs.setdefault(point.setting, []).append(point.spec.data.part)
        assert read_wrong(SweepFiles(str(kept)).trial(point.key).held_out) >= 0
    assert len(runs) == 2, "a baseline and a private setting"
    assert all(found == [DataPart(place, 4) for place in range(3)] for found in runs.values())
    for point in outcome.record.points:
        part = known(point.spec.data.part)
        assert not point.is_private or point.spec.clipping.params["bound"] == BOUNDS[part.place]
        for name in ("model.pt", "trace.arrow", "result.json"):
            ours, theirs = Path(outcome.files.trial(point.key).root, name), kept / "trials" / point.key / name
            assert ours.read_bytes() == theirs.read_bytes()
    keys = {point.key for point in outcome.record.points}
    losers = {point.key for point in candidates.points} - keys
    assert len(losers) == 4
    for path in filter(Path.is_file, Path(outcome.files.root).rglob("*")):
        assert not any(key.encode() in path.read_bytes() for key in losers), path


@pytest.mark.long
def test_the_epsilon_is_that_of_one_candidate_which_covers_the_choice(chosen: tuple[Outcome, Path]) -> None:
    outcome, _ = chosen
    rows = {row["key"]: row for row in json.loads(Path(outcome.files.results).read_text())}
    for point in outcome.record.points:
        row = rows[point.key]
        (note,) = [note for note in row["notes"] if note.startswith("private selection: ")]
        assert "one of 3 candidates, each trained on 1/4 of the training examples" in note
        assert row["tuning"] == "exponential_mechanism"
        if point.is_private:
            trace = read_trace(outcome.files.trial(point.key).trace)
            assert trace.selection == ExponentialChoice(3, 2.0)
            alone = account(replace(trace, selection=None), DELTA, "rdp").epsilon
            assert row["epsilon"] == pytest.approx(alone)
            assert 0.99 * TARGET < alone <= TARGET
            assert (row["kind"], row["accountant"], row["risks"]) == ("guarantee", "choice-rdp", [])
        assert note in Path(outcome.files.report).read_text()
    adapted = known(outcome.record.sweep.adapted)
    assert {winner.score for winner in adapted.winners.values()} == {None}, "a count of errors is private"


def test_it_is_verified_and_continued_without_another_choice(chosen: tuple[Outcome, Path]) -> None:
    outcome, _ = chosen
    assert damaged_files(outcome.files, stored_record(outcome.files)) == []
    again = run_sweep(request(Path(outcome.files.root).parent, seeds=[0]))
    assert [point.key for point in again.record.points] == [point.key for point in outcome.record.points]


@pytest.mark.long
def test_the_choice_favours_the_candidate_with_fewer_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound of 1e-6 learns nothing: at epsilon 2 its hundreds of further errors leave it no chance."""
    kept = tmp_path / "candidates"
    monkeypatch.setattr(run, "delete_folder", lambda uri: shutil.move(uri, kept))
    tune = {**TUNE, "parameters": {"clipping.bound": [1e-6, 1.0]}}
    loose = {"target_epsilon": 100.0, "delta": DELTA, "accountant": "rdp"}
    optimizer = {"name": "sgd", "learning_rate": 2.0}
    outcome = run_sweep(request(tmp_path, tune=tune, seeds=[0], epochs=6, privacy=loose, optimizer=optimizer))
    files = SweepFiles(str(kept))
    wrong = {
        point.spec.clipping.params["bound"]: read_wrong(files.trial(point.key).held_out)
        for point in stored_record(files).points
        if point.is_private
    }
    assert wrong[1e-6] > wrong[1.0] + 50, wrong
    assert [p.spec.clipping.params["bound"] for p in outcome.record.points if p.is_private] == [1.0]


@pytest.mark.long
def test_a_damaged_count_is_named_and_nothing_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = request(tmp_path, seeds=[0])
    monkeypatch.setattr(run, "selected_runs", lambda record, files: pytest.fail("stop"))
    with pytest.raises(BaseException, match="stop"):
        run_sweep(asked)
    monkeypatch.undo()
    stage = asked.files.of_selection
    count = Path(stage.trial(stored_record(stage).points[0].key).held_out)
    before = count.read_bytes()
    count.write_bytes(b'{"wrong": -1}')
    with pytest.raises(DataCorruption, match=r"held-out.json"):
        run_sweep(asked)
    count.write_bytes(before)
    outcome = run_sweep(asked)
    assert not outcome.record.failed
    assert not Path(stage.root).exists()


def test_a_plan_says_what_the_candidates_train_on_and_what_it_saves() -> None:
    plan = plan_sweep(parse_sweep(text_of()))
    assert plan.refusals == ()
    size = len(load_dataset(DataSpec("digits")).train)
    for trial in plan.trials:
        assert trial.dataset.train_size == size // 4
        assert not trial.spec.is_private or 0.99 * TARGET < trial.worst_case.epsilon <= TARGET
    words = plan.notes[-1].replace(",", " ").replace(";", " ").split()
    assert "1/4 of the training examples" in plan.notes[-1]
    alone, every = float(words[words.index("alone") + 2]), float(words[-1])
    assert 0.5 * TARGET < alone <= TARGET, "by the tightest accountant"
    assert every > 1.5 * alone, "to release all three, were they trained on the same data"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tune": {**TUNE, "epsilon": 5.0}}, "the choice alone costs epsilon 5, more than the target 4"),
        ({"tune": {**TUNE, "select_by": "loss"}}, "counts wrong predictions, not loss"),
        ({"tune": {**TUNE, "trials": 3}}, "trials is of privacy private_selection"),
        ({"tune": {key: value for key, value in TUNE.items() if key != "epsilon"}}, "needs epsilon"),
        ({"tune": {**TUNE, "privacy": "unaccounted"}}, "epsilon is of privacy exponential_mechanism"),
        ({"noise_source": "seeded"}, "use os_entropy"),
        ({"release": "raw"}, "use release: none"),
        ({"accounting": {"group_sizes": [1, 2]}}, "records of a group may lie in several parts"),
        ({"tune": {**TUNE, "parameters": {"epochs": [1, 2]}}}, "cost differently"),
    ],
)
def test_what_the_proof_does_not_cover_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        parse_sweep(text_of(**changes))
