"""`dpsweep submit` before anything is sent: what it plans, packages, lists and refuses."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from dpsweep.accounting.errors import DpsweepError, InvalidInput
from dpsweep.orchestration.execution.submission import LARGEST, Asked, packaged, read_job
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.limits import Limits
from dpsweep.orchestration.sweeps.manifest import new_manifest, write_manifest
from dpsweep.orchestration.sweeps.schema import parse_sweep
from dpsweep.orchestration.tracking.access import own_access, sealed, unsealed
from dpsweep.workers.own_code.imports import NO_CODE
from tests.orchestration.processes import Command
from tests.orchestration.sample_grids import small

MODEL = """
import math
from torch import nn

def narrow(feature_shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(feature_shape), num_classes))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package that also holds what is not code. One for all tests, as a process imports a name only once."""
    folder = tmp_path_factory.mktemp("sweeps")
    package = folder / "own_package_of_submit"
    (package / ".git").mkdir(parents=True)
    (package / ".git" / "config").write_text("x")
    (package / "__init__.py").touch()
    (package / "nets.py").write_text(MODEL)
    (package / "settings.json").write_text("{}")
    (package / "rows.csv").write_text("secret,rows\n" * 1000)
    return folder


@pytest.fixture
def sweep_file(folder: Path) -> Path:
    sweep = folder / "sweep.yaml"
    sweep.write_text(small(clipping="none", noise="constant", seeds=0, model="own_package_of_submit.nets:narrow"))
    return sweep


@pytest.fixture
def submit(sweep_file: Path, command: Command) -> Command:
    """A dry run of it."""
    return partial(command, "submit", sweep_file, "--dry-run", "--address", "http://127.0.0.1:1")


def test_a_dry_run_lists_what_would_be_sent(sweep_file: Path, submit: Command) -> None:
    code, said, warned = submit("--output", "s3://bucket/a", "--name", "my run")
    assert code == 0, warned
    sent, would = said.splitlines()
    names = [part.split(" (")[0] for part in sent.removeprefix("sent: ").split("; ")[0].split(", ")]
    assert names == ["sweep.yaml", *(f"own_package_of_submit/{n}" for n in ("__init__.py", "nets.py", "settings.json"))]
    assert "dpsweep (" in sent
    assert would.startswith("my-run-")
    assert would.endswith(": 1 trial would be submitted to http://127.0.0.1:1, with output s3://bucket/a")
    assert "not sent, by their endings: own_package_of_submit/rows.csv" in warned.splitlines()
    assert (sweep_file.parent / "own_package_of_submit" / "rows.csv").exists(), "the user's own files stay"


def test_the_id_follows_the_sweep(sweep_file: Path, submit: Command) -> None:
    def job_id(output: str = "s3://bucket/a") -> str:
        code, said, warned = submit("--output", output)
        assert code == 0, warned
        return said.splitlines()[-1].split(":")[0]

    first = job_id()
    assert job_id("s3://bucket/a/") == first
    assert job_id("s3://other/a") != first, "another team runs the same file"
    sweep_file.write_text(f"# a comment\n{sweep_file.read_text()}")
    assert job_id() == first
    sweep_file.write_text(sweep_file.read_text().replace("epochs: 2", "epochs: 3"))
    assert job_id() != first


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--output", "runs/a"), "--output is 'runs/a', which depends on where a process runs"),
        (("--output", "/a", "--env", "KEY"), "--env is 'KEY', but must be NAME=VALUE"),
        (("--output", "/a", "--allow-code", "no_such_module"), "no such module is installed"),
    ],
)
def test_a_mistake_is_one_line(arguments: tuple[str, ...], said: str, submit: Command) -> None:
    code, _, warned = submit(*arguments)
    (line,) = warned.splitlines()
    assert (code, said in line) == (2, True), line


def test_seeds_that_leave_no_room_are_refused_before_anything_is_sent(sweep_file: Path, submit: Command) -> None:
    sweep_file.write_text(sweep_file.read_text().replace("seeds: 0", "seeds: [0, 1, 2]"))
    code, said, warned = submit("--output", "/a", "--until", "told-apart", "--max-seeds", "2")
    (line,) = warned.splitlines()
    assert (code, said) == (2, "")
    assert line == "error: --max-seeds is 2, and the sweep starts with 3 seeds; raise it"


def test_an_output_with_another_sweep_is_refused_before_anything_is_sent(
    sweep_file: Path, tmp_path: Path, submit: Command
) -> None:
    text = sweep_file.read_text()
    files, other = SweepFiles(str(tmp_path / "out")), parse_sweep(text.replace("name: small", "name: other"))
    write_manifest(files, new_manifest(other, text.replace("name: small", "name: other")))
    code, said, warned = submit("--output", files.root)
    (line,) = warned.splitlines()
    assert (code, said) == (2, "")
    assert line.startswith(f"error: {files.root} holds the sweep 'other', not 'small'; restore the name, or choose")
    write_manifest(files, new_manifest(parse_sweep(text), text))
    assert submit("--output", files.root)[0] == 0, "the same sweep is continued"


def test_an_output_that_cannot_be_seen_from_here_is_said_and_left_to_the_job(tmp_path: Path, submit: Command) -> None:
    output = f"{tmp_path}/not-mounted-here/out"
    code, said, warned = submit("--output", output)
    assert (code, "would be submitted" in said) == (0, True)
    assert f"warning: whether {output} holds another sweep cannot be seen from here" in warned


def test_an_empty_place_in_a_store_that_answers_is_seen_from_here(tmp_path: Path, submit: Command) -> None:
    assert "cannot be seen from here" not in submit("--output", f"file://{tmp_path}/nothing-yet")[2]


def test_a_sweep_that_cannot_run_is_not_sent(sweep_file: Path, submit: Command) -> None:
    sweep_file.write_text(sweep_file.read_text().replace("batch_size: 128", "batch_size: 4096"))
    code, said, warned = submit("--output", "/a")
    assert (code, said) == (2, "")
    assert "batch_size is 4096" in warned


def test_too_large_a_package_is_refused(sweep_file: Path, submit: Command) -> None:
    large = sweep_file.parent / "own_package_of_submit" / "rows.txt"
    with large.open("wb") as rows:
        rows.truncate(LARGEST)
    code, _, warned = submit("--output", "/a")
    large.unlink()
    assert code == 2
    assert "at most 20 MiB are sent (the largest is own_package_of_submit/rows.txt with 20.0 MiB)" in warned


def test_the_job_is_given_its_limits_and_what_to_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(Limits(hours=2.0, trials=3, gpu_hours=1.5), ("failed", "flat-"))
    with packaged(small(), "sweep.yaml", "/a", NO_CODE, asked) as package:
        monkeypatch.syspath_prepend(str(Path(package.folders[-1]).parent))
        assert read_job().asked == asked


@pytest.mark.parametrize("forged", ["", "[]", "\xff", '{"text": {}}', "[" * 100_000, None, "pipe", "link"])
def test_a_package_that_was_forged_is_one_line(monkeypatch: pytest.MonkeyPatch, forged: str | None) -> None:
    """Its code is run, as that of any job: whoever may submit jobs runs code on the cluster."""
    with packaged(small(), "sweep.yaml", "/a", NO_CODE) as package:
        job = Path(package.folders[-1], "job.json")
        job.unlink()
        match forged:
            case None:
                pass
            case "pipe":
                os.mkfifo(job)
            case "link":
                job.symlink_to("/etc/passwd")
            case _:
                job.write_bytes(forged.encode("latin-1"))
        monkeypatch.syspath_prepend(str(job.parent.parent))
        with pytest.raises(DpsweepError, match=r"another version of dpsweep, or is none|did not open") as refused:
            read_job()
    assert "\n" not in str(refused.value)


def test_drive_outside_a_job_is_one_line(command: Command) -> None:
    code, _, said = command("drive")
    assert (code, "started by the jobs of `dpsweep submit`" in said) == (2, True)


def test_a_login_travels_sealed_and_names_that_look_secret_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, submit: Command
) -> None:
    """Nothing of it is in the package as text; without a token it is not sent at all."""
    for name, value in {"MLFLOW_TRACKING_USERNAME": "ann", "MLFLOW_TRACKING_PASSWORD": "xyzzy"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "the token")
    text = sealed(own_access(), "the token")
    assert unsealed(text, "the token") == {"MLFLOW_TRACKING_USERNAME": "ann", "MLFLOW_TRACKING_PASSWORD": "xyzzy"}
    with packaged(small(), "sweep.yaml", "/a", NO_CODE, tracking=text) as package:
        (job,) = [Path(folder, "job.json") for folder in package.folders if Path(folder, "job.json").exists()]
        assert "xyzzy" not in job.read_text()
    said = ("--output", "s3://bucket/a", "--env", "MLFLOW_TRACKING_PASSWORD=xyzzy")
    code, _, warned = submit(*said)
    assert code == 0
    assert "warning: --env MLFLOW_TRACKING_PASSWORD: Ray keeps and shows such variables" in warned
    assert "leave it out, as this shell's login of MLflow goes to the driver alone" in warned
    monkeypatch.setenv("RAY_AUTH_TOKEN", "")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/nowhere")
    code, _, warned = submit("--output", "s3://bucket/a")
    assert "not sent: MLFLOW_TRACKING_PASSWORD and MLFLOW_TRACKING_USERNAME, as the cluster has no token" in warned
    assert "xyzzy" not in warned


def test_what_leads_out_of_a_package_is_not_sent(sweep_file: Path, tmp_path: Path, submit: Command) -> None:
    """A sweep from somebody else may hold links to files of whoever submits it, links without end, and pipes."""
    package = sweep_file.parent / "own_package_of_submit"
    (tmp_path / "secret.json").write_text("mine")
    (package / "secret.json").symlink_to(tmp_path / "secret.json")
    (package / "again").symlink_to(".")
    (package / "inside.json").symlink_to("settings.json")
    os.mkfifo(package / "pipe")
    code, said, warned = submit("--output", "s3://bucket/a")
    assert code == 0, warned
    sent = {part.split(" (")[0].rpartition("/")[2] for part in said.partition("; ")[0].split(", ")}
    assert {"inside.json", "settings.json"} <= sent
    assert sent.isdisjoint({"secret.json", "again", "pipe"})


def test_a_login_that_is_none_is_one_line() -> None:
    for text in ("no base64", "YWJj", sealed({"MLFLOW_TRACKING_TOKEN": "a"}, "another token")):
        with pytest.raises(InvalidInput, match="cannot be opened"):
            unsealed(text, "token")
