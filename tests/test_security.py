"""SECURITY.md makes promises, and each names a test that there is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from dpsweep.orchestration.commands.main import app
from tests.hostile.of_folders import COMMANDS, ELSEWHERE

ROOT = Path(__file__).parent.parent
PROMISES = [
    line.strip("| ").split(" | ")
    for line in (ROOT / "SECURITY.md").read_text().partition("## Every output")[0].splitlines()
    if line.startswith("| ") and not line.startswith("| promise")
]


def test_there_are_promises() -> None:
    assert len(PROMISES) > 20
    assert all(len(row) == 2 for row in PROMISES)


@pytest.mark.parametrize("named", [row[-1] for row in PROMISES])
def test_every_promise_names_a_test_that_there_is(named: str) -> None:
    found = re.fullmatch(r"`(tests/[\w/]+\.py)(?:::(test_\w+))?`", named)
    assert found is not None, "a file of tests, and perhaps one of them"
    file, test = found.groups()
    tree = ast.parse((ROOT / file).read_text())
    functions = (
        node.name for node in tree.body if isinstance(node, ast.FunctionDef)
    )  # so that pytest finds it by name
    tests = {name for name in functions if name.startswith("test_")}
    assert tests
    assert test is None or test in tests


def test_every_command_is_tried_on_planted_folders_or_is_named_with_a_reason() -> None:
    names = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    tried = {line.split()[0] for line in COMMANDS.values() if line}
    assert names == (tried | set(ELSEWHERE)) - {"open"}
