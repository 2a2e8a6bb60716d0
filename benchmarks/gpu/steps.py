"""Time and memory of private steps of the models of the goals; see `benchmarks.training`."""

from __future__ import annotations

import torch

from benchmarks import workloads
from benchmarks.gpu.phases import Size
from benchmarks.gpu.record import Record
from benchmarks.training import disagreement, free, measure
from dpsweep.workers.machine.devices import without_tf32


@without_tf32()
def run(record: Record, device: torch.device, size: Size) -> None:
    """Record the figures of each model, with the precision of matrix products that a trial sets."""
    for name, workload in getattr(workloads, size.workloads).items():
        with record.attempt(name):
            result = measure(workload, name, workload.batch, device, size.turns)
            record.figure(name, result)
            if message := disagreement(result):
                record.failed(name, message, "")
        free(device)
