"""Which private steps are recorded as CUDA graphs, and plain steps whose model is compiled."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks import workloads
from benchmarks.gpu.phases import Size
from benchmarks.gpu.record import Record
from benchmarks.steps import SETTLED, Step, clipped_by, dpsweep, engine_of, plain
from benchmarks.training import built, free, seconds
from benchmarks.workloads import Workload
from dpsweep.workers.spec import ExecutionSpec
from dpsweep.workers.training.reproducible import reproducible

_TIMES = 10


def run(record: Record, device: torch.device, size: Size) -> None:
    """Record milliseconds of each; what cannot be compiled or recorded is a failure with its reason."""
    for name, workload in getattr(workloads, size.workloads).items():
        with record.attempt(f"recorded {name}"):
            _recorded(record, name, workload, device)
        free(device)
    for name in size.compiled:  # last, as compilers may take all the time that is left
        _of(record, name, getattr(workloads, size.workloads)[name], device)


def _of(record: Record, name: str, workload: Workload, device: torch.device) -> None:
    x, y = workload.examples(workload.batch, device)

    def timed(step: Step) -> float:
        for _ in range(SETTLED):
            step(x, y)
        return round(seconds(lambda: step(x, y), _TIMES, device) * 1e3, 3)

    for method in (plain, dpsweep):
        with record.attempt(told := f"{method.__name__} of {name}"):
            record.figure(told, timed(method(built(workload, device), workload.training)))
    if device.type != "cuda":
        record.skipped(f"compiled {name}", "compilers are measured on a GPU alone")
        return
    for mode in ("default", "reduce-overhead"):
        with record.attempt(told := f"compiled plain of {name}, {mode}"):
            compiled: Any = torch.compile(built(workload, device), mode=mode)
            record.figure(told, timed(plain(compiled, workload.training)))


def _recorded(record: Record, name: str, workload: Workload, device: torch.device) -> None:
    """Record why private passes of a model are not recorded as CUDA graphs, and the memory that they hold if so."""
    x, y = workload.examples(workload.batch, device)
    engine = engine_of(built(workload, device), workload.training, "recorded")
    clipped_mean = clipped_by(engine)
    with reproducible(ExecutionSpec(device=str(device)), 0):
        for _ in range(SETTLED):
            clipped_mean(x, y)
    held = torch.cuda.memory_allocated(device) / 1e6 if device.type == "cuda" else None
    record.figure(f"recorded {name}", {"not_recorded": engine.not_recorded, "held_mb": held})
