"""`dpsweep --help` groups its commands, whose examples are valid and complete; every flag that a text names exists."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from dpsweep.orchestration.commands.main import app
from tests.orchestration.invoking import printed
from tests.orchestration.processes import environment

ROOT = Path(__file__).parents[3]
GROUP = typer.main.get_command(app)
COMMANDS = {
    name: command
    for name, command in GROUP.commands.items()  # type: ignore[attr-defined]
    if not command.hidden
}
PANELS = ("Run", "Cluster", "Results", "Privacy")


def test_the_help_groups_every_command() -> None:
    shown = printed("--help", env={"COLUMNS": "160", "TERMINAL_WIDTH": "160"})
    places = [shown.index(f" {panel} ─") for panel in PANELS]
    assert "─ Commands ─" not in shown, "a command without a group"
    for name, command in COMMANDS.items():
        start = places[PANELS.index(command.rich_help_panel)]
        end = min((place for place in places if place > start), default=len(shown))
        assert f"│ {name} " in shown[start:end]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", COMMANDS)
def test_the_example_of_every_command_is_valid_and_in_its_help(name: str) -> None:
    command = COMMANDS[name]
    program, given, *arguments = shlex.split(command.epilog.removeprefix("Example: "))
    assert (program, given) == ("dpsweep", name)
    command.make_context(name, list(arguments))
    shown = printed(name, "--help", env={"COLUMNS": "160", "TERMINAL_WIDTH": "160"})
    assert " ".join(command.epilog.split()) in " ".join(shown.split())


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A PATH on which the command is called dpsweep, as it is once installed."""
    script = tmp_path / "dpsweep"
    script.write_text(f"#!{sys.executable}\nfrom dpsweep.orchestration.commands.main import main\nmain()\n")
    script.chmod(0o755)
    return f"{tmp_path}:{os.environ['PATH']}"


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("typed", "offered"), [("st", {"status", "stop"}), ("export --", {"--to", "--all-columns", "--help"})]
)
def test_bash_completes_commands_and_options(path: str, typed: str, offered: set[str]) -> None:
    """By the script that --show-completion prints, in a real bash."""
    words = ["dpsweep", *typed.split()]
    script = (
        'eval "$(dpsweep --show-completion; true)"; '
        f"COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; "
        'handler=$(complete -p dpsweep | grep -o -- "-F [^ ]*" | cut -c4-); "$handler" dpsweep; echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", script], env=environment(PATH=path), capture_output=True, text=True, check=False, timeout=120
    )
    assert set(done.stdout.split()) == offered, done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_completion_offers_no_name_from_a_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else may have chosen it; names of files are left to the shell, which offers them for any program."""
    monkeypatch.chdir(tmp_path)
    Path("planted").mkdir()
    command = COMMANDS[name]
    for parameter in command.params:
        found = parameter.shell_complete(typer.Context(command), "")
        assert not [item.value for item in found if "planted" in item.value]


OF_OTHER_PROGRAMS = {
    *("--backend-store-uri", "--allowed-hosts", "--host", "--port", "--serve-artifacts"),  # mlflow
    *("--head", "--labels", "--node-ip-address", "--resources"),  # ray
    *("--env", "--local-dir", "--porcelain", "--summary", "--target"),  # docker, hf, git, pip
}
NOT_TEXTS = {"orchestration/report/writing.py"}
"""Files that only pass flags to Chromium."""


def flags() -> set[str]:
    """Return the options of all commands."""
    commands = (GROUP, *GROUP.commands.values())  # type: ignore[attr-defined]
    parameters = (each for command in commands for each in command.params)
    return {"--help", *(name for each in parameters for name in (*each.opts, *each.secondary_opts))}


def named() -> Iterator[tuple[str, str]]:
    """Yield each flag that a text of the product names, with its file and line."""
    for package in ("accounting", "workers", "orchestration"):
        texts = (path for path in (ROOT / package).rglob("*.py") if str(path.relative_to(ROOT)) not in NOT_TEXTS)
        for path in texts:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", node.value):
                        yield flag, f"{path.relative_to(ROOT)}:{node.lineno}"


def test_every_flag_that_a_text_names_exists() -> None:
    known = flags() | OF_OTHER_PROGRAMS
    assert {(flag, where) for flag, where in named() if flag not in known} == set()
