"""A command that is told to end, by a signal or by its terminal, ends in order and can be continued."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dpsweep.accounting.records.files import exists
from dpsweep.orchestration.store.layout import SweepFiles
from tests.orchestration.processes import COMMAND, PATIENCE, Running, environment, start, wait_until
from tests.orchestration.sample_grids import keys_of, small
from tests.orchestration.tracking.recordings import client_of, runs_of

LONG = small(clipping="flat", noise="constant", seeds=0, epochs=2000, privacy={"noise_multiplier": 1.0, "delta": 1e-5})
SHORT = small(clipping="none", noise="constant", seeds=0)


@pytest.fixture
def files(tmp_path: Path) -> SweepFiles:
    (tmp_path / "sweep.yaml").write_text(LONG)
    return SweepFiles(str(tmp_path / "out"))


def arguments(files: SweepFiles) -> list[str]:
    return ["run", str(Path(files.root).parent / "sweep.yaml"), "--output", files.root, "--address", "in-process"]


def wait_for_training(process: Running | subprocess.Popen[bytes], files: SweepFiles) -> None:
    checkpoint = files.trial(keys_of(LONG)["flat-seed0"]).checkpoint
    wait_until(lambda: exists(checkpoint) or process.poll() is not None, "the trial to train")
    assert process.poll() is None


def statuses(files: SweepFiles) -> set[str]:
    return {run.info.status for run in runs_of(client_of(Path(files.root)))}


@pytest.mark.long
def test_a_hangup_that_comes_twice_ends_the_run_in_order(files: SweepFiles, tmp_path: Path) -> None:
    """A terminal and its shell both send one."""
    process = start(*arguments(files), log=tmp_path / "log")
    wait_for_training(process, files)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGHUP)
    assert process.wait(PATIENCE) == 130
    assert (tmp_path / "log").read_text().splitlines()[-1] == "interrupted; the same command continues where it stopped"
    assert statuses(files) == {"KILLED"}


@pytest.mark.long
def test_a_terminal_that_closes_ends_the_run_in_order(files: SweepFiles) -> None:
    ours, theirs = pty.openpty()
    setsid_with_terminal = ["setsid", "--ctty", "env", "--default-signal=HUP", *COMMAND, *arguments(files)]
    process = subprocess.Popen(setsid_with_terminal, stdin=theirs, stdout=theirs, stderr=theirs, env=environment())
    os.close(theirs)
    wait_for_training(process, files)
    os.close(ours)
    process.wait(PATIENCE)
    assert statuses(files) == {"KILLED"}


@pytest.mark.long
def test_under_nohup_a_run_outlives_its_terminal(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(SHORT)
    files = SweepFiles(str(tmp_path / "out"))
    with (tmp_path / "log").open("wb") as log:
        nohup = ["nohup", *COMMAND, *arguments(files)]
        process = subprocess.Popen(nohup, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment())
    wait_until(lambda: exists(files.manifest) or process.poll() is not None, "the run to start")
    process.send_signal(signal.SIGHUP)
    assert process.wait(PATIENCE) == 0, (tmp_path / "log").read_text()


@pytest.mark.long
def test_an_embedded_cluster_adds_no_lines_of_its_own_when_its_driver_is_told_to_end(
    files: SweepFiles, tmp_path: Path
) -> None:
    """Ray starts in a thread, and has a handler of SIGTERM that prints a native stack trace."""
    process = start("run", tmp_path / "sweep.yaml", "--output", files.root, log=tmp_path / "log")
    wait_for_training(process, files)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 130
    assert (tmp_path / "log").read_text().splitlines() == ["interrupted; the same command continues where it stopped"]


_STUCK = """
import hashlib, os, subprocess, threading
from dpsweep.orchestration.commands.running import ended_by_signals
from dpsweep.orchestration.execution.session import private_session, told_if_killed
with ended_by_signals(), told_if_killed("killed"), private_session():
    subprocess.Popen(["sleep", "1800"], stdout=open(os.environ["RAY_TMPDIR"] + "/log", "w"))  # as Ray's
    threading.Timer(1.0, print, ["ready"], {"flush": True}).start()  # from inside the call below
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # half an hour in which Python calls no handler
"""


_OCCUPIED = """
import threading, time
from dpsweep.orchestration.commands.running import ended_by_signals
threading.Thread(target=time.sleep, args=(1800,)).start()  # an interpreter would wait for it
with ended_by_signals():
    try:
        print("ready", flush=True)
        time.sleep(1800)
    except KeyboardInterrupt:
        print("interrupted")
        raise SystemExit(130)
"""


_CALLED_BACK = """
import time, weakref
from dpsweep.orchestration.commands.running import ended_by_signals
with ended_by_signals():
    try:
        kept = weakref.ref(given := {1}, lambda _: print("ready", flush=True) or time.sleep(1800))
        del given
        time.sleep(1800)
    except KeyboardInterrupt:
        print("interrupted")
        raise SystemExit(130)
"""


def told_to_end(code: str, **variables: str) -> tuple[int, str, str]:
    """Exit code, stdout after its first line, and stderr of Python code that gets SIGTERM once it prints ``ready``."""
    command, variables = [sys.executable, "-c", code], environment(**variables)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err


def test_a_command_that_a_library_keeps_busy_is_ended_by_force() -> None:
    forced = "ended by force, as it did not end by itself; every file is whole, old or new\n"
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        assert told_to_end(_STUCK, RAY_TMPDIR=folder) == (130, "", forced)
        assert os.listdir(folder) == [], "nor what it was starting"


def test_a_command_that_was_told_to_end_waits_for_no_thread() -> None:
    assert told_to_end(_OCCUPIED) == (130, "interrupted\n", "")


def test_a_command_that_is_told_to_end_in_a_callback_ends_in_order() -> None:
    assert told_to_end(_CALLED_BACK) == (130, "interrupted\n", "")
