"""What a process says of its memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux alone says the peak of a program by itself")
def test_a_started_program_does_not_inherit_the_peak_of_its_parent() -> None:
    """The parent fills 400 MB; a child that it starts holds far less, whatever `getrusage` says."""
    child = "from dpsweep.workers.machine.memory import peak_bytes; print(peak_bytes())"
    parent = (
        "import subprocess, sys; from dpsweep.workers.machine.memory import peak_bytes; "
        "held = bytearray(b'1' * (400 << 20)); "
        f"print(peak_bytes()); sys.exit(subprocess.run([sys.executable, '-c', {child!r}]).returncode)"
    )
    printed = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, check=True).stdout.split()
    of_parent, of_child = sorted(map(int, printed), reverse=True)
    assert of_parent > 400 << 20
    assert of_child < 200 << 20


def test_the_peak_grows_with_what_is_held() -> None:
    program = (
        "from dpsweep.workers.machine.memory import peak_bytes; before = peak_bytes(); held = b'1' * (64 << 20); "
        "print(peak_bytes() - before)"
    )
    grown = int(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)
    assert 60 << 20 < grown < 80 << 20
