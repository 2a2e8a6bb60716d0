"""Single lines of compiled code are kept off stderr, and all others reach it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dpsweep.orchestration.execution.standard_error import stderr_without


def test_only_the_lines_with_the_text_are_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    with stderr_without(b"level"):
        os.write(2, b"one\nthe level is set\ntwo")
        os.write(2, b"three\n")
    os.write(2, b"the level after the block\n")
    assert capfd.readouterr().err == "one\ntwothree\nthe level after the block\n"


def test_what_is_said_before_a_crash_is_seen() -> None:
    code = """
import os, time
from dpsweep.orchestration.execution.standard_error import stderr_without
with stderr_without(b"level"):
    os.write(2, b"the level is set\\nthe reason\\n")
    time.sleep(0.5)
    os.abort()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -6
    assert done.stderr == "the reason\n"


SCRIPT = """
import os, signal, sys
from dpsweep.orchestration.execution.standard_error import told_if_killed
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
