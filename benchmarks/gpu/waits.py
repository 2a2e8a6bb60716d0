"""Counts how often, and where, a step makes the host wait for the device, and which operations take its time."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks import workloads
from benchmarks.gpu import pictures
from benchmarks.gpu.equality import PADDED, trial_on
from benchmarks.gpu.phases import Size
from benchmarks.gpu.record import Record
from benchmarks.steps import SETTLED, dpsweep_with_noise, plain
from benchmarks.training import built, synchronize
from benchmarks.workloads import Workload
from dpsweep.accounting.records.trial_files import TrialFiles
from dpsweep.workers.machine.devices import without_tf32
from dpsweep.workers.own_code.imports import NO_CODE
from dpsweep.workers.training.reproducible import reproducible
from dpsweep.workers.trials.trial_setup import set_up

WAITING: Final = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "aten::_local_scalar_dense")
"""Names that the profiler gives to what waits; the last one is all that a CPU shows."""
_LAUNCHES: Final = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx")
_STEPS, _LONGEST = 3, 25
_ROOT = Path(__file__).resolve().parents[2]


@without_tf32()
def run(record: Record, device: torch.device, size: Size) -> None:
    """Record waits and operations of plain and private steps, and of a whole step of a trial."""
    for name in size.profiled:
        _of(record, name, getattr(workloads, size.workloads)[name], device)
    for told, settings in {"a step of a trial": {}, "a step of a trial, recorded": PADDED}.items():
        with tempfile.TemporaryDirectory() as folder, record.attempt(told):
            os.environ |= pictures.written(Path(folder), size.rows)
            spec = trial_on(device, settings=settings)
            with reproducible(spec.execution, spec.seed):
                trainer = set_up(spec, TrialFiles(str(Path(folder) / "trial")), NO_CODE, ()).trainer
                trainer.refresh()
                _profiled(record, told, trainer.advance, device)


def _of(record: Record, name: str, workload: Workload, device: torch.device) -> None:
    x, y = workload.examples(workload.batch, device)
    for method in (plain, dpsweep_with_noise):
        with record.attempt(told := f"{method.__name__} of {name}"):
            step = method(built(workload, device), workload.training)
            _profiled(record, told, partial(step, x, y), device)


def _profiled(record: Record, name: str, step: Callable[[], None], device: torch.device) -> None:
    for _ in range(SETTLED):
        step()
    synchronize(device)
    elapsed = _milliseconds(step, device)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as profiled:
        for _ in range(_STEPS):
            step()
        synchronize(device)
    counts, spent = Counter[str](), Counter[str]()
    for event in profiled.profiler.kineto_results.events():  # sums by torch take minutes for thousands of kernels
        on_device = event.device_type() != DeviceType.CPU
        counts[event.name()] += 1
        spent[event.name()] += event.duration_ns() * (on_device or device.type == "cpu")
    found: dict[str, Any] = {
        **elapsed,
        "waits_per_step": {name: counts[name] / _STEPS for name in WAITING if counts[name]},
        "kernels_per_step": sum(counts[name] for name in _LAUNCHES) / _STEPS,
        "device_ms": round(sum(spent.values()) / _STEPS / 1e6, 3) if device.type == "cuda" else None,
        "longest": {name[:80]: round(each / _STEPS / 1e6, 4) for name, each in spent.most_common(_LONGEST)},
    }
    with _places_of_waits(device) as places:
        step()
    record.figure(name, {**found, "places": dict(places)})


def _milliseconds(step: Callable[[], None], device: torch.device) -> dict[str, float]:
    """Return how long the host takes to start a step, and how long the step takes, in milliseconds."""
    synchronize(device)
    began = time.perf_counter()
    for _ in range(_STEPS):
        step()
    started = time.perf_counter() - began
    synchronize(device)
    ended = time.perf_counter() - began
    return {"host_ms": round(started / _STEPS * 1e3, 3), "step_ms": round(ended / _STEPS * 1e3, 3)}


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
