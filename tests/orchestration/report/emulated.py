"""Pages of any width, by the DevTools protocol: a window of Chromium is at least 500 pixels wide, a phone's is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

PHONE: Final = 390
"""Width of a phone in pixels."""
_PATIENCE: Final = 60.0
_AS_3_AND_4: Final = """
import fcntl, os, sys
given = [fcntl.fcntl(int(each), fcntl.F_DUPFD_CLOEXEC, 10) for each in sys.argv[1:3]]
for place, descriptor in enumerate(given, 3):
    os.dup2(descriptor, place)
os.execvp(sys.argv[3], sys.argv[3:])
"""
"""The browser reads commands from descriptor 3 and writes answers to 4."""


class Tab:
    """One page of a browser. Commands go to one pipe; answers and events come from another, each ended by a 0."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from, self._kept, self._sent = to_browser, from_browser, b"", 0
        self._session: dict[str, str] = {}
        self.complaints: list[str] = []
        target = self._asked("Target.createTarget", url="about:blank")["targetId"]
        attached = self._asked("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        self._asked("Runtime.enable")

    def open(self, address: str, width: int) -> None:
        """Load the page, so wide, and wait until it says that its pictures are drawn."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width == PHONE}
        self._asked("Emulation.setDeviceMetricsOverride", **size)
        self._asked("Page.navigate", url=address)
        self.wait_for("drawn")

    def wait_for(self, name: str) -> None:
        """Wait until a script has written this data attribute into the body."""
        ends = time.monotonic() + _PATIENCE
        while not self.value(f"document.body && document.body.dataset.{name}"):
            assert time.monotonic() < ends, self.complaints
            time.sleep(0.05)

    def value(self, expression: str) -> Any:
        """Return what a script in the page finds."""
        found = self._asked("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def _asked(self, method: str, **params: Any) -> dict[str, Any]:
        self._sent += 1
        command = {"id": self._sent, "method": method, "params": params, **self._session}
        os.write(self._to, json.dumps(command).encode() + b"\0")
        while (said := self._next()).get("id") != self._sent:
            if said["method"] == "Runtime.exceptionThrown" or said["params"].get("type") == "error":
                self.complaints.append(json.dumps(said))
        assert "error" not in said, said
        return dict(said["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._kept:
            read = os.read(self._from, 1 << 20)
            assert read, "the browser has ended"
            self._kept += read
        said, self._kept = self._kept.split(b"\0", 1)
        return dict(json.loads(said))


@contextmanager
def tab_of(chromium: str, flags: Sequence[str], folder: Path) -> Iterator[Tab]:
    """Start a browser, and end it."""
    (reads, to_browser), (from_browser, writes) = os.pipe(), os.pipe()
    asked = [chromium, *flags, "--remote-debugging-pipe", f"--user-data-dir={folder / 'profile'}"]
    command = [sys.executable, "-c", _AS_3_AND_4, str(reads), str(writes), *asked]
    with subprocess.Popen(command, pass_fds=(reads, writes), stderr=subprocess.DEVNULL) as process:
        os.close(reads)
        os.close(writes)
        try:
            yield Tab(to_browser, from_browser)
        finally:
            process.terminate()
            os.close(to_browser)
            os.close(from_browser)
