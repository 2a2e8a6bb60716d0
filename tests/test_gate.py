"""What the gate runs is what pre-commit runs and what CONTRIBUTING names."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from tests.conftest import WAITING

ROOT = Path(__file__).parent.parent


def _static_checks() -> list[str]:
    """The commands that .ci/run runs beside the README's test command, in order."""
    script = (ROOT / ".ci" / "run").read_text()
    checks = re.findall(r"^ *(\.venv/bin/.*)$", script, re.MULTILINE)
    assert len(checks) == 4, script
    return checks


def test_the_hooks_of_pre_commit_are_the_static_checks_of_the_gate() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local", "hooks of other repositories would need the network"
    assert [hook["entry"] for hook in repository["hooks"]] == _static_checks()
    for hook in repository["hooks"]:
        assert (hook["language"], hook["always_run"], hook["pass_filenames"]) == ("system", True, False), hook["id"]


def test_contributing_names_the_static_checks_of_the_gate() -> None:
    (block,) = re.findall(r"```sh\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    commands = [command.strip() for line in block.splitlines() for command in line.split("&&")]
    assert commands[-4:] == _static_checks()


def test_the_files_whose_order_is_special_are_there() -> None:
    assert [file for file in WAITING if not (ROOT / file).is_file()] == []
