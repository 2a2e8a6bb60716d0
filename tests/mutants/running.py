"""Runs tests on a copy of the checkout, with a mutant planted or without."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import pytest

from tests.mutants.mutant import Mutant
from tests.warm import FORKS

ROOT: Final = Path(__file__).parents[2]
LIMIT_S: Final = 600
"""Tests that take so much longer than twice their time without the mutant count as killing: the mutant hangs."""

_OWN: Final = frozenset({"dpsweep", "tests"})

Verdict = Literal["killed", "survived", "broken"]
"""``broken``: the mutant cannot be planted, or pytest could not run the tests."""


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant, how long its tests took, and what they said last."""

    mutant: Mutant
    verdict: Verdict
    seconds: float
    said: str

    @property
    def is_accepted(self) -> bool:
        return self.verdict == "killed" or (self.verdict == "survived" and bool(self.mutant.bug.survives))


@dataclass(frozen=True)
class Run:
    """Exit status of pytest, or None when it ran out of time, its output, and the seconds of each test."""

    status: int | None
    output: str
    seconds: Mapping[str, float] = field(default_factory=dict)


def copy_checkout(folder: Path) -> Path:
    """A copy of the files that git tracks or would track, in ``folder``; returns ``folder``."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_symlink() or (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def run_tests(folder: Path, tests: Sequence[str], limit: float | None = None) -> Run:
    """The named tests up to the first failure, from the copy in ``folder``. Hypothesis draws alike every time.

    limit: seconds after which the run is ended; none for tests without a mutant, however busy the machine is.
    """
    shutil.rmtree(folder / ".hypothesis", ignore_errors=True)
    output, seconds = folder / "output.txt", folder / "seconds.json"
    seconds.unlink(missing_ok=True)
    process = FORKS.Process(target=_run_here, args=(str(folder), tuple(tests), str(output), str(seconds)))
    process.start()
    process.join(limit)
    if process.is_alive():
        process.kill()
        process.join()
        return Run(None, f"no end after {limit} s")
    measured = json.loads(seconds.read_text()) if seconds.exists() else {}
    return Run(process.exitcode, output.read_text(errors="replace"), measured)


class _Clock:
    """A plugin of pytest that sums the seconds of each test."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration


def _run_here(folder: str, tests: tuple[str, ...], output: str, seconds: str) -> None:
    """In a process of its own: forget this checkout's modules, and run pytest on those of the copy."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(folder)
    os.environ["PYTHONPATH"] = folder
    os.environ.pop("PYTEST_ADDOPTS", None)  # those of the run that this one may be part of
    sys.dont_write_bytecode = False  # modules that are not changed are compiled once
    sys.path[:] = [folder, *(path for path in sys.path if path not in ("", str(ROOT)))]
    for name in [name for name in sys.modules if name.split(".")[0] in _OWN]:
        del sys.modules[name]
    clock, options = _Clock(), ("-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", "-m", "")
    status = pytest.main([*options, *tests], plugins=[clock])
    Path(seconds).write_text(json.dumps(clock.seconds))
    sys.exit(status)


def try_mutant(folder: Path, mutant: Mutant, unplanted: Mapping[str, Mapping[str, float]] | None = None) -> Outcome:
    """Plant ``mutant`` in the copy, run its tests, and take it out again.

    unplanted: of some tests that it names, the seconds of the single tests without a mutant, in the order to run them
    in.
    """
    began = time.monotonic()
    tests = [each for test in mutant.tests for each in (unplanted or {}).get(test, [test])]
    usual = sum(sum((unplanted or {}).get(test, {}).values()) for test in mutant.tests)
    try:
        with _planted(folder / mutant.file, mutant):
            run = run_tests(folder, tests, LIMIT_S + round(2.0 * usual))
    except (OSError, ValueError) as error:
        return Outcome(mutant, "broken", 0.0, str(error))
    verdicts: dict[int | None, Verdict] = {None: "killed", 0: "survived", 1: "killed"}
    return Outcome(mutant, verdicts.get(run.status, "broken"), time.monotonic() - began, _last_words(run.output))


@contextlib.contextmanager
def _planted(file: Path, mutant: Mutant) -> Iterator[None]:
    text = file.read_text(encoding="utf-8")
    try:
        _write(file, mutant.planted(text))
        yield
    finally:
        _write(file, text)


def _write(file: Path, text: str) -> None:
    """Write a module, and forget what Python compiled of it: a change within a second could go unnoticed."""
    file.write_text(text, encoding="utf-8")
    Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)


def _last_words(output: str) -> str:
    lines = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (lines or output.splitlines() or [""])[-1]
