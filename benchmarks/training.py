"""Time and memory of a private training step relative to a plain one, compared with other libraries and torch.func.

    python benchmarks/training.py [--quick | --paper-batch] [--json] [--model NAME] [--device cuda] [--threads 2]

All methods are measured on this machine in one run. A step is forward, backward and optimiser step over a whole batch,
in the same micro-batches for every method. The private methods clip every per-example gradient to norm 1. They add no
noise, which costs the same for all of them: `noise_ms` is its time, `secret_noise_ms` from a key (`os_entropy`), and
`dpsweep_with_noise` is a complete private step as in a trial. On a GPU, `plain_recorded` and `dpsweep_recorded` are
steps recorded as CUDA graphs. Methods take turns. A ratio is relative to the plain step
of the same turn; the median over a method's turns is printed, and `samples` is their number. `norm_pass` computes the
norms of all examples without training. Peak memory is what a second step adds to the process (or to the GPU). All
methods use the allocator settings of a trial (`dpsweep.workers.machine.memory`). Peers are the installed ones of
`benchmarks.peers`; `failed` says why others have no ratio. Models of the size of BERT-base are measured where they are
named.
"""

# ruff: noqa: E402

from __future__ import annotations

import argparse
import copy
import ctypes
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])  # so that `benchmarks` is found wherever it starts

from dpsweep.workers.machine.memory import ALLOCATOR

if __name__ == "__main__" and not ALLOCATOR.items() <= os.environ.items():  # glibc reads them when a process starts
    os.execve(sys.executable, sys.orig_argv, {**os.environ, **ALLOCATOR})

import torch
from torch import Tensor, nn

from benchmarks import steps
from benchmarks.peers import PEERS, installed
from benchmarks.steps import SETTLED, Make, trained
from benchmarks.workloads import LARGE, WORKLOADS, Workload
from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.machine.devices import choose_device
from dpsweep.workers.noise.noise_sources import make_noise_source
from dpsweep.workers.spec import MAX_THREADS

OURS: Mapping[str, Make] = {
    "plain": steps.plain,
    "dpsweep": steps.dpsweep,
    "dpsweep_with_noise": steps.dpsweep_with_noise,
    "vmap": steps.vmap_grad,
    "norm_pass": steps.norm_pass,
}
ON_GPU: Mapping[str, Make] = {"plain_recorded": steps.plain_recorded, "dpsweep_recorded": steps.dpsweep_recorded}
"""Steps that are recorded as CUDA graphs."""
REQUIRED = ("plain", "dpsweep", "dpsweep_with_noise", "norm_pass")
"""Methods that take every model; others may refuse one."""
CLIPPED = ("dpsweep", "vmap", *PEERS)
"""Methods whose first step has the same clipped gradient."""
FARTHEST: Mapping[str, float] = {"float32": 1e-2, "bfloat16": 0.5}
"""Largest relative distance of two methods' clipped gradients; float32 flips a few ReLUs of deep networks."""
SOURCES = ("seeded", "os_entropy")
MODELS: Mapping[str, Workload] = {**WORKLOADS, **LARGE}
SHORTEST_SAMPLE = 0.02
"""Seconds; faster steps are repeated within one sample."""
FEWEST_SAMPLES: Mapping[str, int] = {"dpsweep": 8, "norm_pass": 8}
"""Minimum number of samples of methods with a target ratio; two for others, one if a plain step exceeds the budget."""


@dataclass
class Begun:
    """Methods that are ready to be measured. runs: their steps. peak: megabytes. failed: why others are left out.

    first: mean clipped gradient of the first step, flattened, on the CPU.
    """

    runs: dict[str, Callable[[], None]] = field(default_factory=dict)
    peak: dict[str, float | None] = field(default_factory=dict)
    first: dict[str, Tensor] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


# -- measuring ---------------------------------------------------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    """Wait for the work of a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(run: Callable[[], object], times: int, device: torch.device) -> float:
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


def distances(first: Mapping[str, Tensor]) -> dict[str, float]:
    """For each method, the relative distance of its clipped mean gradient to ours, after the same first step."""
    ours = first["dpsweep"]
    return {m: float((gradient - ours).norm() / ours.norm()) for m, gradient in first.items() if m != "dpsweep"}


def disagreement(result: Mapping[str, Any]) -> str | None:
    """Return which methods of a result disagree about the clipped gradient, or None."""
    far = [f"{m} by {d:.1e}" for m, d in result["distance"].items() if not d < FARTHEST[result["precision"]]]
    return f"{result['model']}: from dpsweep differ {', '.join(far)}" if far else None


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
    """Return the seconds of adding noise to the summed gradients of all parameters."""
    sums = {name: torch.zeros_like(parameter) for name, parameter in trained(model).items()}
    noise = make_noise_source(source, 0, device)

    def add() -> None:
        noise.added_to_each(sums, 1.0)

    add()  # loads the cipher
    return seconds(add, repeat, device)


def built(workload: Workload, device: torch.device) -> nn.Module:
    """Return the model on the device, where a GPU draws its weights: on the host that takes seconds."""
    with torch.device(device):
        return workload.build().to(device)


def begin(workload: Workload, initial: nn.Module, batch: int, device: torch.device) -> Begun:
    """Return every method after its first step, from the same weights; methods that fail there are left out."""
    begun = Begun()
    x, y = workload.examples(batch, device)
    few = slice(0, 2 * workload.training.micro_batch)  # peak memory does not depend on the number of micro-batches
    peers = {name: peer.make for name, peer in PEERS.items() if installed(peer.library)}
    begun.failed |= {name: f"{peer.library} is not installed" for name, peer in PEERS.items() if name not in peers}
    for method, make in {**OURS, **peers, **(ON_GPU if device.type == "cuda" else {})}.items():
        model = copy.deepcopy(initial)
        try:
            step = make(model, workload.training)
            for _ in range(steps.RECORDED_AT if method in ON_GPU else 1):  # what cannot be recorded fails here
                step(x[few], y[few])
            if method in CLIPPED:
                begun.first[method] = torch.cat([given(p).flatten().float().cpu() for p in trained(model).values()])
            begun.peak[method] = peak_megabytes(partial(step, x[few], y[few]), device)
        except Exception as error:  # libraries refuse models with errors of any kind
            if method in REQUIRED:
                raise
            begun.failed[method] = f"{type(error).__name__}: {str(error).strip()[:200]}"
        else:
            begun.runs[method] = partial(step, x, y)
        free(device)
    return begun


def given(parameter: nn.Parameter) -> Tensor:
    """Return the gradient of a parameter. Raises: RuntimeError where a method has left none."""
    if parameter.grad is None:
        raise RuntimeError(f"no gradient of a parameter of shape {list(parameter.shape)}")
    return parameter.grad.detach()


def free(device: torch.device) -> None:
    """Give back the memory of a failed method, which its traceback may hold in a cycle."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def measure(workload: Workload, name: str, batch: int, device: torch.device, budget: float) -> dict[str, Any]:
    """Return all results for one model. budget: seconds after which only turns needed for the minimum of samples
    start.
    """
    model = built(workload, device)
    begun = begin(workload, model, batch, device)
    runs, apart = begun.runs, distances(begun.first)
    if device.type == "cuda":
        for method, run in runs.items():  # memory that a method allocates for the first time is slow
            for _ in range(1 if method in PEERS else SETTLED - 2):
                run()
    first = seconds(runs["plain"], 1, device)
    warm = first if first > SHORTEST_SAMPLE else seconds(runs["plain"], 3, device)
    repeat = max(1, round(SHORTEST_SAMPLE / warm))
    fewest = {method: FEWEST_SAMPLES.get(method, 2) if first < budget else 1 for method in runs}
    samples = take_turns(runs, fewest, repeat, budget, device)
    ratios = {method: statistics.median(ratio for _, ratio in taken) for method, taken in samples.items()}
    noise = {source: noise_seconds(model, source, repeat, device) for source in SOURCES}
    return {
        "model": name,
        "parameters": sum(each.numel() for each in trained(model).values()),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu x {torch.get_num_threads()}",
        "precision": str(workload.training.autocast or torch.float32).removeprefix("torch."),
        "batch": batch,
        "micro_batch": min(batch, workload.training.micro_batch),
        "paper_batch": workload.paper_batch,
        "plain_ms": round(statistics.median(taken for taken, _ in samples["plain"]) * 1e3, 3),
        **{method: round(ratio, 3) for method, ratio in ratios.items() if method != "plain"},
        "noise_ms": round(noise["seeded"] * 1e3, 3),
        "secret_noise_ms": round(noise["os_entropy"] * 1e3, 3),
        "peak_mb": {method: value if value is None else round(value, 1) for method, value in begun.peak.items()},
        "samples": {method: len(taken) for method, taken in samples.items()},
        "distance": {method: float(f"{value:.1e}") for method, value in apart.items()},
        "failed": begun.failed,
    }


# -- the command -------------------------------------------------------------------------------------------------------

COLUMNS = ("dpsweep", "dpsweep_with_noise", *ON_GPU, *PEERS, "vmap", "norm_pass")


def _width(column: str) -> int:
    return 2 + max(len(column), len("100.00x"))


def as_row(result: Mapping[str, Any]) -> str:
    """Return a row of the printed table."""
    cells = (f"{result[column]:.2f}x" if column in result else "-" for column in COLUMNS)
    ratios = "".join(f"{cell:>{_width(column)}}" for column, cell in zip(COLUMNS, cells, strict=True))
    return f"{result['model']:<18}{result['batch']:>6}{result['plain_ms']:>11.2f}{ratios}"


def reasons(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each method without a ratio and each reason, with the models where the reason is their own."""
    models = dict[str, list[str]]()
    for result in results:
        for method, reason in result["failed"].items():
            models.setdefault(f"{method}: {reason}", []).append(result["model"])
    everywhere = len(results)
    return [line if len(of) == everywhere else f"{line} ({', '.join(of)})" for line, of in models.items()]


def whole_threads(text: str) -> int:
    """Return the number of threads that ``text`` gives; an error for argparse if it is not valid."""
    threads = int(text) if text.isdecimal() else 0
    if not 1 <= threads <= MAX_THREADS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of threads; give 1 to {MAX_THREADS}")
    return threads


def present_device(name: str) -> torch.device:
    """Return the device called ``name``; an error for argparse if this machine has none."""
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
    parser.add_argument("--model", action="append", choices=MODELS, help="only this model (may be repeated)")
    parser.add_argument("--device", type=present_device, default="cpu", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--threads", type=whole_threads, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = options.device
    if not options.json:
        print(
            f"{'model':<18}{'batch':>6}{'plain ms':>11}" + "".join(f"{column:>{_width(column)}}" for column in COLUMNS)
        )
    results = list[dict[str, Any]]()
    for name in options.model or WORKLOADS:
        workload = MODELS[name]
        batch, budget = (workload.quick_batch, 1.0) if options.quick else (workload.batch, 30.0)
        batch = workload.paper_batch if options.paper_batch else batch
        result = measure(workload, name, batch, device, budget)
        if message := disagreement(result):
            raise SystemExit(message)
        results.append(result)
        print(json.dumps(result) if options.json else as_row(result), flush=True)
    for reason in [] if options.json else reasons(results):
        print(reason)


if __name__ == "__main__":
    main()
