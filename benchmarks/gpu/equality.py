"""Compares a device with a CPU, and a resumed trial with an undisturbed one."""

from __future__ import annotations

import copy
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from benchmarks import workloads
from benchmarks.cases import Case
from benchmarks.gpu import pictures
from benchmarks.gpu.phases import Size
from benchmarks.gpu.record import Record
from benchmarks.steps import Training, engine_of
from dpsweep.workers.machine.devices import without_tf32
from dpsweep.workers.noise.chacha import keystream
from dpsweep.workers.noise.noise_sources import make_noise_source
from dpsweep.workers.spec import Component, DataSpec, ExecutionSpec, TrialSpec
from dpsweep.workers.trials.trial import run_trial

CPU = torch.device("cpu")
MOST_ERROR: Final[Mapping[str, float]] = {"logistic": 1e-5, "transformer": 1e-5, "cnn": 1e-2, "resnet20_gn": 1e-2}
"""Largest relative error of norms, by model; of sums ten times that. Noise is enlarged for 1e-5.

ReLUs have kinks, on whose other side a unit may fall in float64, which no method can avoid.
"""
_BLOCKS = 2**16


@without_tf32()
def run(record: Record, device: torch.device, size: Size) -> None:
    """Record errors of norms and sums, and whether streams and resumed trials are equal in every bit."""
    for name in size.compared:
        with record.attempt(f"norms of {name}"):
            _norms(record, name, device, size.examples)
        with record.attempt(f"bounds of {name}"):
            _bounds(record, name, device, size.examples)
    with record.attempt("keystream"):
        _keystream(record, device)
    with record.attempt("noise"):
        _noise(record, device, size)
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= pictures.written(Path(folder), size.rows)
        for told, source, settings in RESUMED:
            with record.attempt(f"resumption with {told}"):
                _resumption(record, told, trial_on(device, source, 2, min(size.rows, 1000), settings))


def _require(record: Record, name: str, holds: bool, told: str) -> None:
    if not holds:
        record.failed(name, told, "")


def _norms(record: Record, name: str, device: torch.device, examples: int) -> None:
    """Norms and clipped sums on the device beside float64 on the CPU."""
    workload = workloads.WORKLOADS[name]
    model = workload.build()
    x, y = workload.examples(examples, CPU)
    exact_norms, exact_sum = _clipped(copy.deepcopy(model).double(), x.double(), y)
    norms, total = _clipped(model.to(device), x.to(device), y.to(device))
    of_norms = float(((norms.double().cpu() - exact_norms).abs() / exact_norms).max())
    of_sum = float((total.double().cpu() - exact_sum).norm() / exact_sum.norm())
    record.figure(f"errors of {name}", {"norms": of_norms, "sum": of_sum})
    _require(record, f"norms of {name}", of_norms <= MOST_ERROR[name], f"relative error {of_norms:.1e}")
    _require(record, f"sum of {name}", of_sum <= 10 * MOST_ERROR[name], f"relative error {of_sum:.1e}")


def _bounds(record: Record, name: str, device: torch.device, examples: int) -> None:
    """In bfloat16, the norm of the clipped gradient of each example alone, beside the bound that noise covers."""
    workload, excess = workloads.WORKLOADS[name], list[float]()
    model, (x, y) = workload.build().to(device), workload.examples(examples, device)
    engine = engine_of(model, Training(examples, autocast=torch.bfloat16))
    together = engine.weighted_sum_rowwise(x, y, lambda norms, rows: 1.0 / norms.norms).norms.norms
    for row in range(examples):
        one = slice(row, row + 1)
        found = engine.weighted_sum_rowwise(x[one], y[one], lambda norms, rows: 1.0 / norms.norms)
        squares = [each.double().square().sum() for each in found.gradients.values()]
        excess.append(float(torch.stack(squares).sum().sqrt()) - 1.0)
    worst = max(excess, key=abs)
    record.figure(f"bounds of {name}", {"excess": worst, "smallest_norm": float(together.min())})
    _require(record, f"bounds of {name}", abs(worst) <= 1e-5, f"a clipped gradient is {worst:.1e} from its bound")


def _clipped(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Norms of all examples, and the sum of their gradients clipped to 1."""
    engine = engine_of(model, Training(len(x)))
    found = engine.weighted_sum_rowwise(x, y, lambda norms, rows: (1.0 / norms.norms).clamp(max=1.0))
    return found.norms.norms, torch.cat([each.flatten() for each in found.gradients.values()])


def _keystream(record: Record, device: torch.device) -> None:
    """Blocks of ChaCha20 on the device beside OpenSSL's, at both ends of the block counter."""
    key, nonce = bytes(range(32)), bytes(range(12))
    equal = {
        str(first): torch.equal(
            keystream(key, nonce, first, _BLOCKS, device).cpu(), keystream(key, nonce, first, _BLOCKS, CPU)
        )
        for first in (0, 2**31 - _BLOCKS // 2, 2**32 - _BLOCKS)
    }
    record.figure("keystream is equal from block", equal)
    _require(record, "keystream", all(equal.values()), "blocks differ from OpenSSL's")


def _noise(record: Record, device: torch.device, size: Size) -> None:
    """The same key on both: values after rounding to the public grid, which hides the last bits of logarithms."""
    here, there = (make_noise_source("os_entropy", 0, each) for each in (CPU, device))
    there.restore(here.state())
    count = min(size.values, 2**22)
    mine = here.added(torch.zeros(count), 1.0)
    theirs = there.added(torch.zeros(count, device=device), 1.0).cpu()
    apart = float((mine - theirs).abs().max())
    record.figure("noise", {"equal_share": float((mine == theirs).double().mean()), "largest_difference": apart})
    _require(record, "noise", apart < 1e-6, f"values from one key differ by {apart:.1e}")
    mean, std = float(theirs.double().mean()), float(theirs.double().std())
    record.figure("moments of noise", {"mean": mean, "std": std})
    allowed = 6.0 / math.sqrt(count)
    _require(record, "moments of noise", abs(mean) < allowed and abs(std - 1.0) < allowed, f"mean {mean}, std {std}")


PADDED: Final[Mapping[str, Any]] = {"micro_batch_size": 96, "last_micro_batch": "padded"}
"""Settings of a trial whose passes all have one shape, and are recorded: Poisson batches of 64 seldom exceed 96."""
RESUMED: Final[tuple[tuple[str, str, Mapping[str, Any]], ...]] = (
    ("seeded", "seeded", {}),
    ("os_entropy", "os_entropy", {}),
    ("recorded passes", "os_entropy", PADDED),
)
"""Name, source of noise, and settings of the trials that are resumed."""


def trial_on(
    device: torch.device,
    source: str = "os_entropy",
    epochs: int = 2,
    rows: int | None = None,
    settings: Mapping[str, Any] = {},
) -> TrialSpec:
    """Return a trial of the CNN of paper D on pictures, on the device. settings: of its execution."""
    case = Case("pictures", DataSpec("mnist"), Component("cnn_dpsgdf"), 64, epochs)
    if rows is not None:
        case = replace(case, classes=tuple("0123456789"), rows=rows // 10)
    return case.spec("auto", noise_source=source, execution=ExecutionSpec(device=str(device), **settings))


def _resumption(record: Record, name: str, spec: TrialSpec) -> None:
    """An undisturbed trial beside one that goes on from its checkpoint after the first epoch."""
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder) / "first", Path(folder) / "second"

        def copy_once(progress: object) -> None:
            if not second.exists():
                shutil.copytree(first, second)

        run_trial(spec, str(first), on_progress=copy_once)
        run_trial(spec, str(second))
        found = [torch.load(root / "model.pt", weights_only=True) for root in (first, second)]
        equal = all(torch.equal(value, found[1][name]) for name, value in found[0].items())
        record.figure(f"resumed with {name}", {"equal": equal})
        _require(record, f"resumption with {name}", equal, "the resumed trial has other parameters")
