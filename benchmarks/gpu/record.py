"""The findings of a phase, one JSON object a line, written at once, so that they are kept however it ends."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

MOST_TRACEBACKS: Final = 50
"""Of a phase: if every test failed, their tracebacks would make gpu.json too large to be taken along."""


class Record:
    """Appends figures, failures and skipped parts of a phase to a file."""

    def __init__(self, path: Path) -> None:
        self._path, self._failures = path, 0

    def figure(self, name: str, value: object) -> None:
        """Keep a measured value: a number, or a mapping of them."""
        self._write({"figure": name, "value": value})

    def skipped(self, name: str, reason: str) -> None:
        """Note what is left out, and why."""
        self._write({"skipped": name, "reason": reason})

    def failed(self, name: str, error: str, details: str) -> None:
        """Note a failure. error: in one line. details: its traceback, which the first ones keep."""
        self._failures += 1
        kept = details if self._failures <= MOST_TRACEBACKS else ""
        self._write({"failure": name, "error": error, "traceback": kept})

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """Keep an exception of the block as a failure, and go on after it."""
        try:
            yield
        except Exception as error:
            self.failed(name, f"{type(error).__name__}: {error}"[:1000], traceback.format_exc()[-8000:])

    def _write(self, line: Mapping[str, object]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line, default=str) + "\n")


def read(path: Path) -> dict[str, Any]:
    """Return what a `Record` holds so far; the end of a line that is still being written is left out."""
    found: dict[str, Any] = {"figures": {}, "failures": [], "skipped": {}}
    for text in path.read_text().split("\n")[:-1] if path.exists() else []:
        line = json.loads(text)
        if "figure" in line:
            found["figures"][line["figure"]] = line["value"]
        elif "skipped" in line:
            found["skipped"][line["skipped"]] = line["reason"]
        else:
            found["failures"].append(line)
    return found
