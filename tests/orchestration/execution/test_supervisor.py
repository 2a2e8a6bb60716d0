"""The loop around a submitted driver: a killed one is started again, any other end is final."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.orchestration.processes import PATIENCE, wait_until

LOOP = """
import os, sys
from dpsweep.orchestration.execution.supervisor import Supervisor
code, note, pause = sys.argv[1:]
sys.exit(Supervisor((sys.executable, "-c", code, note), os.environ, restarts=2, pause=float(pause)).run())
"""
DRIVER = """
import os, signal, sys, time
with open(sys.argv[1], "a") as note:
    print(os.getpid(), file=note)
attempt = len(open(sys.argv[1]).readlines())
"""


def loop(note: Path, driver: str, pause: float = 0.01) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", LOOP, DRIVER + driver, str(note), str(pause)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def ended(note: Path, driver: str) -> tuple[int, int, str]:
    """Exit code, number of drivers, and what the loop said."""
    process = loop(note, driver)
    said = process.communicate(timeout=PATIENCE)[1]
    return process.returncode, len(note.read_text().splitlines()), said


def test_a_killed_driver_is_started_again(tmp_path: Path) -> None:
    driver = "if attempt < 3: os.kill(os.getpid(), signal.SIGKILL)"
    code, drivers, said = ended(tmp_path / "note", driver)
    assert (code, drivers) == (0, 3)
    assert said.count("the driver was killed by SIGKILL") == 2


def test_but_not_for_ever(tmp_path: Path) -> None:
    code, drivers, said = ended(tmp_path / "note", "os.kill(os.getpid(), signal.SIGSEGV)")
    assert (code, drivers) == (128 + signal.SIGSEGV, 3)
    assert said.splitlines()[-1] == "supervisor: giving up; submit the sweep again to continue it"


def test_an_error_is_final(tmp_path: Path) -> None:
    assert ended(tmp_path / "note", "sys.exit(2)") == (2, 1, "")


def test_a_stop_is_passed_on_and_final(tmp_path: Path) -> None:
    """Also where the driver dies of it."""
    note = tmp_path / "note"
    process = loop(note, "time.sleep(600)")
    wait_until(lambda: note.exists() and bool(note.read_text()), "the driver")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGTERM
    (driver,) = note.read_text().split()
    assert not os.path.exists(f"/proc/{driver}")


def test_a_stop_between_two_drivers_is_final_at_once(tmp_path: Path) -> None:
    note = tmp_path / "note"
    process = loop(note, "os.kill(os.getpid(), signal.SIGKILL)", pause=3600.0)
    assert process.stderr is not None
    assert any("starting it again in 3600 s" in line for line in process.stderr)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGTERM
    assert len(note.read_text().splitlines()) == 1
