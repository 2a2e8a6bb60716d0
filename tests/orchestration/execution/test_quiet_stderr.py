"""Single lines of compiled code are kept off stderr, and all others reach it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dpsweep.orchestration.execution.quiet_stderr import stderr_without


def test_only_the_lines_with_the_text_are_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    with stderr_without(b"level"):
        os.write(2, b"one\nthe level is set\ntwo")
        os.write(2, b"three\n")
    os.write(2, b"the level after the block\n")
    assert capfd.readouterr().err == "one\ntwothree\nthe level after the block\n"


def test_what_is_said_before_a_crash_is_seen() -> None:
    code = """
import os, time
from dpsweep.orchestration.execution.quiet_stderr import stderr_without
with stderr_without(b"level"):
    os.write(2, b"the level is set\\nthe reason\\n")
    time.sleep(0.5)
    os.abort()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -6
    assert done.stderr == "the reason\n"
