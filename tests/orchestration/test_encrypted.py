"""A sweep with a key: every command works with it, results are those without one, and without it nothing is read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dpsweep
from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.records.encryption import KEY_VARIABLE, KeyCheck, new_key_check
from dpsweep.accounting.records.epsilon_files import read_epsilons
from dpsweep.accounting.records.shards import NormShards
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.orchestration.commands.cluster_jobs import submit
from dpsweep.orchestration.execution.backend import TrialContext
from dpsweep.orchestration.execution.environment import IN_PROCESS
from dpsweep.orchestration.execution.ray_tune import train_trial
from dpsweep.orchestration.execution.submission import packaged
from dpsweep.orchestration.pipeline import run_sweep
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.sweeps.plan import plan_sweep
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.workers.own_code.imports import NO_CODE
from dpsweep.workers.training.history import Progress
from dpsweep.workers.trials.trial import run_trial
from tests.orchestration.invoking import invoked, printed, refused
from tests.orchestration.sample_grids import contents, in_process, small
from tests.workers.trial_specs import small_trial

KEY, OTHER = "5a" * 32, "a5" * 32
TEXT = small(
    model="logistic",
    clipping=[{"name": "flat", "bound": 1.0}],
    noise="constant",
    seeds=0,
    epochs=1,
    attacks={"loss_threshold": True},
)
ENCRYPTED = b"dpsweep-encrypted-1\n"


def swept(folder: Path) -> SweepFiles:
    return run_sweep(in_process(TEXT, folder)).files


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> SweepFiles:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY_VARIABLE, KEY)
        return swept(tmp_path_factory.mktemp("sweep") / "out")


@pytest.fixture
def files(original: SweepFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepFiles:
    """A finished sweep, encrypted, with its key in the environment."""
    shutil.copytree(original.root, tmp_path / "out")
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    return SweepFiles(str(tmp_path / "out"))


def trial_of(files: SweepFiles) -> TrialFiles:
    (path,) = Path(files.trials).iterdir()
    return files.trial(path.name)


def test_all_that_is_private_is_encrypted_and_nothing_else(files: SweepFiles) -> None:
    paths = [path for path in Path(files.root).rglob("*") if path.is_file()]
    private = [path for path in paths if "private" in path.relative_to(files.root).parts]
    names = {str(path.relative_to(files.root)) for path in private}
    assert {name.rpartition("/")[2] for name in names} >= {
        *("report.html", "summary.json", "digests.json", "training.json", "attacks.json", "manifest.jsonl"),
        *("part-00000.arrow", "object-00000.arrow", "manifest.json", "complete.json"),
    }
    assert {path for path in paths if path.read_bytes().startswith(ENCRYPTED)} == set(private)
    assert not [path for path in paths if KEY.encode() in path.read_bytes()]


def test_every_command_works_with_the_key(files: SweepFiles, tmp_path: Path) -> None:
    trial = trial_of(files)
    before = contents(trial.private)
    page = tmp_path / "report.html"
    for arguments in (
        ("verify", files.root),
        ("report", files.root),
        ("account", files.root, "--address", IN_PROCESS, "--delta", "1e-6"),
        ("account", files.root, "--address", IN_PROCESS, "--delta", "1e-6", "--individual", "pld"),
        ("owner-report", trial.root, "--example-id", "3"),
        ("epsilon", "--trial", trial.root, "--examples", "3", "--delta", "1e-5"),
        ("decrypt", files.private_report, "--to", page),
        ("verify", files.root),
        ("prune", files.root, "--norms"),
        ("verify", files.root),
    ):
        done = invoked(*arguments)
        assert (done.exit_code, KEY in done.output) == (0, False), (arguments, done.output, done.exception)
    assert page.read_text().startswith("<!")
    assert page.stat().st_mode & 0o077 == 0
    assert not Path(trial.norms, "complete.json").exists()
    kept = {path: content for path, content in before.items() if "norms" not in path.parts}
    assert {path: path.read_bytes() for path in kept} == kept, "nothing was written anew"
    assert all(content.startswith(ENCRYPTED) for content in contents(trial.private).values())
    stored = dpsweep.open(files.root)
    assert len(stored.trials[trial.root.rpartition("/")[2]].epsilons().upper) == len(
        read_epsilons(trial.epsilons).upper
    )
    assert swept(Path(files.root)).root == files.root, "a finished sweep is continued"


@pytest.mark.parametrize("key", [KEY, ""])
def test_what_is_not_encrypted_is_not_copied(
    files: SweepFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, key)
    reason = refused(InvalidInput, "decrypt", files.report, "--to", tmp_path / "page.html")
    assert reason == f"{files.report} is not encrypted, so there is nothing to decrypt; read it as it is"
    assert not (tmp_path / "page.html").exists()


WITHOUT: dict[str, tuple[str, ...]] = {
    "verify": ("verify", "FOLDER"),
    "report": ("report", "FOLDER"),
    "account": ("account", "FOLDER", "--address", IN_PROCESS),
    "prune": ("prune", "FOLDER", "--norms"),
    "owner-report": ("owner-report", "TRIAL", "--example-id", "3"),
    "decrypt": ("decrypt", "FOLDER/private/report.html", "--to", "FOLDER/x"),
}


@pytest.mark.parametrize("name", WITHOUT)
@pytest.mark.parametrize(
    ("key", "said"),
    [("", "is encrypted; set DPSWEEP_KEY to its key"), (OTHER, "was encrypted with another key than DPSWEEP_KEY")],
    ids=["no key", "another key"],
)
def test_no_key_or_another_one_is_one_line(
    files: SweepFiles, monkeypatch: pytest.MonkeyPatch, name: str, key: str, said: str
) -> None:
    before = contents(files.root)
    monkeypatch.setenv(KEY_VARIABLE, key)
    places = {"FOLDER": files.root, "TRIAL": trial_of(files).root}
    arguments = [places.get(word, word.replace("FOLDER", files.root)) for word in WITHOUT[name]]
    (line,) = refused(InvalidInput, *arguments).splitlines()
    assert said in line
    after = {path: path.read_bytes() for path in before if path.name not in (".lock", "dpsweep.log")}
    assert after == {path: before[path] for path in after}, "nothing was written"


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("first", "second"), [(KEY, ""), ("", KEY), (KEY, OTHER)], ids=["then none", "none", "other"])
def test_a_sweep_is_continued_as_it_was_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, second: str
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, first)
    swept(tmp_path / "out")
    monkeypatch.setenv(KEY_VARIABLE, second)
    with pytest.raises(InvalidInput, match=r"^the sweep in \S+ (is|was) (begun|encrypted).*DPSWEEP_KEY[^\n]*$"):
        swept(tmp_path / "out")


def test_what_needs_no_private_file_needs_no_key(files: SweepFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE)
    for arguments in (
        ("list", files.root),
        ("export", files.root, "--to", f"{files.root}/table.csv"),
        ("status", files.root),
        ("forget", files.root),
        ("delete", files.root, "--yes"),
    ):
        printed(*arguments)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("key", "resumes"), [(KEY, True), ("", False), (OTHER, False)], ids=["same", "none", "other"])
def test_a_trial_resumes_from_its_encrypted_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, resumes: bool
) -> None:
    def interrupt(progress: Progress) -> None:
        raise KeyboardInterrupt

    spec, root = small_trial(), str(tmp_path / "interrupted")
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    with pytest.raises(KeyboardInterrupt):
        run_trial(spec, root, on_progress=interrupt)
    assert Path(TrialFiles(root).checkpoint).read_bytes().startswith(ENCRYPTED)
    monkeypatch.setenv(KEY_VARIABLE, key)
    if not resumes:
        with pytest.raises(InvalidInput, match=r"checkpoint.pt (is encrypted; set|was encrypted with another key)"):
            run_trial(spec, root)
        return
    resumed = run_trial(spec, root)
    monkeypatch.delenv(KEY_VARIABLE)
    assert run_trial(spec, str(tmp_path / "plain")) == resumed
    expected = NormShards(TrialFiles(str(tmp_path / "plain")).norms)
    plain = np.concatenate([expected.read(part).norms for part in expected.parts])
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    shards = NormShards(TrialFiles(root).norms)
    np.testing.assert_array_equal(np.concatenate([shards.read(part).norms for part in shards.parts]), plain)


@pytest.mark.parametrize(("here", "there"), [(KEY, ""), ("", KEY), (KEY, OTHER)], ids=["then none", "none", "other"])
def test_a_worker_with_another_key_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: str, there: str
) -> None:
    """Its environment is that of its node; a key is never sent to it."""
    sweep, files = parse_sweep(TEXT), SweepFiles(str(tmp_path / "out"))
    (planned,) = plan_sweep(sweep).trials
    monkeypatch.setenv(KEY_VARIABLE, here)
    context = TrialContext(files, sweep.disclosure, NO_CODE)
    reports: list[dict[str, Any]] = []
    monkeypatch.setattr("dpsweep.orchestration.execution.ray_tune.tune.report", reports.append)
    monkeypatch.setenv(KEY_VARIABLE, there)
    train_trial({"key": planned.key}, {planned.key: planned}, context, {planned.key: sweep.reserved(planned.spec)})
    assert "DPSWEEP_KEY" in reports[0]["error"]
    assert not Path(files.root).exists()


def test_a_job_is_told_which_key_it_needs_and_not_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    with packaged(TEXT, "a.yaml", "/out", NO_CODE) as package:
        held = json.loads((Path(package.folders[-1]) / "job.json").read_text())
        assert KEY not in json.dumps(held)
        check = KeyCheck(**held["key_check"])
    assert check.salt != getattr(new_key_check(), "salt", None)
    (tmp_path / "sweep.yaml").write_text(TEXT)
    with pytest.raises(InvalidInput, match="--env names DPSWEEP_KEY, but Ray stores and prints such variables"):
        submit(tmp_path / "sweep.yaml", "/out", "http://127.0.0.1:1", env=[f"{KEY_VARIABLE}={KEY}"], dry_run=True)
