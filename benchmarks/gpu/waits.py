"""Counts how often, and where, a step makes the host wait for the device, and which operations take its time."""

from __future__ import annotations

import contextlib
import os
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import workloads
from benchmarks.gpu import pictures
from benchmarks.gpu.equality import trial_on
from benchmarks.gpu.phases import Size
from benchmarks.gpu.record import Record
from benchmarks.steps import dpsweep_with_noise, plain
from benchmarks.training import synchronize
from benchmarks.workloads import Workload
from dpsweep.accounting.records import TrialFiles
from dpsweep.workers.own_code.imports import NO_CODE
from dpsweep.workers.training.reproducible import reproducible
from dpsweep.workers.trials.trial import begin

WAITING: Final = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "aten::_local_scalar_dense")
"""Names that the profiler gives to what waits; the last one is all that a CPU shows."""
_STEPS, _LONGEST = 5, 15
_ROOT = Path(__file__).resolve().parents[2]


def run(record: Record, device: torch.device, size: Size) -> None:
    """Record waits and operations of plain and private steps, and of a whole step of a trial."""
    for name in size.profiled:
        _of(record, name, getattr(workloads, size.workloads)[name], device)
    with tempfile.TemporaryDirectory() as folder, record.attempt("a step of a trial"):
        os.environ |= pictures.written(Path(folder), size.rows)
        spec = trial_on(device)
        with reproducible(spec.execution, spec.seed):
            trainer = begin(spec, TrialFiles(str(Path(folder) / "trial")), NO_CODE, ()).trainer
            trainer.refresh()
            _profiled(record, "a step of a trial", trainer.advance, device)


def _of(record: Record, name: str, workload: Workload, device: torch.device) -> None:
    x, y = workload.examples(workload.batch, device)
    for method in (plain, dpsweep_with_noise):
        with record.attempt(told := f"{method.__name__} of {name}"):
            step = method(workload.build().to(device), workload.training)
            _profiled(record, told, partial(step, x, y), device)


def _profiled(record: Record, name: str, step: Callable[[], None], device: torch.device) -> None:
    for _ in range(6):  # verifies the model, compares the 1st and 4th batch after it, chooses among computations
        step()
    synchronize(device)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as profiled:
        for _ in range(_STEPS):
            step()
    events = profiled.key_averages()
    waits = {event.key: event.count / _STEPS for event in events if event.key in WAITING}
    launched = sum(event.count for event in events if event.key in ("cudaLaunchKernel", "cuLaunchKernel")) / _STEPS
    found: dict[str, Any] = {"waits_per_step": waits, "kernels_per_step": launched, "longest": _longest(events, device)}
    with _places_of_waits(device) as places:
        step()
    record.figure(name, {**found, "places": dict(places)})


def _longest(events: Any, device: torch.device) -> dict[str, float]:
    """Milliseconds per step of the operations that take longest, on the device."""
    spent = {
        each.key: each.self_device_time_total if device.type == "cuda" else each.self_cpu_time_total for each in events
    }
    first = sorted(spent.items(), key=lambda item: -item[1])[:_LONGEST]
    return {name[:80]: round(microseconds / _STEPS / 1e3, 4) for name, microseconds in first}


@contextlib.contextmanager
def _places_of_waits(device: torch.device) -> Iterator[Counter[str]]:
    """Counts the places in our code that make a GPU wait, by torch's own warning; none on a CPU."""
    places = Counter[str]()
    if device.type != "cuda":
        yield places
        return

    def note(*told: Any, **more: Any) -> None:
        own = [
            frame
            for frame in traceback.extract_stack()
            if frame.filename.startswith(str(_ROOT / "dpsweep" / "workers"))
        ]
        last = own[-1] if own else None
        places["elsewhere" if last is None else f"{Path(last.filename).relative_to(_ROOT)}:{last.lineno}"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode("default")
