"""Files that a user names in options, new each time and private where need be; options that need another one."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import typer

from dpsweep.accounting.errors import InvalidInput
from dpsweep.orchestration.commands.main import app
from dpsweep.orchestration.commands.options import write_file
from dpsweep.orchestration.commands.useless_options import USELESS, names_of
from tests.orchestration.invoking import invoked, refused
from tests.orchestration.sample_grids import small
from tests.orchestration.sample_results import stored_sample

COMMANDS: Any = typer.main.get_command(app)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_that_another_user_had_made_is_replaced_by_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.touch(0o666)
    os.chown(path, 65534, 65534)
    with path.open() as theirs:
        write_file("--to", path, b"secret", private=True)
        assert theirs.read() == ""
    found = path.stat()
    assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (os.geteuid(), 0o600)
    assert os.listdir(tmp_path) == ["report.html"]


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_private_file_goes_into_no_folder_that_others_can_change(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(InvalidInput, match=r"--to .*is private, but other users can change .*shared; name a file"):
        write_file("--to", folder / "report.html", b"secret", private=True)
    assert os.listdir(folder) == []
    write_file("--to", folder / "table.csv", b"public", private=False)
    assert (folder / "table.csv").read_bytes() == b"public"


def test_a_link_or_a_pipe_in_its_place_is_refused_and_a_linked_folder_is_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "link").symlink_to("victim")
    os.mkfifo(tmp_path / "pipe")
    for name, kind in (("link", "a symbolic link"), ("pipe", "a named pipe")):
        with pytest.raises(InvalidInput, match=f"--to .*{name} is {kind}"):
            write_file("--to", tmp_path / name, b"new", private=False)
    assert (tmp_path / "victim").read_text() == "mine"
    (tmp_path / "real").mkdir()
    (tmp_path / "folder").symlink_to("real")
    write_file("--to", tmp_path / "folder" / "file", b"new", private=True)
    assert (tmp_path / "real" / "file").read_bytes() == b"new"


LONE: dict[str, tuple[tuple[str, ...], str]] = {
    "seeds at most, of a run that adds none": (("run", "none.yaml", "--max-seeds", "3"), "add --until told-apart"),
    "seeds at most, of a job that adds none": (
        ("submit", "none.yaml", "--output", "/none", "--address", "http://127.0.0.1:1", "--max-seeds", "3"),
        "add --until told-apart",
    ),
    "an alias of no registered model": (("best", "none", "--alias", "a"), "add --register NAME"),
    "a store for no registered model": (("best", "none", "--tracking-uri", "none"), "add --register NAME"),
    "JSON of a release": (
        ("plan", "none.yaml", "--release-rows-per-user", "1", "--json"),
        "--json has no effect beside --release",
    ),
    "JSON of some trials": (("status", "none", "--json", "--state", "failed"), "--state has no effect beside --json"),
    "all trials and some": (
        ("status", "none", "--trials", "--state", "failed"),
        "--trials has no effect beside --state",
    ),
    "some trials in lines": (("status", "none", "--watch", "--state", "failed"), "with --watch off a terminal"),
    "a cluster for a folder": (("status", "./none", "--address", "http://h:1"), "drop it, or give the id of a job"),
    "a cluster for folders": (("list", "none", "--address", "http://h:1"), "--address has no effect beside FOLDER"),
    "all of a JSON": (("best", "none", "--all", "--json"), "--all has no effect beside --json"),
    "norms by age, of none": (("prune", "none", "--older-than", "3"), "add --norms"),
    "a default of a stored trial": (
        ("epsilon", "--trial", "none", "--delta", "1e-5", "--sampling", "poisson"),
        "drop the flags",
    ),
    "following no job": (
        ("submit", "none.yaml", "--address", "http://h:1", "--output", "/o", "--dry-run", "--follow"),
        "give one of them",
    ),
    "another schedule of a stored trial": (
        ("epsilon", "--trial", "none", "--delta", "1e-5", "--schedule", "time:decay=1"),
        "drop the flags",
    ),
    "another sampling of a stored trial": (
        ("epsilon", "--trial", "none", "--delta", "1e-5", "--sampling", "shuffle"),
        "drop the flags",
    ),
}


@pytest.mark.parametrize("case", LONE)
def test_an_option_without_effect_is_refused(case: str, tmp_path: Path) -> None:
    """Before anything is read, and with the step to take."""
    arguments, step = LONE[case]
    (tmp_path / "none.yaml").touch()
    there = [str(tmp_path / each) if each.startswith("none.") else each for each in arguments]
    assert step in refused(InvalidInput, *there)


@pytest.mark.parametrize("command", USELESS)
def test_every_option_of_the_table_is_one_of_its_command(command: str) -> None:
    """A renamed option does not go out of the table in silence."""
    known = {name for each in COMMANDS.commands[command].params for name in names_of(each)}
    named = {name for rule in USELESS[command] for name in (*rule.options, *rule.beside, *rule.without)}
    assert named <= known


def test_a_store_is_refused_where_results_are_private_and_the_environments_is_not(tmp_path: Path) -> None:
    files = stored_sample(tmp_path)
    for command in ("account", "audit"):
        why = refused(InvalidInput, command, files.root, "--tracking-uri", "none")
        assert why.startswith("--tracking-uri has no effect under release: none")
        done = invoked(command, files.root, env={"MLFLOW_TRACKING_URI": "none"})
        assert "--tracking-uri" not in str(done.exception)


def test_code_that_the_sweep_does_not_name_is_compared_with_nothing(tmp_path: Path) -> None:
    files = stored_sample(tmp_path)
    assert "--code has no effect with" in refused(InvalidInput, "verify", files.root, "--code", __file__)
    assert refused(InvalidInput, "verify", files.root, "--code", "none.py").startswith("--code 'none.py': there is no")


def test_a_store_named_by_the_environment_is_for_all_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "none")
    assert "register" not in refused(InvalidInput, "best", tmp_path)


OF_A_FOLDER: tuple[tuple[str, ...], ...] = (
    *((name,) for name in ("status", "list", "dashboard", "verify", "account", "audit", "best", "report", "forget")),
    ("prune", "--norms"),
    ("delete", "--yes"),
    ("record",),
    ("export", "--to", "x.csv"),
    ("compare",),
    ("owner-report", "--example-id", "1"),
    ("epsilon", "--delta", "1e-5", "--trial"),
)
OF_A_FILE: tuple[tuple[str, ...], ...] = (("decrypt", "--to", "x"), ("epsilon", "--delta", "1e-5", "--trace"))


@pytest.mark.parametrize("command", OF_A_FOLDER, ids=lambda command: command[0])
def test_a_file_is_no_folder_and_no_path_is_none(tmp_path: Path, command: tuple[str, ...]) -> None:
    """Wrong input, by its name, and nobody's planted file; an empty path is not the working directory."""
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        said = refused(InvalidInput, *command, path)
        assert said.startswith(f"{tmp_path}/file is a file, not a folder; name the folder of a ")
    assert "a path is empty" in refused(InvalidInput, *command, "")


@pytest.mark.parametrize("command", OF_A_FILE, ids=lambda command: command[0])
def test_a_folder_is_no_file(tmp_path: Path, command: tuple[str, ...]) -> None:
    assert refused(InvalidInput, *command, tmp_path) == f"{tmp_path} is a folder, not a file; name a file"
    assert "/dev/null is a device" in refused(InvalidInput, *command, "/dev/null")
    (tmp_path / "file").write_text("mine")
    said = refused(InvalidInput, *command, tmp_path / "file" / "x")
    assert said == f"{tmp_path}/file is a file, not a folder; name a file"


def test_an_empty_output_is_not_the_default_one(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(small())
    assert "a path is empty" in refused(InvalidInput, "run", tmp_path / "s.yaml", "--output", "")
