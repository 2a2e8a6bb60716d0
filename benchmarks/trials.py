"""CPU time of whole trials, beside the same training by a plain loop and by Opacus.

    python benchmarks/trials.py [--quick] [--json] [--case NAME] [--device cuda]

In a case all methods train the same model on the same data, in batches of the same expected size, for the same epochs.
After each epoch they measure the accuracy of everybody and of every group on the test data. All are measured on this
machine in one run, with one thread, in CPU seconds, which other work disturbs least (on a GPU in elapsed seconds). The
data are read before.

    plain        batches by index, no privacy
    dataloader   batches by torch's DataLoader, no privacy
    opacus       PrivacyEngine with its Poisson DataLoader and hooks; flat clipping; its noise is not cryptographic
    dpsweep      a trial as a sweep trains it: noise from os_entropy, norms when examples are sampled (auto),
                 checkpoints, norm shards, the stored model
    refreshed    the same with norms.refreshes_per_epoch: 1
    off          the same with norms: off, so that no epsilons of single examples can be computed
    norms        of `dpsweep`, the passes for norms of all examples alone: a forward and backward pass over all data at
                 the start, and those of examples that were not sampled for long

All use the allocator settings that a trial of a sweep is started with (`dpsweep.workers.machine.memory`).
Printed are ratios to the plain loop, of the least of three runs each; methods take turns, and no turn begins after ten
seconds. `shares` are parts of a trial's own CPU time, measured in a separate run. There are at most as many test as
training examples, or evaluation would be most of a short training.
MNIST, CIFAR-10 and Adult are read where `DPSWEEP_DATA` says.
"""

# ruff: noqa: E402

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path[0] = str(Path(__file__).resolve().parents[1])  # so that `benchmarks` is found wherever it starts

from dpsweep.workers.machine.memory import ALLOCATOR

if __name__ == "__main__" and not ALLOCATOR.items() <= os.environ.items():  # glibc reads them when a process starts
    os.execve(sys.executable, sys.orig_argv, {**os.environ, **ALLOCATOR})

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.cases import DIGITS, KINDS, Case
from benchmarks.peers import installed
from dpsweep.accounting.errors import InvalidInput
from dpsweep.workers.data import Dataset, load_dataset
from dpsweep.workers.machine.devices import choose_device
from dpsweep.workers.models import build_model
from dpsweep.workers.own_code.imports import NO_CODE, UserCode
from dpsweep.workers.spec import Component, DataSpec, ExecutionSpec, Refreshes, TrialSpec
from dpsweep.workers.training import trainer as training
from dpsweep.workers.training.norm_recorder import NormRecorder
from dpsweep.workers.training.snapshot_intervals import SnapshotInterval
from dpsweep.workers.trials import trial

SHARES: Mapping[str, tuple[Any, str]] = {
    "checkpoints": (trial, "save_checkpoint"),
    "evaluation": (training, "evaluate"),
    "gradients": (training.Trainer, "_clipped_sum"),
    "noise and update": (training.Trainer, "_update"),
    "norm passes": (NormRecorder, "measure"),
    "old norms": (NormRecorder, "renew_as_old_as"),
    "contributions": (SnapshotInterval, "extend"),
    "shards": (NormRecorder, "_write"),
}
"""Functions whose share of a trial's CPU time is measured; none of them calls another."""

NORM_PASSES = ("norm passes", "old norms")
"""The shares that are the price of epsilons of single examples."""

TURNS, ENOUGH = 3, 10.0
"""Largest number of runs of each method, and seconds after which no further turn begins."""
Loop = Callable[[Case, DataSpec, torch.device], None]
CASES: Mapping[str, Case] = {
    each.name: each
    for each in (
        Case("adult_logistic", DataSpec("adult"), Component("logistic"), 256, 5),
        Case("adult_dpsgd_f", DataSpec("adult"), Component("logistic"), 256, 5, clipping="dpsgd_f"),
        Case("mnist_cnn", DataSpec("mnist"), Component("cnn_dpsgdf"), 256, 5, classes=DIGITS, rows=600, few=40),
        Case("mnist_long", DataSpec("mnist"), Component("cnn_dpsgdf"), 256, 20, classes=DIGITS, rows=600, few=40),
        Case("cifar_resnet20", DataSpec("cifar10"), Component("resnet20_gn"), 64, 4, classes=KINDS, rows=64, few=8),
        Case("cifar_long", DataSpec("cifar10"), Component("resnet20_gn"), 64, 20, classes=KINDS, rows=32, few=8),
        Case("cifar_wrn16_4", DataSpec("cifar10"), Component("wrn16_4"), 32, 2, classes=KINDS, rows=32, few=4),
        Case("cifar_wrn_long", DataSpec("cifar10"), Component("wrn16_4"), 32, 8, classes=KINDS, rows=32, few=4),
        Case(
            "mnist_transformer", DataSpec("mnist"), Component("transformer"), 256, 5, classes=DIGITS, rows=300, few=30,
        ),
    )
}  # fmt: skip


# -- one training, by each method --------------------------------------------------------------------------------------


def load(data: DataSpec, code: UserCode = NO_CODE) -> Dataset:
    """Replaces `load_dataset`: the data of a case, read once for all its runs. ``code`` is not used."""
    return _read(data)


@functools.lru_cache(maxsize=2)
def _read(data: DataSpec) -> Dataset:
    """Return the data set with at most as many test as training examples."""
    dataset = load_dataset(data)
    tested = np.arange(min(len(dataset.test), len(dataset.train)))
    return replace(dataset, test=dataset.test.select(tested))


def evaluate(model: nn.Module, dataset: Dataset) -> tuple[float, Tensor]:
    """Accuracy of everybody and of every group, as a user would write it."""
    test = dataset.test
    device = next(model.parameters()).device
    model.eval()
    with torch.no_grad():
        chunks = zip(test.features.split(1024), test.labels.split(1024), strict=True)
        right = torch.cat([model(dataset.prepare(x.to(device))).argmax(1).cpu() == y for x, y in chunks]).double()
    model.train()
    sizes = torch.bincount(test.groups, minlength=dataset.num_groups)
    return float(right.mean()), torch.bincount(test.groups, right, dataset.num_groups) / sizes


def start(case: Case, dataset: Dataset, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a new model of the case, and its optimizer."""
    torch.manual_seed(0)
    model = build_model(case.model, dataset, 0).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=case.learning_rate)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[tuple[Tensor, Tensor]], dataset: Dataset
) -> None:
    """Train one epoch and evaluate."""
    device = next(model.parameters()).device
    for x, y in batches:
        optimizer.zero_grad()
        functional.cross_entropy(model(x.to(device)), y.to(device)).backward()
        optimizer.step()
    evaluate(model, dataset)


def plain(case: Case, data: DataSpec, device: torch.device) -> None:
    """Train by batches of indices, without privacy."""
    dataset = load(data)
    model, optimizer = start(case, dataset, device)
    features, labels = dataset.train.features.to(device), dataset.train.labels.to(device)
    for _ in range(case.epochs):
        parts = torch.randperm(len(labels)).to(device).split(case.batch_size)
        batches = ((dataset.prepare(features[part]), labels[part]) for part in parts)
        train(model, optimizer, batches, dataset)


def prepared(dataset: Dataset) -> TensorDataset:
    """Return the training examples, prepared for the model."""
    return TensorDataset(dataset.prepare(dataset.train.features), dataset.train.labels)


def dataloader(case: Case, data: DataSpec, device: torch.device) -> None:
    """Train by torch's DataLoader, without privacy."""
    dataset = load(data)
    model, optimizer = start(case, dataset, device)
    loader = DataLoader(prepared(dataset), batch_size=case.batch_size, shuffle=True)
    for _ in range(case.epochs):
        train(model, optimizer, iter(loader), dataset)


def opacus(case: Case, data: DataSpec, device: torch.device) -> None:
    """Train by Opacus' PrivacyEngine."""
    from opacus import PrivacyEngine  # late: without it, the others are measured

    dataset = load(data)
    model, optimizer = start(case, dataset, device)
    model.train()
    loader = DataLoader(prepared(dataset), batch_size=case.batch_size)
    private, steps, batches = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=case.noise_multiplier,
        max_grad_norm=case.bound,
    )
    for _ in range(case.epochs):
        train(private, steps, iter(batches), dataset)


PEERS: Mapping[str, Loop] = {"plain": plain, "dataloader": dataloader, "opacus": opacus}


def dpsweep(spec: TrialSpec) -> None:
    """Train as a trial of a sweep does."""
    with tempfile.TemporaryDirectory() as folder:
        trial.run_trial(spec, folder)


# -- the measurement ---------------------------------------------------------------------------------------------------


def clock_of(device: torch.device) -> Callable[[], float]:
    """Return a clock of CPU seconds; for a GPU, of elapsed seconds after waiting for its work."""

    def elapsed() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return elapsed if device.type == "cuda" else time.process_time


def seconds_of(run: Callable[[], None], clock: Callable[[], float]) -> float:
    """Return the seconds of one run by ``clock``."""
    began = clock()
    run()
    return clock() - began


@contextmanager
def counted(spent: dict[str, float], clock: Callable[[], float]) -> Iterator[None]:
    """Add the seconds of each of `SHARES` to ``spent`` while the block runs."""

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = clock()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] += clock() - began

        return call

    patches = [
        mock.patch.object(owner, name, timed(key, getattr(owner, name))) for key, (owner, name) in SHARES.items()
    ]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def least(runs: Mapping[str, Callable[[], None]], clock: Callable[[], float], enough: float) -> dict[str, float]:
    """Return the least seconds of each run over up to `TURNS` turns; no turn begins after ``enough`` seconds."""
    found: dict[str, float] = {}
    began, turn = time.perf_counter(), 0
    while turn == 0 or (turn < TURNS and time.perf_counter() - began < enough):
        for name, run in runs.items():
            found[name] = min(seconds_of(run, clock), found.get(name, math.inf))
        turn += 1
    return found


def measure(case: Case, device: torch.device, enough: float = ENOUGH) -> dict[str, object]:
    """Return all results of a case: ratios to the plain loop, and shares of the trial. enough: as of `least`."""
    clock, released = clock_of(device), {"noise_source": "os_entropy", "execution": ExecutionSpec(device=str(device))}
    norms: Mapping[str, Refreshes] = {"dpsweep": "auto", "refreshed": 1.0, "off": "off"}
    trials = {name: case.spec(refreshes, **released) for name, refreshes in norms.items()}
    spec = trials["dpsweep"]
    examples = len(load(spec.data).train)
    # A first run does the imports at first use, such as those of torch's optimisers, which are not measured.
    once = replace(case.shortened(), epochs=1)
    loops = {name: loop for name, loop in PEERS.items() if name != "opacus" or installed("opacus")}
    for loop in loops.values():
        loop(once, once.spec("auto").data, device)
    dpsweep(once.spec("auto", **released))
    runs = {name: partial(loop, case, spec.data, device) for name, loop in loops.items()}
    seconds = least({**runs, **{name: partial(dpsweep, each) for name, each in trials.items()}}, clock, enough)
    spent = defaultdict[str, float](float)
    with counted(spent, clock):
        whole = seconds_of(partial(dpsweep, spec), clock)
    return {
        "case": case.name,
        "examples": examples,
        "epochs": case.epochs,
        "plain_s": round(seconds["plain"], 2),
        **{name: round(value / seconds["plain"], 2) for name, value in seconds.items() if name != "plain"},
        "norms": round(sum(spent[name] for name in NORM_PASSES) / whole * seconds["dpsweep"] / seconds["plain"], 2),
        "shares": {name: round(spent[name] / whole, 3) for name in SHARES},
    }


COLUMNS = ("dataloader", "opacus", "dpsweep", "refreshed", "off", "norms")


def as_row(result: Mapping[str, Any]) -> str:
    """Return a row of the printed table."""
    ratios = "".join(f"{result.get(column, math.nan):>11.2f}x" for column in COLUMNS)
    largest = sorted(result["shares"].items(), key=lambda share: -share[1])[:3]
    shares = ", ".join(f"{name} {share:.0%}" for name, share in largest)
    return f"{result['case']:<18}{result['examples']:>9}{result['plain_s']:>9.2f}{ratios}   {shares}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rows, within two minutes")
    parser.add_argument("--json", action="store_true", help="one JSON object per case")
    parser.add_argument("--case", action="append", choices=CASES, help="only this case (may be repeated)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    options = parser.parse_args()
    try:
        device = choose_device(options.device)
    except InvalidInput as error:
        parser.error(f"--device: {error}")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="opacus|torch")  # of Opacus about its noise, and of its hooks
    if not options.json:
        print(f"{'case':<18}{'examples':>9}{'plain s':>9}" + "".join(f"{column:>12}" for column in COLUMNS))
    for name in options.case or CASES:
        case = replace(CASES[name].shortened(), epochs=1) if options.quick else CASES[name]
        with mock.patch.object(trial, "load_dataset", load):
            result = measure(case, device)
        print(json.dumps(result) if options.json else as_row(result), flush=True)


if __name__ == "__main__":
    main()
