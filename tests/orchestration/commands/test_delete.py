"""`dpsweep delete`: asks, refuses what is no sweep and what runs, and deletes what is the sweep's and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpsweep.accounting.errors import DataCorruption, InvalidInput
from dpsweep.accounting.mechanism.samplings import PoissonSampling
from dpsweep.accounting.mechanism.trace import Segment, Trace
from dpsweep.accounting.records.local_files import UnsafeFile
from dpsweep.orchestration.comparison.stored import stored_record
from dpsweep.orchestration.store.attempts import Attempt, AttemptLog, read_attempts
from dpsweep.orchestration.store.later_results import AuditRecord, write_audit
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.ownership import claimed, exclusive
from dpsweep.orchestration.sweeps.planned import Plan, Refusal, accept
from tests.orchestration.invoking import invoked, printed, refused
from tests.orchestration.sample_grids import keys_of, small
from tests.orchestration.sample_results import DELTA, stored_sample

KEY = keys_of(small(clipping=["none", "flat"], noise="constant", seeds=[0, 1]))["flat-seed0"]


def contents(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def files(tmp_path: Path) -> SweepFiles:
    """A sweep with every kind of file that a run writes."""
    files = stored_sample(tmp_path / "sweep")
    folder = tmp_path / "sweep"
    for name in ("report.html", "comparison.json", "private/report.html", "private/error.txt", "mlflow.db",
                 "mlflow.db-wal", "status.json", "dpsweep.log",
                 "storage-probe", "tune/state.json", "mlflow-artifacts/1/a.png",
                 "pages/report.html", "private/audited-copy/model.pt", "private/given/abc.npz",
                 f"trials/{KEY}/private/norms/a.arrow", f"trials/{KEY}/model.pt"):  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    write_audit(files, AuditRecord(KEY, 50, "gradient", "iterates", 0.95, 0, DELTA, 5.0, 5.0, 3.2, {}, {}, 0, 0, 1.0))
    return files


def test_everything_of_the_sweep_goes_and_what_it_released_stays(files: SweepFiles) -> None:
    released = Attempt(KEY, 1, DELTA, Trace(100, (Segment(0, 20, PoissonSampling(0.1), 2.0),)), ended=True)
    AttemptLog(files, [KEY]).note(released)
    done = printed("delete", files.root, "--yes")
    assert contents(Path(files.root)) == {f"attempts/{KEY}/000001.json", ".lock"}
    assert read_attempts(files, KEY) == (released,)
    assert "what 1 of them released cannot be taken back" in done
    assert "left, because" not in done
    assert "holds no sweep" in refused(InvalidInput, "delete", files.root, "--yes")
    stored_sample(Path(files.root))
    assert stored_record(files).attempts[KEY] == (released,), "a sweep that is run here again counts it"


def test_the_tuning_goes_with_its_sweep_and_what_it_released_stays(files: SweepFiles) -> None:
    tuning = stored_sample(Path(files.tuning))
    released = Attempt(KEY, 1, DELTA, Trace(100, (Segment(0, 20, PoissonSampling(0.1), 2.0),)), ended=True)
    AttemptLog(tuning, [KEY]).note(released)
    done = printed("delete", files.root, "--yes")
    left = {name for name in contents(Path(files.root)) if name.startswith("tuning/")}
    assert left == {f"tuning/attempts/{KEY}/000001.json", "tuning/.lock"}
    assert read_attempts(tuning, KEY) == (released,)
    assert "of its tuning" in done
    assert "and tuning/attempts" in done
    assert "left, because" not in done


def test_what_an_older_version_did_not_record_is_recorded_first(files: SweepFiles) -> None:
    before = stored_record(files).attempts[KEY]
    assert (len(before), read_attempts(files, KEY)) == (1, ())
    assert invoked("delete", files.root, "--yes").exit_code == 0
    assert read_attempts(files, KEY) == before


def test_files_that_are_not_of_the_sweep_are_left_and_named(files: SweepFiles, tmp_path: Path) -> None:
    folder = Path(files.root)
    for name in ("notes.txt", "trials/mine/model.pt", "private/mine.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")
    (tmp_path / "kept.txt").write_text("elsewhere")
    (folder / "trials" / KEY / "link").symlink_to(tmp_path / "kept.txt")
    said = printed("delete", folder, "--yes")
    assert "left, because not of the sweep: notes.txt, private/mine.txt, trials/mine/model.pt" in said
    left = {name for name in contents(folder) if not name.startswith(("attempts/", ".lock"))}
    assert left == {"notes.txt", "trials/mine/model.pt", "private/mine.txt"}
    assert (tmp_path / "kept.txt").read_text() == "elsewhere"


def test_a_sweep_without_releases_leaves_no_folder(tmp_path: Path) -> None:
    stored_sample(tmp_path / "sweep", clipping="none", privacy={"noise_multiplier": 1.0, "delta": 1e-5})
    assert invoked("delete", tmp_path / "sweep", "--yes").exit_code == 0
    assert not (tmp_path / "sweep").exists()


def test_what_is_left_of_a_run_that_did_not_begin_goes(tmp_path: Path) -> None:
    """The withheld errors of a refused plan, also of a tuning's, and a tuning that no sweep has followed."""
    files = SweepFiles(str(tmp_path / "sweep"))
    plan = Plan((), (Refusal("one", "ValueError", "a row"),), ())
    for stage in (files, files.of_tuning):
        with pytest.raises(InvalidInput, match="the full texts of these errors"), exclusive(stage):
            accept(plan, stage)
    assert contents(tmp_path / "sweep") == {".lock", "private/error.txt", "tuning/.lock", "tuning/private/error.txt"}
    asked = invoked("delete", files.root, input="n\n")
    assert f"Delete the errors of a refused plan in {files.root}?" in asked.stdout
    assert f"deleted the errors of a refused plan in {files.root}" in printed("delete", files.root, "--yes")
    assert not (tmp_path / "sweep").exists()
    stored_sample(Path(files.tuning), clipping="none", privacy={"noise_multiplier": 1.0, "delta": 1e-5})
    with exclusive(files.of_tuning), pytest.raises(InvalidInput, match="another dpsweep writes to"):
        printed("delete", files.root, "--yes")
    assert f"deleted the unfinished tuning in {files.root}" in printed("delete", files.root, "--yes")
    assert not (tmp_path / "sweep").exists()
    assert "holds no sweep" in refused(InvalidInput, "delete", files.root, "--yes")


@pytest.mark.parametrize(("answer", "code", "deleted"), [("n\n", 1, False), ("\n", 1, False), ("y\n", 0, True)])
def test_it_asks_first(files: SweepFiles, answer: str, code: int, deleted: bool) -> None:
    before = contents(Path(files.root))
    done = invoked("delete", files.root, input=answer)
    assert f"Delete the sweep small in {files.root}: 4 trials" in done.stdout
    assert done.exit_code == code
    assert Path(files.manifest).exists() != deleted
    assert deleted or contents(Path(files.root)) == before


def test_where_nobody_answers_nothing_is_deleted(files: SweepFiles) -> None:
    before = contents(Path(files.root))
    with pytest.raises(InvalidInput, match="give --yes"):
        printed("delete", files.root)
    assert contents(Path(files.root)) == before


def test_a_running_sweep_is_refused(files: SweepFiles) -> None:
    before = contents(Path(files.root))
    with exclusive(files), pytest.raises(InvalidInput, match="another dpsweep writes to"):
        printed("delete", files.root, "--yes")
    assert contents(Path(files.root)) == before | {".lock"}


def test_on_an_object_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the driver's claim refuses, and afterwards neither it nor a local folder is left."""
    monkeypatch.chdir(tmp_path)
    files = SweepFiles(f"file://{stored_sample(tmp_path / 'sweep').root}")
    with claimed(files.claim, 0.2), pytest.raises(InvalidInput, match="another dpsweep drives"):
        printed("delete", files.root, "--yes")
    assert invoked("delete", files.root, "--yes").exit_code == 0
    assert contents(tmp_path / "sweep") == {f"attempts/{KEY}/000001.json"}
    assert not list((tmp_path / "runs").glob("sweep*"))


def test_a_linked_folder_and_a_damaged_ledger_are_refused(files: SweepFiles, tmp_path: Path) -> None:
    ledger = Path(files.attempts(KEY)) / "000001.json"
    ledger.parent.mkdir(parents=True)
    ledger.write_text("{}")
    with pytest.raises(DataCorruption, match=rf"attempts/{KEY}/000001.json"):
        printed("delete", files.root, "--yes")
    assert Path(files.trial(KEY).model).exists()
    ledger.unlink()
    (tmp_path / "elsewhere").mkdir()
    (Path(files.root) / "tune").rename(tmp_path / "elsewhere" / "tune")
    (Path(files.root) / "tune").symlink_to(tmp_path / "elsewhere" / "tune")
    with pytest.raises(UnsafeFile, match="is a symbolic link"):
        printed("delete", files.root, "--yes")
    assert (tmp_path / "elsewhere" / "tune" / "state.json").exists()
    assert Path(files.manifest).exists(), "so that the command can be given again"
