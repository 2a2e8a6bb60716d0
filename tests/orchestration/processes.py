"""The command in processes of its own, and the processes it starts: for tests that kill some of them."""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from dpsweep.orchestration.commands.main import main
from tests.warm import FORKS

COMMAND = [sys.executable, "-c", "from dpsweep.orchestration.commands.main import main; main()"]
PATIENCE = 420.0
"""Seconds after which a test gives up on a process; far above what anything takes."""


class Ended(NamedTuple):
    """What the command gave."""

    code: int
    out: str
    err: str


Command = Callable[..., Ended]
"""The command with these arguments, in the process of the test: the fixture `command`."""


def environment(**changes: str) -> dict[str, str]:
    """This process's environment without what would change where a sweep runs or records."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "MLFLOW_", "TUNE_"))}
    return {**kept, "OMP_NUM_THREADS": "1", **changes}


class Running:
    """The command in a process of its own that need not import everything first."""

    def __init__(self, arguments: tuple[object, ...], changes: dict[str, str], out: Path, err: Path) -> None:
        self._command = ["dpsweep", *map(str, arguments)]
        given = (self._command, environment(**changes), os.getcwd(), str(out), str(err))
        self._process = FORKS.Process(target=_command, args=given)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Its exit code once it has ended, as `subprocess.Popen` gives it."""
        return self._process.exitcode

    def wait(self, seconds: float) -> int:
        self._process.join(seconds)
        if (code := self._process.exitcode) is None:
            self._process.kill()
            self._process.join()
            raise AssertionError(f"{self._command} did not end")
        return code

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


def dpsweep(*arguments: object, **changes: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder) / name for name in ("out", "err"))
        code = Running(arguments, changes, out, err).wait(PATIENCE)
        return subprocess.CompletedProcess([*map(str, arguments)], code, out.read_text(), err.read_text())


def start(*arguments: object, log: Path, **changes: str) -> Running:
    """Start the command and return at once; what it prints goes to ``log``."""
    return Running(arguments, changes, log, log)


def _command(command: list[str], environment: dict[str, str], folder: str, out: str, err: str) -> None:
    """The command as a new interpreter runs it, in a process that was forked."""
    set_up_command(command, environment, folder, out, err)
    try:
        main()
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out


def set_up_command(command: list[str], environment: dict[str, str], folder: str, out: str, err: str) -> None:
    """Give this process, which was forked, what a new interpreter has that runs ``command`` in ``folder``."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests run under nohup
    for descriptor, file in ((1, out), (2, err)):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(folder)
    set_by_imports = {name: value for name, value in os.environ.items() if name.startswith("MLFLOW_")}
    os.environ.clear()
    os.environ.update({**set_by_imports, **environment})
    known = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in known if path and path not in sys.path]  # what an interpreter does at its start
    tempfile.tempdir = None  # chosen as the parent imported torch, without these variables
    random.seed()  # forked processes share the state of their parent
    sys.argv = command


@contextlib.contextmanager
def script(code: str, *arguments: object, errors: Path, **changes: str) -> Iterator[subprocess.Popen[str]]:
    """A process of Python code that prints lines and ends when its stdin closes; its stderr goes to ``errors``."""
    with errors.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            env=environment(**changes),
        )
    assert process.stdin is not None
    try:
        yield process
    finally:
        process.stdin.close()
        process.wait(PATIENCE)


def wait_until(holds: Callable[[], bool], what: str, pause: float = 0.02) -> None:
    """pause: between two looks, in seconds; longer where a look itself takes the processor."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited in vain for {what}")
        time.sleep(pause)


def descendants(pid: int) -> list[int]:
    """Processes below ``pid``, from /proc."""
    parents = dict(_parents())
    found: list[int] = []
    level = [pid]
    while level:
        level = [child for child, parent in parents.items() if parent in level]
        found += level
    return found


def _parents() -> Iterator[tuple[int, int]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            yield int(entry.name), int(fields[1])


def is_alive(pid: int) -> bool:
    try:
        state = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def training_workers(pids: list[int]) -> list[int]:
    """Those of ``pids`` that are Tune's training workers."""
    return [pid for pid in pids if "ImplicitFunc" in command_line(pid)]


def able_to_write(pids: list[int]) -> list[int]:
    """Those of ``pids`` that live and may touch files of a sweep: all but Ray's own agents, which take a minute to
    notice that their cluster is gone."""
    return [pid for pid in pids if is_alive(pid) and "Agent" not in command_line(pid)]


def command_line(pid: int) -> str:
    """Its title, or "" if it has ended."""
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
