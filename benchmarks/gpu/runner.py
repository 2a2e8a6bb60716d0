"""Runs the phases, each in its own process, and ends those that hang."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.phases import Phase, Size
from benchmarks.gpu.record import Record, read
from benchmarks.gpu.report import Report
from dpsweep.workers.machine.memory import ALLOCATOR

NO_DEVICE: Final = 4
"""Exit status of a phase on a machine that lacks the device."""
_SOON, _PATIENCE, _SHORTEST = 0.1, 3.0, 5.0
"""Seconds between two looks at a phase; for its last words; and that must be left for a phase to begin."""
_LAST_WORDS, _MOST_OUTPUT = signal.SIGUSR1, 6000
_PR_SET_PDEATHSIG: Final = 1


def run_phases(
    phases: Sequence[Phase],
    report: Report,
    device: str,
    size: Size,
    seconds: float,
    folder: Path,
    shared: str = "benchmarks.gpu.preloaded",
) -> int:
    """Run the phases one after the other, and note what each has found in the report. Returns an exit status.

    shared: the module that is imported once for all phases; it must not touch the device.
    """
    os.environ.update(ALLOCATOR)
    os.environ.setdefault("OMP_NUM_THREADS", "2")  # tests run in eight processes
    os.environ.update({"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"})
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([shared])
    try:
        for phase in phases:
            left = seconds * size.patience - report.elapsed - _PATIENCE
            if left < _SHORTEST:
                report.note(phase, state="no time left")
                print(f"{phase.name}: no time left", flush=True)
                continue
            status = _run(context, phase, report, device, size, min(phase.limit * size.patience, left), folder)
            _say(report, phase)
            if status == NO_DEVICE:
                report.end("no such device")
                return 2
    except KeyboardInterrupt:
        report.end("interrupted")
        return 130
    report.end("done")
    return 1 if report.failed else 0


def _run(context: Any, phase: Phase, report: Report, device: str, size: Size, limit: float, folder: Path) -> int | None:
    """Run one phase within ``limit`` seconds. Returns its exit status, None if it had to be ended."""
    lines, output = folder / f"{phase.name}.jsonl", folder / f"{phase.name}.log"
    process: ForkServerProcess = context.Process(
        target=_phase, args=(phase, device, size, str(lines), str(output), str(folder)), name=phase.name
    )
    report.note(phase, state="starting", limit=round(limit, 1))
    try:
        process.start()  # of the first one, when the imports are done
    except (EOFError, OSError):  # importing what phases share has ended the process that starts them
        report.note(phase, shared_imports="they end the process; each phase imports by itself")
        context.set_forkserver_preload([])
        time.sleep(_PATIENCE / 3)  # until it is gone
        process.start()
    report.note(phase, state="running")
    began, seen = time.monotonic(), -1
    try:
        while process.is_alive() and time.monotonic() < began + limit:
            process.join(_SOON)
            written = lines.stat().st_size if lines.exists() else 0
            if written != seen:
                report.note(phase, **read(lines))
                seen = written
    finally:
        in_time = not process.is_alive()
        _end(process)
        spent = round(time.monotonic() - began, 1)
        status = process.exitcode if in_time else None
        said = output.read_text(errors="replace")[-_MOST_OUTPUT:] if output.exists() else ""
        report.note(
            phase, state=_state(status), seconds=spent, **read(lines), **({} if status == 0 else {"output": said})
        )
    return status


def _state(status: int | None) -> str:
    """Return how a phase ended, in words."""
    if status is None:
        return "out of time"
    if status < 0:
        return f"crashed by {signal.Signals(-status).name}"
    return "done" if status == 0 else f"failed with status {status}"


def _end(process: ForkServerProcess) -> None:
    """Have a phase that still runs say where it is, and kill it with all that it started, or what outlives it."""
    assert process.pid is not None, "it was started"
    with contextlib.suppress(ProcessLookupError):
        if process.is_alive():
            os.kill(process.pid, _LAST_WORDS)
            process.join(_PATIENCE / 3)
        os.killpg(process.pid, signal.SIGKILL)
    process.join(_PATIENCE)


def _phase(phase: Phase, device: str, size: Size, lines: str, output: str, folder: str) -> None:
    """The process of a phase: leads its own group, dies with the runner, and writes what it says to a file."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_end_with_runner, daemon=True).start()
    written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for handle in (1, 2):
        os.dup2(written, handle)
    gc.freeze()  # what all phases have imported; collections of garbage skip it
    faulthandler.enable()
    faulthandler.register(_LAST_WORDS, all_threads=True)
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    record = Record(Path(lines))
    from dpsweep.accounting.errors import InvalidInput
    from dpsweep.workers.machine.devices import choose_device

    try:
        chosen = choose_device(device)
    except InvalidInput as error:
        record.failed("device", f"{str(error).partition(';')[0]}; --device cpu is a dry run", "")
        sys.exit(NO_DEVICE)
    with record.attempt(phase.name):
        importlib.import_module(phase.module).run(record, chosen, size)
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    record.figure("cpu_seconds", round(sum(each.ru_utime + each.ru_stime for each in used), 1))


def _end_with_runner() -> None:
    """End this phase, and all that it started, when the runner has ended.

    The process that forked it does not end with the runner: it lives as long as this one, which holds its pipe.
    """
    runner = multiprocessing.parent_process()
    assert runner is not None, "the runner started this process"
    runner.join()
    os.killpg(0, signal.SIGKILL)


def _say(report: Report, phase: Phase) -> None:
    print(report.line(phase), flush=True)
