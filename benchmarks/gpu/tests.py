"""The tests of training on the device, each failure kept as it happens."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.phases import Size
from benchmarks.gpu.record import Record

ROOT = Path(__file__).resolve().parents[2]
_PROCESSES = 12
_NOT_PACKED = "ModuleNotFoundError"


class Kept:
    """Plugin of pytest: counts outcomes and keeps failures."""

    def __init__(self, record: Record) -> None:
        self._record, self.outcomes, self.slowest = record, Counter[str](), dict[str, float]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called by pytest for each part of each test."""
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] += 1
            self.slowest[report.nodeid] = report.duration
            self._record.figure("outcomes", dict(self.outcomes))
        if report.outcome == "failed":
            self._record.failed(report.nodeid, _last_line(report.longreprtext), report.longreprtext[-8000:])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Called by pytest for each file."""
        if report.outcome == "failed" and (reason := _last_line(report.longreprtext)).startswith(_NOT_PACKED):
            self._record.skipped(report.nodeid, reason)
        elif report.outcome == "failed":
            self._record.failed(report.nodeid, reason, report.longreprtext[-8000:])


def _last_line(text: str) -> str:
    told = [line[2:] for line in text.splitlines() if line.startswith("E ")]
    return (told[0] if told else text.strip().rpartition("\n")[2]).strip()[:300]


def run_tests(record: Record, device: torch.device, paths: tuple[str, ...], *options: str) -> None:
    """Run the tests of ``paths`` on the device, several files at a time on a GPU."""
    kept, at_once = Kept(record), [] if device.type == "cpu" else ["-n", str(_PROCESSES), "--dist", "loadfile"]
    chosen = [f"--device={device}", "--rootdir", str(ROOT), "-p", "no:cacheprovider", "--durations=0", *at_once]
    chosen.append("--continue-on-collection-errors")
    status = pytest.main([*chosen, *options, *(str(ROOT / path) for path in paths)], plugins=[kept])
    slowest = sorted(kept.slowest.items(), key=lambda item: -item[1])[:10]
    record.figure("slowest_seconds", {name: round(seconds, 2) for name, seconds in slowest})
    record.figure("status_of_pytest", int(status))
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        record.failed("pytest", f"it ended with {status!s}", "")


def run(record: Record, device: torch.device, size: Size) -> None:
    """Run the first tests, up to the twentieth failure."""
    run_tests(record, device, size.tests, "--maxfail=20")
