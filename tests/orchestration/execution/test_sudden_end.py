"""A process that is ended by force leaves a line with the next step; one that ends by itself leaves none."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys
from dpsweep.orchestration.execution.sudden_end import told_if_killed
with told_if_killed("the same command continues"):
    exec(sys.argv[1])
"""


@pytest.mark.parametrize(
    ("ending", "code", "told"),
    [
        ("os._exit(1)", 1, True),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, True),
        ("pass", 0, False),
        ("raise SystemExit(3)", 3, False),
    ],
)
def test_only_an_end_by_force_is_told(ending: str, code: int, told: bool) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, ending], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, "the same command continues\n" if told else "")
