"""Speed of the sources of noise, and of copying on the device, which bounds it."""

from __future__ import annotations

import torch

from benchmarks.gpu.phases import Size
from benchmarks.gpu.record import Record
from benchmarks.training import seconds
from dpsweep.workers.machine.triton_support import has_triton
from dpsweep.workers.noise.chacha import has_kernels
from dpsweep.workers.noise.noise_sources import NOISE_SOURCES, make_noise_source

_TIMES = 5


def run(record: Record, device: torch.device, size: Size) -> None:
    """Record, for each source, gigabytes of float32 noise a second, added to a tensor of as many values."""
    values = torch.zeros(size.values, device=device)
    copied = seconds(lambda: values.clone(), _TIMES, device)
    record.figure("copy", {"gb_per_s": _rate(values, copied), "values": size.values})
    if device.type == "cuda":
        record.figure("kernels", {"triton": has_triton(device), "noise": has_kernels(device)})
    for name in NOISE_SOURCES:
        with record.attempt(name):
            source = make_noise_source(name, 0, device)
            source.added_to_each({"first": values}, 1.0)
            taken = seconds(lambda source=source: source.added_to_each({"first": values}, 1.0), _TIMES, device)  # type: ignore[misc]  # no lambda with defaults
            record.figure(name, {"gb_per_s": _rate(values, taken), "ns_per_value": round(taken / size.values * 1e9, 4)})


def _rate(values: torch.Tensor, taken: float) -> float:
    return round(values.nbytes / taken / 1e9, 3)
