"""Every flag that an error, a hint or a help text names exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import typer

from dpsweep.orchestration.commands.main import app

ROOT = Path(__file__).parents[3]
OF_OTHER_PROGRAMS = {
    *("--backend-store-uri", "--allowed-hosts", "--host", "--port", "--serve-artifacts"),  # mlflow
    *("--head", "--labels", "--node-ip-address", "--resources"),  # ray
    *("--env", "--local-dir", "--porcelain", "--summary", "--target"),  # docker, hf, git, pip
}
NOT_TEXTS = {"orchestration/report/writing.py"}
"""Files that only pass flags to Chromium."""


def flags() -> set[str]:
    """Return the options of all commands."""
    command = typer.main.get_command(app)
    found = {"--help", *(name for each in command.params for name in (*each.opts, *each.secondary_opts))}
    for each in getattr(command, "commands", {}).values():
        found |= {name for option in each.params for name in (*option.opts, *option.secondary_opts)}
    return {name for name in found if name.startswith("--")}


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
