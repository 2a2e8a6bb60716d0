"""All tests of training on the device, in the time that is left."""

from __future__ import annotations

import torch

from benchmarks.gpu.phases import Size
from benchmarks.gpu.record import Record
from benchmarks.gpu.tests import run_tests


def run(record: Record, device: torch.device, size: Size) -> None:
    """Run every test, whatever fails."""
    run_tests(record, device, size.further_tests)
