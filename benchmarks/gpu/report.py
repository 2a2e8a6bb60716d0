"""gpu.json: what a run has found so far, written again after every change."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.goals import goals
from benchmarks.gpu.phases import Phase

_VERSIONS: Final = (
    *("torch", "torchvision", "triton", "numpy", "transformers", "peft", "opacus", "opake-engine", "ray", "mlflow"),
    *("pydantic", "cryptography", "dp-accounting", "pytest"),
)


class Report:
    """The content of gpu.json. Each `save` replaces the file as a whole, so that it is valid whenever the run ends."""

    def __init__(self, path: Path, device: str, phases: Sequence[Phase], root: Path) -> None:
        self._path, self._began = path, time.monotonic()
        self.unsaved: str | None = None
        """Why the file lacks what was found last; None if it is whole."""
        self._content: dict[str, Any] = {
            "state": "running",
            "asked_for": device,
            "began": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "machine": _machine(root),
            "goals": [],
            "phases": {each.name: {"state": "waiting", "about": each.about, "limit": each.limit} for each in phases},
        }
        self.save()

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began

    @property
    def failed(self) -> list[str]:
        """Phases that failed in part, did not end by themselves, or had no time."""
        phases: dict[str, dict[str, Any]] = self._content["phases"]
        return [name for name, each in phases.items() if each["state"] != "done" or each.get("failures")]

    def note(self, phase: Phase, **found: object) -> None:
        """Keep what is known of a phase."""
        self._content["phases"][phase.name].update(found)
        self.save()

    def line(self, phase: Phase) -> str:
        """Return what a terminal shows of a phase that has ended."""
        found = self._content["phases"][phase.name]
        counts = f"{len(found['figures'])} figures, {len(found['failures'])} failures, {len(found['skipped'])} skipped"
        errors = "".join(f"\n  {each['failure']}: {each['error']}" for each in found["failures"])
        skipped = "".join(f"\n  {name}: skipped, {reason}" for name, reason in found["skipped"].items())
        return f"{phase.name}: {found['state']} after {found['seconds']} s, {counts}{errors}{skipped}"

    def end(self, state: str) -> None:
        """Note how the run ended. What cannot be written to the file is printed."""
        self._content["state"] = state
        self.save()
        if self.unsaved is not None:
            print(f"{self._path} cannot be written: {self.unsaved}. It would hold:\n{self._text()}", flush=True)

    def save(self) -> None:
        """Write the file: first under another name, which then replaces it. A run goes on where that fails."""
        self._content["seconds"] = round(self.elapsed, 1)
        figures = {name: each.get("figures", {}) for name, each in self._content["phases"].items()}
        self._content["goals"] = goals(figures)
        beside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            with contextlib.suppress(FileExistsError):  # a file, which the next line says better
                self._path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(self._text())
            beside.replace(self._path)
            self.unsaved = None
        except OSError as error:
            self.unsaved = error.strerror
            with contextlib.suppress(OSError):
                beside.unlink(missing_ok=True)

    def _text(self) -> str:
        return json.dumps(self._content, indent=1, default=str) + "\n"


def _machine(root: Path) -> dict[str, object]:
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "gpu": _said(["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]),
        "commit": _said(["git", "-C", str(root), "describe", "--always", "--dirty"]),
        "versions": {name: _version(name) for name in _VERSIONS},
    }


def _said(command: list[str]) -> str | None:
    """Return what a command prints, or None where it fails or there is none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10.0, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
