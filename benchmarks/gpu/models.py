"""Models that people bring, beside plain steps and Opacus; see `benchmarks.models`."""

from __future__ import annotations

import torch

from benchmarks.gpu.phases import Size
from benchmarks.gpu.record import Record


def run(record: Record, device: torch.device, size: Size) -> None:
    """Record ratios to a plain step and the error of norms, for one model after the other."""
    from benchmarks.models import MODELS, measured  # late: peft and transformers

    for name in size.models or MODELS:
        with record.attempt(name):
            record.figure(name, measured(name, device))
