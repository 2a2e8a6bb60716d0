"""A forward pass of every model on the device, as a trial and the benchmarks build it."""

from __future__ import annotations

import time

import torch
from torch import nn

from benchmarks import workloads
from benchmarks.gpu.phases import Size
from benchmarks.gpu.record import Record
from benchmarks.training import built
from dpsweep.workers.models import MODELS, build_for_shape
from dpsweep.workers.spec import Component

SHAPES = {
    "cnn_dpsgdf": (1, 28, 28), "cnn_tanh": (1, 28, 28), "logistic": (40,), "mlp": (40,), "pca_mlp": (60,),
}  # fmt: skip
PICTURES = (3, 32, 32)


def run(record: Record, device: torch.device, size: Size) -> None:
    """Record how long the first forward pass of each model takes, and its failures."""
    record.figure("torch", {"version": torch.__version__, "cuda": torch.version.cuda, "device": _described(device)})
    record.skipped("language_model", "its inputs are tokens, as those of GPT-2 below; the tests have it")
    record.skipped("hugging_face", "it needs a folder with weights; the tests make one")
    record.skipped("vision", "it is a network of another package; a ViT of torchvision is below")
    for name in sorted(set(MODELS) - {"language_model", "hugging_face", "vision"}):
        with record.attempt(name):
            _forward(record, name, build_for_shape(Component(name), SHAPES.get(name, PICTURES), 10, seed=0), device)
    for name, workload in getattr(workloads, size.workloads).items():
        with record.attempt(name):
            model = built(workload, device)
            x, y = workload.examples(2, device)
            began = time.perf_counter()
            losses = workload.training.forward(model, x, y)
            record.figure(name, {"ms": _milliseconds(began), "finite": bool(losses.isfinite().all())})


def _forward(record: Record, name: str, model: nn.Module, device: torch.device) -> None:
    x = torch.randn(2, *SHAPES.get(name, PICTURES)).to(device)
    began = time.perf_counter()
    output = model.to(device)(x)
    record.figure(name, {"ms": _milliseconds(began), "finite": bool(output.isfinite().all())})


def _milliseconds(began: float) -> float:
    return round((time.perf_counter() - began) * 1e3, 2)


def _described(device: torch.device) -> dict[str, object]:
    if device.type == "cpu":
        return {"name": "cpu", "threads": torch.get_num_threads()}
    found = torch.cuda.get_device_properties(device)
    return {
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "memory_mb": found.total_memory // 10**6,
        "multiprocessors": found.multi_processor_count,
        "cudnn": torch.backends.cudnn.version(),
    }
