"""Trials that share the device, each in its own process, beside one that has it alone."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Mapping
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import pictures
from benchmarks.gpu.equality import PADDED, trial_on
from benchmarks.gpu.phases import Size
from benchmarks.gpu.record import Record
from dpsweep.workers.trials.trial import run_trial

Settings = Mapping[str, Any]
"""Of the execution of a trial."""
_READY = 600.0
"""Seconds in which processes begin; the limit of the phase is shorter."""


def run(record: Record, device: torch.device, size: Size) -> None:
    """Record examples a second of one trial, and of several at once."""
    with tempfile.TemporaryDirectory() as folder:
        environment = pictures.written(Path(folder), size.rows)
        rates = {}
        for kind, settings in {"": {}, " recorded": PADDED}.items():
            for count, name in ((1, f"alone{kind}"), (size.at_once, f"together{kind}")):
                rates[name] = _rate(count, device, size, Path(folder) / name, environment, settings)
                record.figure(name, {"trials": count, "examples_per_s": round(rates[name], 1)})
        record.figure("throughput", rates)


def _rate(
    count: int, device: torch.device, size: Size, folder: Path, environment: Mapping[str, str], settings: Settings
) -> float:
    """Examples a second of ``count`` trials at once, from the moment at which all are ready to the end of the last."""
    context = multiprocessing.get_context("forkserver")  # that of the runner, which has not touched the device
    ready = context.Barrier(count + 1)
    processes = [
        context.Process(target=_train, args=(ready, device, size, folder / str(place), environment, settings))
        for place in range(count)
    ]
    for process in processes:
        process.start()
    ready.wait(_READY)
    began = time.perf_counter()
    for process in processes:
        process.join()
    taken = time.perf_counter() - began
    if statuses := [process.exitcode for process in processes if process.exitcode != 0]:
        raise RuntimeError(f"{len(statuses)} of {count} trials ended with status {statuses}")
    return count * size.rows * size.epochs / taken


def _train(
    ready: Barrier,
    device: torch.device,
    size: Size,
    folder: Path,
    environment: Mapping[str, str],
    settings: Settings,
) -> None:
    """A short trial, which loads what a first one loads, and then the one that is measured."""
    threading.Thread(target=_end_with_phase, daemon=True).start()
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        run_trial(trial_on(device, epochs=1, rows=100, settings=settings), str(folder / "first"))
    except BaseException:
        ready.abort()
        raise
    ready.wait(_READY)
    run_trial(trial_on(device, epochs=size.epochs, settings=settings), str(folder / "measured"))


def _end_with_phase() -> None:
    """End this process when the phase that started it has ended, as one that is out of time does."""
    phase = multiprocessing.parent_process()
    assert phase is not None, "the phase started this process"
    phase.join()
    os._exit(1)
