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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # this file's own folder would shadow the package accounting

from workers.memory import ALLOCATOR

if __name__ == "__main__" and not ALLOCATOR.items() <= os.environ.items():  # glibc reads them when a process starts
    os.execve(sys.executable, sys.orig_argv, {**os.environ, **ALLOCATOR})

import torch
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from accounting.errors import InvalidInput
from workers.devices import choose_device
from workers.gradients import BatchNorms, GradientEngine
from workers.models import build_for_shape
from workers.noise import make_noise_source
from workers.spec import MAX_THREADS, Component

CLIP = 1.0
NOISE_MULTIPLIER = 1.0
LEARNING_RATE = 0.01
SHORTEST_SAMPLE = 0.02
"""Seconds; faster steps are repeated within one sample."""
FEWEST_SAMPLES: Mapping[str, int] = {"dpsweep": 8, "norm_pass": 8}
"""Minimum number of samples of methods with a target ratio; two for others, one if a plain step exceeds the budget."""

Step = Callable[[Tensor, Tensor], None]
Mean = Callable[[Tensor, Tensor], Mapping[str, Tensor]]
"""Of gradients, by the name of their parameter."""


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


# -- one step, by each method ------------------------------------------------------------------------------------------


def micro_batches(x: Tensor, y: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(x.split(size), y.split(size), strict=True)


def losses(logits: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(logits, y, reduction="none")


def plain(model: nn.Module, micro_batch: int) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        for part_x, part_y in micro_batches(x, y, micro_batch):
            (losses(model(part_x), part_y).sum() / len(x)).backward()
        optimizer.step()

    return step


def dpsweep(model: nn.Module, micro_batch: int) -> Step:
    return updating(model, clipping(model, micro_batch))


def dpsweep_with_noise(model: nn.Module, micro_batch: int) -> Step:
    clipped_mean, device = clipping(model, micro_batch), next(model.parameters()).device
    noise = make_noise_source("seeded", 0, device)
    return updating(model, lambda x, y: noise.added_to_each(clipped_mean(x, y), NOISE_MULTIPLIER * CLIP / len(x)))


def updating(model: nn.Module, mean: Mean) -> Step:
    parameters, optimizer = dict(model.named_parameters()), torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def step(x: Tensor, y: Tensor) -> None:
        for name, gradient in mean(x, y).items():
            parameters[name].grad = gradient
        optimizer.step()

    return step


def clipping(model: nn.Module, micro_batch: int) -> Mean:
    """Mean of the clipped gradients of a batch, computed by `GradientEngine`."""
    engine = GradientEngine(model, losses, micro_batch_size=micro_batch)

    def clipped_mean(x: Tensor, y: Tensor) -> Mapping[str, Tensor]:
        def weigh(norms: BatchNorms, rows: slice) -> Tensor:
            return norms.norms.clamp(min=CLIP).reciprocal_().mul_(CLIP / len(x))

        return engine.weighted_sum_rowwise(x, y, weigh).gradients

    return clipped_mean


def norm_pass(model: nn.Module, micro_batch: int) -> Step:
    engine = GradientEngine(model, losses, micro_batch_size=micro_batch)

    def step(x: Tensor, y: Tensor) -> None:
        engine.norms(x, y)

    return step


def opacus_hooks(model: nn.Module, micro_batch: int) -> Step:
    wrapped = GradSampleModule(model)
    inner = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    optimizer = DPOptimizer(inner, noise_multiplier=0.0, max_grad_norm=CLIP, expected_batch_size=1)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.expected_batch_size = len(x)
        for start in range(0, len(x), micro_batch):
            rows = slice(start, start + micro_batch)
            optimizer.zero_grad()
            functional.cross_entropy(wrapped(x[rows]), y[rows]).backward()
            optimizer.signal_skip_step(rows.stop < len(x))
            optimizer.step()

    return step


def opacus_ghost(model: nn.Module, micro_batch: int) -> Step:
    for module in model.modules():
        if isinstance(module, nn.Embedding):  # its norm sampler takes no expanded indices
            module.register_forward_pre_hook(lambda _, args: (args[0].contiguous(),))
    wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=CLIP, use_ghost_clipping=True)
    inner = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    optimizer = DPOptimizerFastGradientClipping(inner, noise_multiplier=0.0, max_grad_norm=CLIP, expected_batch_size=1)
    criterion = DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss())

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.expected_batch_size = len(x)
        for start in range(0, len(x), micro_batch):
            rows = slice(start, start + micro_batch)
            optimizer.zero_grad()
            criterion(wrapped(x[rows]), y[rows]).backward()
            optimizer.signal_skip_step(rows.stop < len(x))
            optimizer.step()

    return step


def vmap_grad(model: nn.Module, micro_batch: int) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    parameters = dict(model.named_parameters())

    def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(functional_call(model, values, (x[None],)), y[None])

    per_example = vmap(grad(loss), in_dims=(None, 0, 0))

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        values = {name: parameter.detach() for name, parameter in parameters.items()}
        for part_x, part_y in micro_batches(x, y, micro_batch):
            gradients = per_example(values, part_x, part_y)
            norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
            weights = (CLIP / norms).clamp(max=1.0) / len(x)
            for name, parameter in parameters.items():
                clipped = torch.tensordot(weights, gradients[name], 1)
                parameter.grad = clipped if parameter.grad is None else parameter.grad + clipped
        optimizer.step()

    return step


METHODS: Mapping[str, Callable[[nn.Module, int], Step]] = {
    "plain": plain,
    "dpsweep": dpsweep,
    "dpsweep_with_noise": dpsweep_with_noise,
    "opacus_hooks": opacus_hooks,
    "opacus_ghost": opacus_ghost,
    "vmap": vmap_grad,
    "norm_pass": norm_pass,
}
PRIVATE = ("dpsweep", "opacus_hooks", "opacus_ghost", "vmap")


# -- measuring ---------------------------------------------------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(run: Callable[[], None], times: int, device: torch.device) -> float:
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
    """Of adding noise to sums of all parameters' gradients."""
    sums = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    noise = make_noise_source(source, 0, device)

    def add() -> None:
        noise.added_to_each(sums, 1.0)

    add()  # loads the cipher
    return seconds(add, repeat, device)


def measure(workload: Workload, name: str, batch: int, device: torch.device, budget: float) -> dict[str, object]:
    """All results for one model; ``budget``: seconds after which no more turns start than necessary."""
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
    ratios = "".join(f"{result[column]:>{len(column) + 1}.2f}x" for column in COLUMNS)
    return f"{result['model']:<12}{result['batch']:>6}{result['plain_ms']:>11.2f}{ratios}"


def whole_threads(text: str) -> int:
    """A valid number of threads, or argparse's error."""
    threads = int(text) if text.isdecimal() else 0
    if not 1 <= threads <= MAX_THREADS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of threads; give 1 to {MAX_THREADS}")
    return threads


def present_device(name: str) -> torch.device:
    """A device of this machine, or argparse's error."""
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
