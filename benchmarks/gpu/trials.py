"""Whole trials beside plain loops and Opacus; see `benchmarks.trials`."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch

from benchmarks import trials
from benchmarks.cases import Case
from benchmarks.gpu import pictures
from benchmarks.gpu.phases import Size
from benchmarks.gpu.record import Record
from dpsweep.workers.spec import Component, DataSpec
from dpsweep.workers.trials import trial


def run(record: Record, device: torch.device, size: Size) -> None:
    """Record ratios to a plain loop, on pictures like MNIST's."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(trial, "load_dataset", trials.load):
        os.environ |= pictures.written(Path(folder), size.rows)
        for model in size.trials:
            case = Case(model, DataSpec("mnist"), Component(model), 256, size.epochs)
            with record.attempt(model):
                record.figure(
                    model, trials.measure(replace(case, batch_size=min(256, size.rows // 4)), device, size.turns)
                )
