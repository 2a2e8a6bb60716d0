"""Steps whose model is compiled, and a step recorded as a CUDA graph, beside the same steps as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks import workloads
from benchmarks.gpu.phases import Size
from benchmarks.gpu.record import Record
from benchmarks.steps import SETTLED, Step, dpsweep, plain
from benchmarks.training import built, seconds, synchronize
from benchmarks.workloads import Workload

_TIMES = 10


def run(record: Record, device: torch.device, size: Size) -> None:
    """Record milliseconds of each; what cannot be compiled or recorded is a failure with its reason."""
    for name in size.compiled:
        _of(record, name, getattr(workloads, size.workloads)[name], device)
    if device.type == "cuda":  # last, as a recording that fails may leave the device unusable
        for name in size.compiled:
            _graph(record, name, getattr(workloads, size.workloads)[name], device)


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


def _graph(record: Record, name: str, workload: Workload, device: torch.device) -> None:
    x, y = workload.examples(workload.batch, device)
    with record.attempt(told := f"graph of dpsweep of {name}"):
        step = dpsweep(built(workload, device), workload.training)
        record.figure(told, _recorded(lambda: step(x, y), device))


def _recorded(step: Callable[[], None], device: torch.device) -> float:
    """Milliseconds of a replayed CUDA graph of the step. Raises: RuntimeError where the step waits for the device."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        for _ in range(SETTLED):
            step()
    synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return round(seconds(graph.replay, _TIMES, device) * 1e3, 3)
