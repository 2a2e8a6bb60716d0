"""A sweep whose file changes goes on in its folder: what is new is trained, what is there is kept."""

from __future__ import annotations

import json
import shutil
import stat
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpsweep.accounting.calibration.parameter_search import calibrate_noise_multiplier
from dpsweep.accounting.errors import DataCorruption, InvalidInput
from dpsweep.accounting.mechanism.trace import Trace
from dpsweep.accounting.records.sealed import read_sealed, write_sealed
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.orchestration.execution.backends import plan_at
from dpsweep.orchestration.execution.environment import IN_PROCESS
from dpsweep.orchestration.execution.upkeep import forget_keys
from dpsweep.orchestration.pipeline import Outcome, RunRequest, render_again, run_sweep, stage
from dpsweep.orchestration.store.attempts import Attempt, AttemptLog, read_attempts
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.sweeps.grid import Past
from dpsweep.orchestration.sweeps.manifest import grown, new_manifest, read_manifest, write_manifest
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.orchestration.tracking.tracker import NO_TRACKING
from dpsweep.workers.spec import ExecutionSpec
from dpsweep.workers.training.history import Progress
from dpsweep.workers.trials.trial import run_trial
from tests.known import known
from tests.orchestration.invoking import printed
from tests.orchestration.sample_grids import contents, in_process, small
from tests.orchestration.told import Told
from tests.orchestration.tracking.recordings import client_of, runs_of

ONE = {"model": "logistic", "clipping": ["none", "flat"], "noise": "constant", "seeds": 0, "epochs": 1}
MORE: dict[str, Any] = {"seeds": [0, 1], "privacy": {"target_epsilon": [5, 8], "delta": 1e-5}}


def run(
    folder: Path,
    told: Told | None = None,
    sources: tuple[str, ...] = (),
    tracking_uri: str | None = NO_TRACKING,
    **changes: object,
) -> Outcome:
    text = small(**{**ONE, **changes})
    request = RunRequest(parse_sweep(text), text, str(folder), IN_PROCESS, tracking_uri, sources=sources)
    return run_sweep(request, told or Told())


def rows(files: SweepFiles) -> dict[str, dict[str, Any]]:
    return {row["key"]: row for row in json.loads(Path(files.results).read_text())}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> SweepFiles:
    return run(tmp_path_factory.mktemp("sweep") / "out").files


@pytest.fixture
def files(begun: SweepFiles, tmp_path: Path) -> SweepFiles:
    shutil.copytree(begun.root, tmp_path / "out")
    return SweepFiles(str(tmp_path / "out"))


def test_a_sweep_grows_and_shrinks_and_keeps_every_byte_of_what_is_there(files: SweepFiles) -> None:
    first, told = rows(files), Told()
    before = contents(files.trials)
    run(Path(files.root), told, tracking_uri=None, **MORE)
    found = rows(files)
    assert first.keys() < found.keys()
    assert sorted(told.keys) == sorted(found.keys() - first.keys()), "only new trials are trained"
    assert len(told.keys) == 1 + 3
    assert before.items() <= contents(files.trials).items()
    assert all(row["status"] == "finished" and row["asked"] for row in found.values())
    assert [found[key]["epsilon"] for key in first] == [row["epsilon"] for row in first.values()]
    assert set(known(read_manifest(files)).added) == {key for key in told.keys if key.startswith("flat")}
    for shown, is_grown in ((first, False), (found, True)):
        whole = [row["composed"]["sweep"] for row in shown.values() if "composed" in row]
        assert whole
        assert all(("end_followed_results" in each["reasons"]) == is_grown for each in whole)
    page = Path(files.report).read_text()
    assert all(key in page for key in found)
    assert kinds(files) == {"sweep": 1, "trial": 6, "average": 3}
    _shrink(files, found)


def _shrink(files: SweepFiles, found: dict[str, dict[str, Any]]) -> None:
    before, told = contents(files.trials), Told()
    outcome = run(Path(files.root), told, clipping="flat", seeds=1)
    (only,) = [point.key for point in outcome.record.points if point.is_asked]
    assert told.keys == []
    assert any("1 of 1 trials have results" in each and "5 trials that its file no" in each for each in told.warnings)
    assert contents(files.trials) == before
    for shown in (rows(files), rows(render_again(files.root).files)):
        assert {key for key, row in shown.items() if row["asked"]} == {only}
        assert shown.keys() == found.keys()
        together = {row["composed"]["sweep"]["epsilon"] for row in shown.values() if "composed" in row}
        assert together == {row["composed"]["sweep"]["epsilon"] for row in found.values() if "composed" in row}
    assert "kept, though the sweep file no longer asks for it" in Path(files.report).read_text()
    told = Told()
    run(Path(files.root), told, **MORE)
    assert told.keys == []
    assert all(row["asked"] for row in rows(files).values()), "asked for again"


@pytest.mark.long
def test_other_versions_than_before_are_told_and_kept(files: SweepFiles) -> None:
    manifest, told = known(read_manifest(files)), Told()
    here = manifest.versions["torch"]
    write_manifest(files, replace(manifest, versions={**manifest.versions, "torch": "2.1.0"}))
    run(Path(files.root), told)
    assert f"other versions have run this sweep before (torch 2.1.0, {here}): " in " ".join(told.warnings)
    assert known(read_manifest(files)).versions == {**manifest.versions, "torch": f"2.1.0, {here}"}
    run(Path(files.root), again := Told())
    assert "other versions" not in " ".join(again.warnings)


def kinds(files: SweepFiles) -> Counter[str]:
    return Counter(run.data.tags["dpsweep.kind"] for run in runs_of(client_of(Path(files.root))))


def test_what_does_not_define_a_trial_may_always_change(files: SweepFiles) -> None:
    before, told = contents(files.trials), Told()
    changes: dict[str, Any] = {
        "resources": {"cpus": 2, "max_concurrent": 1},
        "accounting": {"individual": "pld", "group_sizes": [1, 4], "also": ["rdp"], "actors": 1},
        "scheduler": {"name": "asha", "accept_unaccounted_selection": True},
        "execution": {"threads": 2},
        "release": "raw",
    }
    text = small(**{**ONE, **changes})
    request = RunRequest(parse_sweep(text), text, files.root, tracking_uri=NO_TRACKING)
    run_sweep(request, told)  # of nothing that is left, Ray is not started
    render_again(files.root)
    assert (told.keys, contents(files.trials)) == ([], before)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        ({}, {"name": "other"}, "holds the sweep 'small', not 'other'; restore the name"),
        ({}, {"privacy": {"target_epsilon": 5, "delta": 1e-6}}, "is at privacy.delta = 1e-05, not 1e-06; restore it"),
        ({"release": "raw"}, {}, "holds results with release: raw, .* so its release cannot change"),
        ({"release": "private"}, {"release": "raw"}, "holds results with release: private"),
    ],
)
def test_what_would_mix_two_sweeps_is_refused(
    tmp_path: Path, first: dict[str, Any], then: dict[str, Any], message: str
) -> None:
    run(tmp_path / "out", clipping="none", **first)
    before = contents(tmp_path / "out")
    with pytest.raises(InvalidInput, match=message) as refused:
        run(tmp_path / "out", clipping="none", **then)
    assert "\n" not in str(refused.value)
    assert contents(tmp_path / "out") == before


def test_what_is_added_to_results_is_noted_once_and_only_if_it_is_private(tmp_path: Path) -> None:
    """Before there are results, nothing but the user decides what is trained."""
    texts = [small(**{**ONE, **changes}) for changes in ({}, {"seeds": [0, 1]}, {"seeds": 1}, {"seeds": [0, 1, 2]})]
    sweeps, files = [parse_sweep(text) for text in texts], SweepFiles(str(tmp_path))
    first = new_manifest(sweeps[0], texts[0])
    assert grown(first, sweeps[1], texts[1], files.root).added == []
    AttemptLog(files, ["flat"]).note(Attempt("flat", 1, 1e-5, Trace(1000), ended=True))
    found = first
    for sweep, text, seeds in zip(sweeps[1:], texts[1:], ([1], [1], [1, 2]), strict=True):
        found = grown(found, sweep, text, files.root)
        assert [key.partition("-seed")[2][0] for key in found.added] == list(map(str, seeds))
        assert all(key.startswith("flat") for key in found.added)
        assert grown(found, sweep, text, files.root) == found


class Interrupted(Exception):
    pass


def interrupt(progress: Progress) -> None:
    raise Interrupted


@pytest.mark.long
def test_a_trial_goes_on_at_the_speed_that_it_began_with(tmp_path: Path) -> None:
    """Other rounding beside noise that is repeated would show what the noise hides."""
    spec = plan_sweep(parse_sweep(small(**{**ONE, "clipping": "flat", "epochs": 2}))).trials[0].spec
    with pytest.raises(Interrupted):
        run_trial(spec, str(tmp_path / "a"), on_progress=interrupt)
    changed = replace(spec, execution=ExecutionSpec(micro_batch_size=7, threads=2))
    assert run_trial(changed, str(tmp_path / "a")) == run_trial(spec, str(tmp_path / "b"))
    models = [Path(TrialFiles(str(tmp_path / name)).model).read_bytes() for name in "ab"]
    assert models[0] == models[1]
    with pytest.raises(InvalidInput, match="holds a trial that differs in execution"):
        run_trial(replace(spec, execution=ExecutionSpec(autocast=True)), str(tmp_path / "a"))


@pytest.mark.long
def test_calibrations_are_stored_reused_and_checked(files: SweepFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[float] = []

    def search(run: Callable[[float], Trace], target: float, *asked: Any) -> float:
        searched.append(target)
        return calibrate_noise_multiplier(run, target, *asked)

    monkeypatch.setattr("dpsweep.accounting.calibration.planned_runs.calibrate_noise_multiplier", search)
    run(Path(files.root), seeds=[0, 1])
    assert searched == [], "a further seed has the same mechanism"
    run(Path(files.root), **MORE)
    assert searched == [8.0]
    manifest = known(read_manifest(files))
    assert len(manifest.calibrations) == 2
    for forged in (0.1, 100.0, -1.0, float("nan")):
        past = Past(calibrations=dict.fromkeys(manifest.calibrations, forged))
        searched.clear()
        (trial,) = plan_sweep(parse_sweep(small(**{**ONE, "clipping": "flat"})), past=past).trials
        assert searched == [5.0]
        assert 4.9 < trial.worst_case.epsilon <= 5.0


@pytest.mark.long
def test_finished_trials_of_another_sweep_are_taken_with_what_they_have_cost(begun: SweepFiles, tmp_path: Path) -> None:
    told = Told()
    outcome = run(tmp_path / "out", told, (begun.root,), name="other", seeds=[0, 1])
    theirs, ours = rows(begun), rows(outcome.files)
    assert theirs.keys() < ours.keys()
    assert sorted(told.keys) == sorted(ours.keys() - theirs.keys()), "these alone were trained"
    assert any(each.startswith("2 finished trials are taken from") for each in told.warnings)
    for key in theirs:
        kept = {path.name: path.read_bytes() for path in Path(begun.trial(key).root).iterdir() if path.is_file()}
        assert {name: Path(outcome.files.trial(key).root, name).read_bytes() for name in kept} == kept
        assert [each.trace for each in read_attempts(outcome.files, key)] == [
            each.trace for each in read_attempts(begun, key)
        ]
    render_again(outcome.files.root)
    private = next(key for key in theirs if key.startswith("flat"))
    assert stat.S_IMODE(Path(outcome.files.trial(private).private_summary).stat().st_mode) == 0o600
    together = {row["composed"]["sweep"]["epsilon"] for row in ours.values() if "composed" in row}
    assert max(together) > 1.2 * theirs[private]["epsilon"]
    whole = json.loads(printed("compare", begun.root, outcome.files.root, "--json"))["composed"]
    assert (whole["trials"], whole["attempts"]) == (2, 0), "what was taken was released once"
    assert whole["epsilon"] == pytest.approx(max(together))


@pytest.mark.long
def test_what_is_taken_is_checked_first(files: SweepFiles, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="its release or encryption is not that"):
        run(tmp_path / "raw", sources=(files.root,), release="raw")
    (private,) = [key for key in rows(files) if key.startswith("flat")]
    trial = files.trial(private)
    noted, model = Path(trial.data_fingerprint).read_bytes(), Path(trial.model).read_bytes()
    Path(trial.model).write_bytes(model[:-1])
    with pytest.raises(DataCorruption, match=r"model\.pt"):
        run(tmp_path / "a", sources=(files.root,))
    Path(trial.model).write_bytes(model)
    assert not Path(tmp_path, "a", "trials").exists(), "nothing is copied before all is checked"
    claim = json.loads(read_sealed(trial.result, "") or b"")
    claim["worst_case"]["epsilon"] = 0.5
    result = Path(trial.result).read_bytes()
    write_sealed(trial.result, json.dumps(claim).encode())
    with pytest.raises(DataCorruption, match=r"claims epsilon 0\.5"):
        run(tmp_path / "b", sources=(files.root,))
    Path(trial.result).write_bytes(result)
    Path(trial.data_fingerprint).unlink()
    told = Told()
    run(tmp_path / "c", told, (files.root,))
    assert told.keys == [private], "which data it met is not known"
    Path(trial.data_fingerprint).write_bytes(noted)


@pytest.mark.long
def test_keys_of_trials_that_are_no_longer_asked_for_can_be_forgotten(files: SweepFiles) -> None:
    text = small(**{**ONE, "seeds": 3, "clipping": "flat"})
    planned = plan_sweep(parse_sweep(text)).trials[0]
    run(Path(files.root), seeds=[0, 3])
    trial = files.trial(planned.key)
    shutil.rmtree(trial.root)
    with pytest.raises(Interrupted):
        run_trial(planned.spec, trial.root, on_progress=interrupt)
    run(Path(files.root))
    left = Path(files.audited_copy) / "private" / "checkpoint.pt"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"of an audit that was killed")
    assert forget_keys(files.root) == (planned.key,)
    assert not Path(files.audited_copy).exists()


def test_no_other_command_begins_a_sweep_while_one_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trials of one would be missing in the composed epsilon of the other: both would find an empty folder."""
    first, second = (small(clipping="flat", noise="constant", seeds=seed, epochs=1) for seed in (0, 1))
    waiting = [first]

    def planned_slowly(*arguments: Any) -> Any:
        while waiting:
            with pytest.raises(InvalidInput, match="another dpsweep writes to"):
                run_sweep(in_process(waiting.pop(), tmp_path / "out"))
        return plan_at(*arguments)

    monkeypatch.setattr(stage, "plan_at", planned_slowly)
    run_sweep(in_process(second, tmp_path / "out"))
    assert not waiting
    done = run_sweep(in_process(first, tmp_path / "out"))
    assert len(done.record.points) == 2, "both are kept, and count"
