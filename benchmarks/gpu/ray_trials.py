"""Two trials on half a device each, scheduled by Ray, where it was packed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.gpu import pictures
from benchmarks.gpu.phases import Size
from benchmarks.gpu.record import Record
from benchmarks.peers import installed

NEEDED = ("ray", "mlflow", "plotly", "rich", "typer", "yaml")
SWEEP = """
name: halves
data: {name: mnist}
model: {name: cnn_dpsgdf}
sampling: {method: poisson, batch_size: 64}
clipping: {name: flat, bound: 1.0}
privacy: {noise_multiplier: 1.0, delta: 1e-5}
epochs: 1
seeds: [0, 1]
optimizer: {name: sgd, learning_rate: 0.1}
resources: {cpus: 1, gpus: %(gpus)s}
execution: {device: %(device)s}
"""


def run(record: Record, device: torch.device, size: Size) -> None:
    """Run a sweep of two seeds as a user would, and record its results; on a CPU, plan it."""
    if absent := [name for name in NEEDED if not installed(name)]:
        record.skipped("ray", f"{', '.join(absent)} not packed: --pack FOLDER --also ray")
        return
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, **pictures.written(Path(folder), size.rows)}
        file, output = Path(folder) / "halves.yaml", Path(folder) / "halves"
        gpus = 0.5 if device.type == "cuda" else 0
        file.write_text(SWEEP % {"device": device.type, "gpus": gpus})
        told = ["run", str(file), "--output", str(output), "--tracking-uri", "none"]
        command = [sys.executable, "-m", "dpsweep", *(told if device.type == "cuda" else ["plan", str(file)])]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        record.figure("status", done.returncode)
        if done.returncode != 0:
            record.failed("sweep", f"status {done.returncode}", (done.stdout + done.stderr)[-8000:])
            return
        if device.type == "cpu":
            record.skipped("ray", "halves of a device are measured on a GPU alone")
            return
        record.figure("results", json.loads((output / "results.json").read_text()))
