"""Tells people and programs that a sweep has finished, has failed, or is stuck: a POST of JSON, or a command."""

from __future__ import annotations

import http.client
import json
import os
import re
import shlex
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Final, Literal

from dpsweep.accounting.errors import InvalidInput, count_of
from dpsweep.orchestration.store.published import TrialState
from dpsweep.orchestration.store.status_snapshot import SweepSnapshot

Event = Literal["finished", "failed", "stuck"]
TIMEOUT: Final = 15.0
"""Seconds that a server or a command may take."""
_PAUSES: Final = (0.0, 2.0, 10.0)
"""Seconds before each attempt to reach a server."""
MISSING_FOR: Final = 300.0
"""Seconds after which trials that no node can run are stuck; an autoscaler starts a node within this time."""
IDLE_FOR: Final = 900.0
"""Seconds without any running trial after which a sweep is stuck."""
SILENT_FOR: Final = 3600.0
"""Least seconds without an epoch, a part or an end after which a sweep with running trials is stuck."""
_TIMES_LONGEST: Final = 4.0
"""Such a sweep is stuck after so many times the longest pause between two signs of progress before."""
_VARIABLE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


class Notices:
    """Sends each event once to every one of ``targets``.

    `targets`: addresses (``http://``, ``https://``) and command lines, in which ``${NAME}`` stands for an environment
    variable of the driver, so that secrets need not be in the sweep file.
    `output`: folder or URI of the sweep.
    `told`: events that an earlier driver of the same job has told.
    `warn`: called with a sentence for each target that failed, and once, with targets or without, where the sweep is
    stuck.
    """

    def __init__(self, targets: Sequence[str], output: str, told: Sequence[str], warn: Callable[[str], None]) -> None:
        self._targets, self._output, self._warn = targets, output, warn
        self._told = list(dict.fromkeys(told))
        self._threads: list[threading.Thread] = []
        self._watch = _Watch()

    @property
    def told(self) -> tuple[str, ...]:
        """Events that were told, be it to no target."""
        return tuple(self._told)

    def watch(self, snapshot: SweepSnapshot) -> None:
        """Tell that a running sweep is stuck, if this snapshot shows it, and warn of it."""
        reason = self._watch.reason(snapshot, time.monotonic())
        if reason is not None and "stuck" not in self._told:
            self._warn(f"the sweep is stuck: {reason}")
            self.tell("stuck", reason, snapshot)

    def ended(self, snapshot: SweepSnapshot, error: BaseException | None) -> None:
        """Tell how the sweep has ended; nothing if its user interrupted it. Returns when all targets were told."""
        if error is not None and not isinstance(error, KeyboardInterrupt):
            self.tell("failed", f"its driver ended with {type(error).__name__}", snapshot)
        elif snapshot.state == "failed":
            failed = snapshot.counts()[TrialState.FAILED]
            self.tell("failed", f"{failed} of {len(snapshot.trials)} trials have failed", snapshot)
        elif snapshot.recording is not None and (missing := snapshot.recording.missing()):
            self.tell("failed", missing, snapshot)
        elif error is None:
            self.tell(
                "finished",
                snapshot.reason or count_of(len(snapshot.trials), "trial is", "trials are") + " done",
                snapshot,
            )
        self.wait()

    def tell(self, event: Event, message: str, snapshot: SweepSnapshot | None, sweep: str = "") -> None:
        """Send an event to every target in the background, unless it was sent before.

        snapshot: None where no driver has written one; ``sweep`` is then the name of the sweep.
        """
        if event in self._told:
            return
        self._told.append(event)
        counts = {} if snapshot is None else {state.word: n for state, n in snapshot.counts().items() if n}
        name = sweep if snapshot is None else snapshot.name
        content = {"event": event, "sweep": name, "output": self._output, "message": message, "trials": counts}
        for target in self._targets:
            thread = threading.Thread(target=self._send, args=(target, content), name="dpsweep-notice", daemon=True)
            thread.start()
            self._threads.append(thread)

    def wait(self) -> None:
        """Wait until every target was told, or has failed."""
        for thread in self._threads:
            thread.join(len(_PAUSES) * (TIMEOUT + max(_PAUSES)))

    def _send(self, target: str, content: dict[str, object]) -> None:
        try:
            whole = expanded(target)
            if whole.startswith(("http://", "https://")):
                _post(whole, content)
            else:
                _run(whole, content)
        except (InvalidInput, OSError, ValueError, subprocess.SubprocessError, http.client.HTTPException) as error:
            self._warn(f"{target} was not told that the sweep has {content['event']}: {_reason(error)}")


def _reason(error: Exception) -> str:
    """Return why a target was not told, without its address or command, which hold the values of variables."""
    match error:
        case subprocess.TimeoutExpired():
            return f"it took more than {TIMEOUT:.0f} s"
        case subprocess.CalledProcessError():
            return f"it ended with exit status {error.returncode}"
        case http.client.InvalidURL():
            return "its address holds a blank, a control character or no port; look at its variables"
    return " ".join(str(error).split())


def expanded(target: str) -> str:
    """Return the target with the values of the variables that it names. Raises: InvalidInput for one that is not
    set.
    """

    def value(found: re.Match[str]) -> str:
        if found[1] not in os.environ:
            raise InvalidInput(f"the variable {found[1]} is not set where the driver runs")
        return os.environ[found[1]]

    return _VARIABLE.sub(value, target)


def _post(address: str, content: dict[str, object]) -> None:
    """POST the content as JSON, with a few attempts. Raises: OSError, ValueError."""
    body, headers = json.dumps(content).encode(), {"Content-Type": "application/json"}
    for attempt, pause in enumerate(_PAUSES, 1):
        time.sleep(pause)
        try:
            urllib.request.urlopen(urllib.request.Request(address, body, headers), timeout=TIMEOUT).close()
            return
        except urllib.error.HTTPError as error:
            if error.code < 500 or attempt == len(_PAUSES):
                raise
        except OSError:
            if attempt == len(_PAUSES):
                raise


def _run(command: str, content: dict[str, object]) -> None:
    """Run the command without a shell: the content as JSON on its stdin, and its texts in ``DPSWEEP_...``."""
    variables = {f"DPSWEEP_{name.upper()}": text for name, text in content.items() if isinstance(text, str)}
    subprocess.run(
        shlex.split(command),
        input=json.dumps(content).encode(),
        env={**os.environ, **variables},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=TIMEOUT,
        check=True,
    )


class _Watch:
    """Notices from snapshots of a running sweep whether it is stuck."""

    def __init__(self) -> None:
        self._progress: tuple[int, ...] = ()
        self._progressed, self._longest = 0.0, 0.0
        self._short_since: float | None = None

    def reason(self, snapshot: SweepSnapshot, now: float) -> str | None:
        """Return why the sweep is stuck, in words; None if it is not. now: seconds of a monotonic clock."""
        counts = snapshot.counts()
        running = sum(count for state, count in counts.items() if state.is_running)
        ended = sum(count for state, count in counts.items() if state.has_ended)
        progress = (snapshot.steps, snapshot.parts, ended, running)
        if progress != self._progress:
            self._longest = max(self._longest, now - self._progressed) if self._progress else 0.0
            self._progress, self._progressed = progress, now
        shortage = snapshot.cluster.shortage() if snapshot.cluster else ""
        if not shortage:
            self._short_since = None
        elif self._short_since is None:
            self._short_since = now
        elif now - self._short_since > MISSING_FOR:
            return shortage
        silent = now - self._progressed
        if not running and counts[TrialState.PENDING] and silent > IDLE_FOR:
            return f"no trial has begun for {silent / 60.0:.0f} minutes, and {counts[TrialState.PENDING]} wait"
        if running and silent > max(SILENT_FOR, _TIMES_LONGEST * self._longest):
            trials = count_of(running, "trial runs", "trials run")
            return (
                f"{trials}, but none has shown progress for {silent / 60.0:.0f} minutes; if a process or a node hangs, "
                "end it, and its trial continues from its checkpoint"
            )
        return None
