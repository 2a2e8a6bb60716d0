"""Runs the driver of a submitted sweep inside its Ray job, and starts it again when it was killed.

The next driver continues the sweep of a killed one, so a restart is all that is needed. This module uses the standard
library only, so that its process outlives a driver that ran out of memory. It is the entry point of the job:
``python3 -P -m dpsweep.orchestration.execution.supervisor ID``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Final

RESTARTS = 10
"""Most restarts of a killed driver."""
_PAUSE, _LONGEST_PAUSE = 5.0, 300.0
FEW_ARENAS: Final = {"MALLOC_ARENA_MAX": "2"}
"""By itself, glibc gives each of up to 64 threads that wait for accounting an arena, and never reuses 6 MB of each."""
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_COMMAND: Final = (sys.executable, "-P", "-c", "from dpsweep.orchestration.commands.main import main; main()")
_TOLD_WITHIN: Final = 120.0
"""Seconds that telling others of a failure may take."""


class Supervisor:
    """Runs ``command`` until it exits; restarts it up to ``restarts`` times if a signal kills it.

    `pause`: seconds before the first restart, doubled with each further one; the workers of the killed driver disappear
    meanwhile. A claim in an object store is waited for by the next driver itself.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], restarts: int, pause: float) -> None:
        self._command, self._environment = list(command), dict(environment)
        self._restarts, self._pause = restarts, pause
        self._driver: subprocess.Popen[bytes] | None = None
        self._is_stopping = False

    @property
    def is_stopping(self) -> bool:
        """Return whether the job was told to stop."""
        return self._is_stopping

    def run(self) -> int:
        """Run the driver; return its last exit code, or 128 + n if signal n killed it. Call it in the main thread."""
        for number in _STOPPING:
            signal.signal(number, self._stop)
        pause = self._pause
        for restarts_left in range(self._restarts, -1, -1):
            code = self._run_once()
            if code >= 0 or self._is_stopping:
                return code if code >= 0 else 128 - code
            _say(f"the driver was killed by {signal.Signals(-code).name}")
            if restarts_left:
                _say(f"starting it again in {pause:g} s; restarts left: {restarts_left}")
                self._wait(pause)
                pause = min(2.0 * pause, _LONGEST_PAUSE)
            if self._is_stopping:
                return 128 + signal.SIGTERM
        _say("giving up; submit the sweep again to continue it")
        return 128 - code

    def _wait(self, duration: float) -> None:
        """Sleep for ``duration`` seconds, or until the job is stopped."""
        deadline = time.monotonic() + duration
        while time.monotonic() < deadline and not self._is_stopping:
            time.sleep(0.1)

    def _run_once(self) -> int:
        self._driver = subprocess.Popen(self._command, env=self._environment)
        if self._is_stopping:  # the signal arrived while the driver started
            self._driver.send_signal(signal.SIGTERM)
        return self._driver.wait()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._is_stopping = True
        if self._driver is not None and self._driver.poll() is None:
            self._driver.send_signal(signal.SIGTERM)


def _say(text: str) -> None:
    print(f"supervisor: {text}", file=sys.stderr, flush=True)


def main() -> None:
    """Run the job with the argument ``ID``. The driver runs in the home folder, where it may write `runs/`."""
    job = sys.argv[1]
    os.chdir(Path.home())
    # the workers get the code and the variables that the driver ships, not the job's own package
    environment = {**FEW_ARENAS, **os.environ, "DPSWEEP_JOB": job, "RAY_OVERRIDE_JOB_RUNTIME_ENV": "1"}
    supervisor = Supervisor((*_COMMAND, "drive"), environment, RESTARTS, _PAUSE)
    code = supervisor.run()
    if code and not supervisor.is_stopping:
        _tell(how_it_ended(code, job), environment)
    sys.exit(code)


def how_it_ended(code: int, job: str) -> str:
    """Return the end of a job's last driver, in words.

    >>> how_it_ended(137, "small-1f")
    'its driver was killed by SIGKILL 11 times; `dpsweep logs small-1f` shows what it printed'
    """
    killed = f"was killed by {signal.Signals(code - 128).name} {RESTARTS + 1} times" if code > 128 else ""
    return f"its driver {killed or f'ended with exit code {code}'}; `dpsweep logs {job}` shows what it printed"


def _tell(message: str, environment: Mapping[str, str]) -> None:
    """Let whom the sweep file names in ``notify`` know, unless the driver did; a failure changes nothing."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run((*_COMMAND, "tell-failed", message), env=environment, timeout=_TOLD_WITHIN)


if __name__ == "__main__":
    main()
