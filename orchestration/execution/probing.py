"""Measure the time and memory of a planned sweep by a few real steps of each kind of trial, in this process."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.individual import individual_epsilons
from dpsweep.orchestration.execution.costs import costs_as_planned
from dpsweep.orchestration.records.failures import shown
from dpsweep.orchestration.sweeps.planned import Plan, PlannedTrial
from dpsweep.orchestration.sweeps.schema import SweepSpec
from dpsweep.orchestration.tracking.embedded import embedded_tracking_uri
from dpsweep.orchestration.tracking.mlflow import MlflowTracker
from dpsweep.workers.own_code.imports import UserCode
from dpsweep.workers.spec import TrialSpec
from dpsweep.workers.training.norm_recorder import is_due, oldest_norm
from dpsweep.workers.trials.probe import TrialProbe, probe_trial

_ROWS: Final = 1024
"""Examples that are accounted to measure the time per example."""
_WORKER_CODE: Final = "import os; os.nice({niceness}); import dpsweep.orchestration.execution.ray_tune"
"""Code of a process that imports what a Ray worker imports before it trains or accounts."""
_NICENESS: Final = "RAY_worker_niceness"
"""Environment variable with the niceness that Ray gives its workers; other work on the machine has priority."""
_USUAL_NICENESS: Final = 15
_MOST_WORKERS: Final = 8


@dataclass(frozen=True)
class AccountingProbe:
    """CPU seconds of accounting a trial.

    `tables`: once per process and trace. `example`: for each example. `groups`: worst cases of groups and bounds on
    attacks, once for all trials with the same trace.
    """

    tables: float
    example: float
    groups: float = 0.0

    def seconds(self, examples: int) -> float:
        """Return CPU seconds of a trial in a process that has not computed its tables yet."""
        return self.tables + examples * self.example


@dataclass(frozen=True)
class SweepProbe:
    """Measurements of a probe. `trials`: by `kind`. `accounting`: by `run_kind`.

    `command`: CPU seconds up to the end of planning, imports included. `worker`: CPU seconds until a Ray worker can
    start work. `tracker`: CPU seconds until MLflow's store is open. `share`: fraction of a CPU that this process got
    while it worked. `worker_share`: the same for a process with the priority of Ray's workers.
    """

    trials: Mapping[Hashable, TrialProbe]
    accounting: Mapping[Hashable, AccountingProbe]
    command: float
    worker: float
    tracker: float
    share: float
    worker_share: float

    @property
    def steps(self) -> int:
        """Number of steps that were taken."""
        return sum(each.steps for each in self.trials.values())


def probe_sweep(sweep: SweepSpec, plan: Plan, code: UserCode) -> SweepProbe:
    """Take a few steps of every kind of trial, and account random contributions for every kind of run.

    Raises: InvalidInput if a trial fails.
    """
    command, began, used = time.process_time(), time.perf_counter(), time.thread_time()
    trials: dict[Hashable, TrialProbe] = {}
    accounted: dict[Hashable, AccountingProbe] = {}
    for planned in plan.trials:
        if kind(planned.spec) not in trials:
            trials[kind(planned.spec)] = _probed(planned, sweep, code)
        if planned.spec.is_private and run_kind(planned) not in accounted:
            accounted[run_kind(planned)] = _accounting(planned, sweep)
    share = (time.thread_time() - used) / max(time.perf_counter() - began, 1e-9)
    on_gpu = any(each.gpu_memory for each in trials.values())
    worker, worker_share = _worker()
    shares = (1.0, 1.0) if on_gpu else (min(1.0, share), min(1.0, worker_share))
    return SweepProbe(trials, accounted, command, worker, _tracker(), *shares)


def _probed(planned: PlannedTrial, sweep: SweepSpec, code: UserCode) -> TrialProbe:
    try:
        return probe_trial(planned.spec, planned.releases, code)
    except (Exception, SystemExit) as error:  # user code may raise anything, and the text may quote the data
        raise InvalidInput(f"trial {planned.key} fails within a few steps: {shown(error, sweep.disclosure)}") from None


def resources_here() -> tuple[float, float]:
    """Return the number of CPUs that this process may use, and of GPUs of this machine."""
    return float(len(os.sched_getaffinity(0))), float(torch.cuda.device_count())


def kind(spec: TrialSpec) -> Hashable:
    """Return the key of trials with the same time per step and memory; it ignores seeds, rates, bounds and noise
    multipliers.
    """
    named = (spec.optimizer, spec.clipping, spec.averaging)
    return (
        *(spec.data, spec.model, spec.loss, spec.preprocessing, spec.augmentation, spec.sampling),
        *(spec.norms, spec.execution, spec.audit, spec.is_private),
        *(None if component is None else component.name for component in named),
    )


def run_kind(planned: PlannedTrial) -> Hashable:
    """Return the key of trials with the same accounting time: steps, batches and schedule, but not the noise
    multiplier.
    """
    spec = planned.spec
    return spec.noise.schedule, spec.sampling, spec.norms, planned.trace.steps, planned.dataset.train_size


def snapshots(planned: PlannedTrial) -> list[int]:
    """Return the steps whose snapshots store the norms of all examples."""
    often, steps = planned.spec.norms.snapshots_per_epoch, range(planned.trace.steps)
    return [step for step in steps if often is None or is_due(step, often, steps_per_epoch(planned))]


def norm_passes(planned: PlannedTrial) -> float:
    """Return the expected number of passes over all examples that compute norms; parts of a pass count as such."""
    if not planned.spec.norms.when_sampled:
        return float(len(snapshots(planned)))
    per_epoch = steps_per_epoch(planned)
    sampled = 1.0 / per_epoch
    return 1.0 + math.fsum((1.0 - sampled) ** oldest_norm(step, per_epoch) for step in snapshots(planned)[1:])


def steps_per_epoch(planned: PlannedTrial) -> int:
    """Return the steps of one epoch of the trial."""
    return planned.trace.segments[0].sampling.steps_per_epoch


def _accounting(planned: PlannedTrial, sweep: SweepSpec) -> AccountingProbe:
    """Measure accounting with random contributions; no training data are read."""
    tables, example = _accounting_of_examples(planned, sweep) if snapshots(planned) else (0.0, 0.0)
    began = time.process_time()
    costs_as_planned(planned, sweep)
    return AccountingProbe(tables, example, time.process_time() - began)


def _accounting_of_examples(planned: PlannedTrial, sweep: SweepSpec) -> tuple[float, float]:
    """CPU seconds for the tables of a trace, and for each example."""
    steps, delta = snapshots(planned), planned.spec.delta
    rows = min(_ROWS, planned.dataset.train_size)
    contributions = np.random.default_rng(0).uniform(0.2, 1.0, (2 * rows, len(steps)))
    took = []
    for half in (contributions[:rows], contributions[rows:]):
        began = time.thread_time()
        individual_epsilons(steps, half, planned.trace, delta, sweep.accounting.individual)
        took.append(time.thread_time() - began)
    return max(0.0, took[0] - took[1]), took[1] / rows


def _worker() -> tuple[float, float]:
    """Measure processes that import what Ray's workers import, at their priority.

    One process per usable CPU (at most `_MOST_WORKERS`) runs at the same time, because the share of a single process
    says little about the time that other work leaves to all. Returns: CPU seconds per process, and CPU seconds per
    second of its life.
    """
    code = _WORKER_CODE.format(niceness=int(os.environ.get(_NICENESS, _USUAL_NICENESS)))
    count = min(len(os.sched_getaffinity(0)), _MOST_WORKERS)
    before, began = os.times(), time.perf_counter()
    workers = [subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.DEVNULL) for _ in range(count)]
    lives = [time.perf_counter() - began for worker in workers if worker.wait() == 0]
    after = os.times()
    if len(lives) < count:
        raise InvalidInput("a worker of Ray cannot start on this machine; its error is above")
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return used / count, used / max(sum(lives), 1e-9)


def _tracker() -> float:
    began = time.thread_time()
    with tempfile.TemporaryDirectory(prefix="dpsweep-probe-") as folder:
        MlflowTracker(embedded_tracking_uri(folder), artifact_root=folder)
    return time.thread_time() - began
