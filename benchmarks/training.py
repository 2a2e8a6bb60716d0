"""Time and memory of a private training step relative to a plain one, compared with Opacus and torch.func.

    python benchmarks/training.py [--quick | --paper-batch] [--json] [--model NAME] [--device cuda] [--threads 2]

All methods are measured on this machine in one run. A step is forward, backward and optimiser step over a whole batch,
in the same micro-batches for every method. The private methods clip every per-example gradient to norm 1. They add no
noise, which costs the same for all of them: `noise_ms` is its time, `secret_noise_ms` from a key (`os_entropy`), and
`dpsweep_with_noise` is a complete private step as in a trial. Methods take turns. A ratio is relative to the plain step
of the same turn; the median over a method's turns is printed, and `samples` is their number. `norm_pass` computes the
norms of all examples without training. Peak memory is what a step adds to the process (or to the GPU). All methods use
the allocator settings of a trial (`workers.memory`).
"""

# ruff: noqa: E402

from __future__ import annotations

import argparse
import copy
import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # this file's own folder would shadow the package accounting

from workers.memory import ALLOCATOR

if __name__ == "__main__" and not ALLOCATOR.items() <= os.environ.items():  # glibc reads them when a process starts
    os.execve(sys.executable, sys.orig_argv, {**os.environ, **ALLOCATOR})

import torch
from torch import Tensor, nn

from accounting.errors import InvalidInput
from benchmarks.steps import METHODS, PRIVATE
from workers.devices import choose_device
from workers.models import build_for_shape
from workers.noise import make_noise_source
from workers.spec import MAX_THREADS, Component

SHORTEST_SAMPLE = 0.02
"""Seconds; faster steps are repeated within one sample."""
FEWEST_SAMPLES: Mapping[str, int] = {"dpsweep": 8, "norm_pass": 8}
"""Minimum number of samples of methods with a target ratio; two for others, one if a plain step exceeds the budget."""


@dataclass(frozen=True)
class Workload:
    """A model and its batch sizes.

    paper_batch: of the papers. batch, quick_batch: of one measured step. micro_batch: examples in memory at once.
    """

    model: str
    shape: tuple[int, ...]
    paper_batch: int
    batch: int
    quick_batch: int
    micro_batch: int
    params: Mapping[str, object] | None = None
    classes: int = 10

    def build(self) -> nn.Module:
        return build_for_shape(Component(self.model, dict(self.params or {})), self.shape, self.classes, seed=0)

    def data(self, batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(batch, *self.shape, generator=generator)
        return x.to(device), torch.randint(self.classes, (batch,), generator=generator).to(device)


WORKLOADS: Mapping[str, Workload] = {
    "logistic": Workload("logistic", (40,), 256, 256, 256, 256, classes=2),
    "mlp_1000": Workload("pca_mlp", (60,), 600, 600, 600, 600),
    "cnn": Workload("cnn_dpsgdf", (1, 28, 28), 256, 256, 256, 256),
    "resnet20_gn": Workload("resnet20_gn", (3, 32, 32), 1024, 1024, 64, 128),
    "wrn16_4": Workload("wrn16_4", (3, 32, 32), 4096, 128, 16, 32),
    "transformer": Workload("transformer", (3, 32, 32), 256, 256, 128, 256),
}


# -- measuring ---------------------------------------------------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    """Wait for the work of a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(run: Callable[[], None], times: int, device: torch.device) -> float:
    """Elapsed seconds of one of ``times`` runs, on average."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(times):
        run()
    synchronize(device)
    return (time.perf_counter() - start) / times


def peak_megabytes(run: Callable[[], None], device: torch.device) -> float | None:
    """Peak memory that ``run`` adds to the memory in use; None if the system does not report it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return (torch.cuda.max_memory_allocated(device) - before) / 1e6
    reset, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    if not reset.exists():
        run()
        return None
    ctypes.CDLL(None).malloc_trim(0)  # return memory freed by earlier methods, so that this one does not reuse it
    reset.write_text("5")
    before = _status_kilobytes(status, "VmRSS")
    run()
    return (_status_kilobytes(status, "VmHWM") - before) / 1e3


def _status_kilobytes(status: Path, field: str) -> int:
    line = next(line for line in status.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1])


def check_agreement(models: Mapping[str, nn.Module], name: str) -> None:
    """Check that all private methods have the same clipped mean gradient after the first step from the same weights."""
    gradients = {m: torch.cat([p.grad.flatten() for p in models[m].parameters()]) for m in PRIVATE}  # type: ignore[union-attr]
    for method in PRIVATE:
        error = float((gradients[method] - gradients["vmap"]).norm() / gradients["vmap"].norm())
        if not error < 1e-2:  # float32 flips a few ReLUs of deep networks
            raise SystemExit(f"{name}: {method} and vmap(grad) disagree by {error:.1e}")


def take_turns(
    runs: Mapping[str, Callable[[], None]], fewest: Mapping[str, int], repeat: int, budget: float, device: torch.device
) -> Mapping[str, list[tuple[float, float]]]:
    """For every method and each of its turns: seconds, and their ratio to the plain step of the same turn."""
    samples: dict[str, list[tuple[float, float]]] = {method: [] for method in runs}
    deadline = time.perf_counter() + budget
    while True:
        in_time = time.perf_counter() < deadline
        taking_part = [method for method in runs if in_time or len(samples[method]) < fewest[method]]
        if not taking_part:
            return samples
        plain = seconds(runs["plain"], repeat, device)
        samples["plain"].append((plain, 1.0))
        for method in taking_part:
            if method != "plain":
                own = seconds(runs[method], repeat, device)
                samples[method].append((own, own / plain))


def noise_seconds(model: nn.Module, source: str, repeat: int, device: torch.device) -> float:
    """Seconds of adding noise to the summed gradients of all parameters."""
    sums = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    noise = make_noise_source(source, 0, device)

    def add() -> None:
        noise.added_to_each(sums, 1.0)

    add()  # loads the cipher
    return seconds(add, repeat, device)


def measure(workload: Workload, name: str, batch: int, device: torch.device, budget: float) -> dict[str, object]:
    """All results for one model. budget: seconds after which only turns needed for the minimum of samples start."""
    initial = workload.build().to(device)
    x, y = workload.data(batch, device)
    models = {method: copy.deepcopy(initial) for method in METHODS}
    steps = {method: make(models[method], min(batch, workload.micro_batch)) for method, make in METHODS.items()}
    few = slice(0, 2 * workload.micro_batch)  # peak memory does not depend on the number of micro-batches
    memory = {method: peak_megabytes(partial(step, x[few], y[few]), device) for method, step in steps.items()}
    check_agreement(models, name)
    runs = {method: partial(step, x, y) for method, step in steps.items()}
    first = seconds(runs["plain"], 1, device)
    warm = first if first > SHORTEST_SAMPLE else seconds(runs["plain"], 3, device)
    repeat = max(1, round(SHORTEST_SAMPLE / warm))
    fewest = {method: FEWEST_SAMPLES.get(method, 2) if first < budget else 1 for method in METHODS}
    samples = take_turns(runs, fewest, repeat, budget, device)
    ratios = {method: statistics.median(ratio for _, ratio in taken) for method, taken in samples.items()}
    noise = {source: noise_seconds(initial, source, repeat, device) for source in ("seeded", "os_entropy")}
    return {
        "model": name,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu x {torch.get_num_threads()}",
        "batch": batch,
        "micro_batch": min(batch, workload.micro_batch),
        "paper_batch": workload.paper_batch,
        "plain_ms": round(statistics.median(taken for taken, _ in samples["plain"]) * 1e3, 3),
        **{method: round(ratio, 3) for method, ratio in ratios.items() if method != "plain"},
        "noise_ms": round(noise["seeded"] * 1e3, 3),
        "secret_noise_ms": round(noise["os_entropy"] * 1e3, 3),
        "peak_mb": {method: value if value is None else round(value, 1) for method, value in memory.items()},
        "samples": {method: len(taken) for method, taken in samples.items()},
    }


# -- the command -------------------------------------------------------------------------------------------------------

COLUMNS = ("dpsweep", "dpsweep_with_noise", "opacus_hooks", "opacus_ghost", "vmap", "norm_pass")


def as_row(result: Mapping[str, object]) -> str:
    """A row of the printed table."""
    ratios = "".join(f"{result[column]:>{len(column) + 1}.2f}x" for column in COLUMNS)
    return f"{result['model']:<12}{result['batch']:>6}{result['plain_ms']:>11.2f}{ratios}"


def whole_threads(text: str) -> int:
    """The number of threads that ``text`` gives; an error for argparse if it is not valid."""
    threads = int(text) if text.isdecimal() else 0
    if not 1 <= threads <= MAX_THREADS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of threads; give 1 to {MAX_THREADS}")
    return threads


def present_device(name: str) -> torch.device:
    """The device called ``name``; an error for argparse if this machine has none."""
    try:
        return choose_device(name)
    except InvalidInput as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="small batches, within a minute")
    size.add_argument("--paper-batch", action="store_true", help="the batches of the papers: half an hour")
    parser.add_argument("--json", action="store_true", help="one JSON object per model")
    parser.add_argument("--model", action="append", choices=WORKLOADS, help="only this model (may be repeated)")
    parser.add_argument("--device", type=present_device, default="cpu", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--threads", type=whole_threads, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = options.device
    if not options.json:
        print(f"{'model':<12}{'batch':>6}{'plain ms':>11}" + "".join(f"  {column}" for column in COLUMNS))
    for name in options.model or WORKLOADS:
        workload = WORKLOADS[name]
        batch, budget = (workload.quick_batch, 1.0) if options.quick else (workload.batch, 30.0)
        batch = workload.paper_batch if options.paper_batch else batch
        result = measure(workload, name, batch, device, budget)
        print(json.dumps(result) if options.json else as_row(result), flush=True)


if __name__ == "__main__":
    main()
