"""What others wrote into a sweep's folder or address, where a person reads it."""

from __future__ import annotations

import json
import shlex
import shutil
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from dpsweep.accounting.errors import DpsweepError
from dpsweep.accounting.records.files import write_in_private_folder
from dpsweep.accounting.records.local_files import UnsafeFile
from dpsweep.orchestration.commands import cluster_jobs, status_command
from dpsweep.orchestration.commands.main import report
from dpsweep.orchestration.commands.printed_tables import outcome_object, print_outcome
from dpsweep.orchestration.execution.submission import SubmittedSweep
from dpsweep.orchestration.execution.upkeep import forget_keys
from dpsweep.orchestration.pipeline import Outcome, render_again, run_sweep
from dpsweep.orchestration.pipeline.progress import ConsoleDisplay
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.published import PublishedTrial, TrialState
from dpsweep.orchestration.store.status import TrialStatus
from dpsweep.orchestration.tracking.embedded import embedded_tracking_uri
from dpsweep.orchestration.tracking.mlflow import MlflowTracker
from dpsweep.orchestration.tracking.tracker import TrackedSweep
from tests.hostile.of_folders import write_json
from tests.orchestration.invoking import invoked
from tests.orchestration.sample_grids import in_process, small

from mlflow import MlflowClient  # isort: skip

HOSTILE = "bad [/bold] \x1b]0;title\x07 ![x](http://127.0.0.1/a.png) <img src=x>"
TEXT = small(clipping=[{"name": "flat", "bound": 1.0}], noise="constant", seeds=0, epochs=1)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("sweep") / "out"
    return run_sweep(in_process(TEXT, folder, None))


@pytest.fixture
def folder(finished: Outcome, tmp_path: Path) -> Path:
    shutil.copytree(finished.files.root, tmp_path / "out")
    return tmp_path / "out"


def test_an_error_with_markup_is_printed_as_it_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (trial,) = (folder / "trials").iterdir()
    shutil.rmtree(trial)
    rows = [{**row, "status": "failed", "error": HOSTILE} for row in json.loads((folder / "results.json").read_text())]
    (folder / "results.json").write_text(json.dumps(rows))
    report(str(folder))
    printed = capsys.readouterr().out
    assert r"bad [/bold] \x1b]0;title\x07" in printed
    assert "\x1b]" not in printed


def test_commands_over_sweeps_print_it_so_too(folder: Path, tmp_path: Path) -> None:
    """`list`, `compare`, `status`, `delete` and `export`, of a sweep whose name, error and folder others chose."""
    strange = tmp_path / "a [bold] \x1b]0;title\x07"
    folder.rename(strange)
    shutil.rmtree(next((strange / "trials").iterdir()))
    for name, key in (("results.json", "error"), ("status.json", "error")):
        content = json.loads((strange / name).read_text())
        for row in content if isinstance(content, list) else content["trials"]:
            row.update({key: HOSTILE, **({"status": "failed"} if name == "results.json" else {"state": "failed"})})
        write_json(strange / name, content)
    other = tmp_path / "other"
    shutil.copytree(strange, other)
    for arguments in (
        ("list", tmp_path),
        ("compare", strange, other),
        ("status", strange),
        ("export", strange, "--to", tmp_path / "table.csv"),
        ("delete", strange, "--yes"),
    ):
        done = invoked(*arguments)
        shown = done.output + str(done.exception or "")
        assert done.exit_code == 0 or isinstance(done.exception, DpsweepError), (arguments, done.exception)
        assert "\x1b]" not in done.output, arguments
        assert "MarkupError" not in shown, arguments


class HostileJobs:
    """Jobs of a cluster whose ids, outputs, states and logs others chose."""

    def __init__(self, ended: bool) -> None:
        self._job = SubmittedSweep(
            f"small-{HOSTILE}", HOSTILE, f"/out/{HOSTILE}", "SUCCEEDED" if ended else "RUNNING", 0.0
        )

    def all(self) -> tuple[SubmittedSweep, ...]:
        return (self._job,)

    def now(self) -> float:
        return 60.0

    def find(self, name: str) -> SubmittedSweep:
        return self._job

    def submit(self, *asked: object) -> SubmittedSweep:
        return self._job

    def stop(self, job: SubmittedSweep) -> None:
        pass

    def logs(self, job: SubmittedSweep) -> str:
        return f"{HOSTILE}\n"

    def follow(self, job: SubmittedSweep) -> Iterator[str]:
        yield f"{HOSTILE}\n"


@pytest.mark.parametrize("ended", [False, True], ids=["running", "ended"])
def test_commands_over_jobs_print_it_so_too(ended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cluster_jobs, status_command):
        monkeypatch.setattr(module, "jobs_at", lambda address: HostileJobs(ended))
    (tmp_path / "sweep.yaml").write_text(TEXT)
    at = ("--address", "http://127.0.0.1:1")
    for arguments in (
        ("submit", tmp_path / "sweep.yaml", "--output", f"/out/{HOSTILE}", *at),
        ("submit", tmp_path / "sweep.yaml", "--output", f"/out/{HOSTILE}", "--dry-run", *at),
        ("logs", "x", *at),
        ("logs", "x", "--follow", *at),
        ("stop", "x", *at),
        ("list", *at),
    ):
        done = invoked(*arguments, env={"RAY_AUTH_MODE": "token"})
        assert done.exit_code in (0, 1) or isinstance(done.exception, DpsweepError), (arguments, done.exception)
        assert "\x1b]" not in done.output, arguments
        assert r"bad [/bold] \x1b]0;title\x07" in done.output + str(done.exception), arguments


def test_the_display_shows_it_so_too() -> None:
    console = Console(record=True, width=200, force_terminal=True)
    display = ConsoleDisplay(console)
    display.warn(HOSTILE)
    display.ended(TrialStatus("a", 1, TrialState.FAILED, error=HOSTILE))
    assert console.export_text().count(r"bad [/bold] \x1b]0;title\x07") == 2


def test_a_terminal_breaks_lines_between_words_and_keeps_paths_and_keys_whole() -> None:
    key, path = "individual-exponential-epsilon8-seed1000000-ec7523857b", "/" + 60 * "folder/"
    console = Console(record=True, width=80, force_terminal=True)
    display = ConsoleDisplay(console)
    display.ended(TrialStatus(key, 1, TrialState.FINISHED, epsilon_so_far=7.991, started=0.0, ended=7.0))
    display.warn(f"the sweep lies in {path}")
    *lines, last = console.export_text().splitlines()
    assert last.endswith(path)
    assert key in lines[0]
    assert [line.rstrip() for line in lines[1:]] == ["epsilon 8.00, 7.0 s"]


def test_notes_in_mlflow_show_text_and_fetch_nothing(tmp_path: Path) -> None:
    tracker = MlflowTracker(embedded_tracking_uri(tmp_path))
    tracker.open_sweep(TrackedSweep("id", "name", "text", str(tmp_path)))
    run_id = tracker.log_trial(PublishedTrial("a", {"clipping": "flat"}, TrialState.FAILED, error=HOSTILE))
    note = MlflowClient(embedded_tracking_uri(tmp_path)).get_run(run_id).data.tags["mlflow.note.content"]
    assert r"\!\[x\](http" in note
    assert r"\<img" in note


def test_passwords_are_in_no_line_to_copy(finished: Outcome, capsys: pytest.CaptureFixture[str]) -> None:
    secret = replace(finished, tracking_uri="postgresql://me:hunter2@host/db?sslpassword=swordfish")
    print_outcome(secret)
    shown = capsys.readouterr().out + json.dumps(outcome_object(secret))
    assert "hunter2" not in shown
    assert "swordfish" not in shown
    assert "postgresql://me:***@host/db?sslpassword=***" in shown


def test_lines_to_copy_hold_in_folders_with_spaces(finished: Outcome, capsys: pytest.CaptureFixture[str]) -> None:
    files = SweepFiles("/tmp/bin ary/ü#1")
    print_outcome(replace(finished, files=files, tracking_uri=f"sqlite:///{files.root}/mlflow.db"))
    shown = [line for line in capsys.readouterr().out.splitlines() if " -m " in line]
    browser, mlflow = (shlex.split(line)[1:] for line in shown)
    assert browser == ["-m", "webbrowser", "file:///tmp/bin%20ary/%C3%BC%231/report.html"]
    assert mlflow == ["-m", "mlflow", "ui", "--backend-store-uri", "sqlite:////tmp/bin ary/ü#1/mlflow.db"]


def test_a_private_folder_that_leads_elsewhere_is_not_written(folder: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o755)
    shutil.rmtree(folder / "private")
    (folder / "private").symlink_to(victim)
    with pytest.raises(UnsafeFile, match="/private is a symbolic link, which dpsweep does not write there"):
        render_again(str(folder))
    assert list(victim.iterdir()) == []
    assert stat.S_IMODE(victim.stat().st_mode) == 0o755
    with pytest.raises(UnsafeFile, match="symbolic link"):
        write_in_private_folder(str(folder / "private" / "norms" / "x"), b"")


def test_keys_of_unfinished_trials_are_forgotten_on_request(folder: Path) -> None:
    assert forget_keys(str(folder)) == ()
    (trial,) = (folder / "trials").iterdir()
    candidate = folder / "tuning" / "trials" / "candidate"
    for each in (trial, candidate):
        (each / "private").mkdir(parents=True, exist_ok=True)
        (each / "private" / "checkpoint.pt").write_bytes(b"key")
        (each / "private" / ".checkpoint.pt.0.partial").write_bytes(b"key")
    shutil.copy(folder / "sweep.json", folder / "tuning")
    assert forget_keys(str(folder)) == (trial.name, candidate.name)
    (trial / "private" / ".checkpoint.pt.1.partial").write_bytes(
        b"all that a process left which was killed in its first"
    )
    assert forget_keys(str(folder)) == (trial.name,)
    assert not list(folder.rglob("*checkpoint*"))
