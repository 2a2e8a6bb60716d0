"""What the README says is true: its commands run, its links lead somewhere, every command is in it."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from pathlib import Path

import pytest
import typer

from dpsweep.orchestration.commands.main import app
from tests.orchestration.invoking import printed

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples" / "README.md"]
CONSOLE = [shlex.split(line)[2:] for line in README.splitlines() if line.startswith("$ dpsweep ")]
ANSWERS = {"1.0": 2.9553, "6": 21.55, "3": 1.21, "time": 0.018855}


def test_there_are_exactly_two_set_up_commands_of_one_line() -> None:
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    assert [block.count("\n") for block in blocks] == [1, 1]
    assert all(block.startswith("python3 -m venv .venv && ") for block in blocks)
    assert "dpsweep run sweeps/quickstart.yaml" in blocks[0]
    assert blocks[1].rstrip().endswith("pytest")


@pytest.mark.parametrize("arguments", CONSOLE, ids=lambda arguments: " ".join(arguments[:3]))
def test_documented_calculations_print_the_known_answer(arguments: list[str]) -> None:
    answers = [ANSWERS[word] for word in arguments if word in ANSWERS]
    found = json.loads(printed(*arguments, *[] if "--json" in arguments else ["--json"]))
    first = found[0] if isinstance(found, list) else found
    assert first.get("value", first.get("epsilon")) == pytest.approx(answers[0], rel=2e-3)


def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text())
    files = [((page.parent / path).resolve() if path else page, anchor) for path, anchor in links]
    assert [str(file) for file, _ in files if not file.exists()] == []
    assert [(file.name, anchor) for file, anchor in files if anchor and anchor not in _anchors(file)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_table_has_a_head(page: Path) -> None:
    """A blank line ends a table, and the rows below it would be shown as text."""
    tables = re.findall(r"(?:^|\n)\n(\|.*\n)(.*\n)", page.read_text())
    assert [first for first, second in tables if not re.fullmatch(r"\|[-: |]+\|\n", second)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_modules_and_tests_that_a_page_names_exist(page: Path) -> None:
    """Named from the root of the repository or from a package, such as `execution/nodes.py`."""
    named = set(re.findall(r"`((?:\w+/)+\w+\.py)`", page.read_text()))
    roots = [ROOT, *(ROOT / package for package in ("accounting", "workers", "orchestration"))]
    assert [path for path in sorted(named) if not any((root / path).exists() for root in roots)] == []


def test_every_command_is_documented() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert [name for name, command in commands.items() if not command.hidden and f"`dpsweep {name}" not in README] == []


def test_the_cluster_page_shows_commands_that_exist() -> None:
    page = (ROOT / "docs" / "cluster.md").read_text()
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    shown = [shlex.split(line)[2:] for line in page.splitlines() if line.startswith("$ dpsweep ")]
    assert {"plan", "submit", "record", "status", "logs", "list", "stop"} == {arguments[0] for arguments in shown}
    for name, *arguments in shown:
        address = [] if name in ("plan", "record") else ["--address", "http://127.0.0.1:8265"]
        commands[name].make_context(name, [*arguments, *address])


def test_browsers_may_ask_the_server_of_mlflow_that_the_cluster_page_starts() -> None:
    from mlflow.server.security_utils import should_block_cors_request  # late: it loads the server

    command = (ROOT / "docs" / "cluster.md").read_text().split("\nmlflow server ")[1].split("```")[0]
    allowed = re.findall(r"--cors-allowed-origins '([^']+)'", command)
    assert not should_block_cors_request("http://mlflow.internal:5000", "POST", allowed)


def test_registries_for_new_parts_lie_where_the_architecture_says() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.split("A new part touches these files")[1].split("\n## ")[0]
    named = re.findall(r"`([A-Z_]+)` in `([\w/]+)\.py`", table)
    assert len(named) >= 16
    for registry, path in named:
        module = importlib.import_module(path.removesuffix("/__init__").replace("/", "."))
        assert len(getattr(module, registry)) >= 2, registry
        assert registry in (ROOT / f"{path}.py").read_text()
    assert [path for path in re.findall(r"`(\w+/[\w/]*(?:\.py)?)`", table) if not (ROOT / path).exists()] == []
