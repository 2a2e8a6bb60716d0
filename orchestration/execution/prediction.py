"""Measure a few real steps of each kind of trial, and predict time, memory and price of the sweep from them.

The prediction covers the start of driver, Ray, MLflow and every worker. For every trial it covers loading data, steps,
norm passes, evaluations, checkpoints and reports. Accounting beside training and the comparison at the end are
included. Trials run in parallel as their reservations allow; the running time is at least the total CPU time over the
number of CPUs.
"""

from __future__ import annotations

import heapq
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import torch

from dpsweep.accounting.errors import InvalidInput, require_finite
from dpsweep.accounting.individual import individual_epsilons
from dpsweep.orchestration.execution.costs import costs_as_planned
from dpsweep.orchestration.store.failures import shown
from dpsweep.orchestration.sweeps.planned import Plan, PlannedTrial
from dpsweep.orchestration.sweeps.schema import SweepSpec
from dpsweep.orchestration.sweeps.sections import ResourceSettings, reserved
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


_RAY: Final = 0.8
"""Time to start an embedded Ray. Unit, also below: the start of one worker. Measured with Ray 2.60 and MLflow 3.17."""
_REPORT: Final = 0.0045
"""Time that a trial waits at the end of an epoch, while the driver records it."""
_DRIVER: Final = 0.002
"""CPU time of driver and Ray per epoch, including the recording of curves."""
_TRIAL: Final = 0.06
"""Time to start and end a trial in a running worker."""
_COMPARISON: Final = 0.5
"""Time to write the reports and to log them to MLflow."""
_COMPARED: Final = 0.06
"""Additional time of the reports for each trial."""
_SLACK: Final = 1e-9
"""Tolerance in sums of fractions of CPUs and GPUs."""


@dataclass(frozen=True)
class Capacity:
    """Resources of a sweep: total CPUs and GPUs, and the price of all of them per hour, or None."""

    cpus: float
    gpus: float = 0.0
    price_per_hour: float | None = None

    def __post_init__(self) -> None:
        require_finite("--cpus", self.cpus, above=0.0)
        require_finite("--gpus", self.gpus, at_least=0.0)
        if self.price_per_hour is not None:
            require_finite("--price-per-hour", self.price_per_hour, at_least=0.0)

    def require_room(self, sections: Iterable[ResourceSettings]) -> None:
        """Raise `InvalidInput` unless one trial of every section fits."""
        for each in sections:
            if each.cpus > self.cpus + _SLACK or each.gpus > self.gpus + _SLACK:
                raise InvalidInput(
                    f"a trial reserves {each.cpus:g} CPUs and {each.gpus:g} GPUs, but there are {self.cpus:g} and "
                    f"{self.gpus:g}; say with --cpus and --gpus what the sweep will run on, or lower its resources"
                )


@dataclass(frozen=True)
class Prediction:
    """Time, memory and price of a sweep.

    `seconds`: total time on CPUs without other work, the sum of starting, running and ending. `beside_others`: total
    time if other work, with priority over Ray's workers, continues as during the probe. `cpu_hours`: CPU time used.
    `gpu_hours`: GPU time reserved by trials. `memory`, `gpu_memory`: bytes of the largest trial. `price`: of the whole
    capacity for the total time; None if no price is known. `kinds`: number of kinds of trials that were probed.
    `steps`: number of probed steps.
    """

    seconds: float
    beside_others: float
    starting: float
    running: float
    ending: float
    cpu_hours: float
    gpu_hours: float
    memory: int
    gpu_memory: int
    price: float | None
    trials: int
    trials_at_once: int
    kinds: int
    steps: int

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def predict(plan: Plan, probe: SweepProbe, sections: Sequence[ResourceSettings], capacity: Capacity) -> Prediction:
    """Return the prediction for the trials of a plan that are not refused.

    sections: `resources` of the sweep. Raises: InvalidInput if a trial does not fit the capacity.
    """
    capacity.require_room(sections)
    start, needs = probe.worker, [reserved(sections, planned.spec) for planned in plan.trials]
    training = [training_seconds(planned, probe) for planned in plan.trials]
    accounting = _accounting_seconds(plan, probe, capacity)
    epochs = sum(planned.trace.steps / steps_per_epoch(planned) for planned in plan.trials)
    last, at_once = side_by_side(list(zip(training, needs, strict=True)), capacity, sections[-1].max_concurrent)
    workers = at_once * start + min(math.ceil(capacity.cpus), len(accounting)) * start
    busy = [
        seconds * min(probe.trials[kind(planned.spec)].cores, capacity.cpus)
        for planned, seconds in zip(plan.trials, training, strict=True)
    ]
    work = workers + sum(busy) + sum(accounting) + epochs * _DRIVER * start
    beside = start + last + max(accounting, default=0.0)
    running = max(beside, work / capacity.cpus)
    starting = probe.command + probe.tracker + _RAY * start
    ending = (_COMPARISON + _COMPARED * len(training)) * start
    seconds = starting + running + ending
    kinds = probe.trials.values()
    price = None if capacity.price_per_hour is None else capacity.price_per_hour * seconds / 3600.0
    return Prediction(
        seconds=seconds,
        beside_others=(starting + ending) / probe.share + running / probe.worker_share,
        starting=starting,
        running=running,
        ending=ending,
        cpu_hours=(starting + work + ending) / 3600.0,
        gpu_hours=sum(each.gpus * took for each, took in zip(needs, training, strict=True)) / 3600.0,
        memory=max((each.memory for each in kinds), default=0),
        gpu_memory=max((each.gpu_memory for each in kinds), default=0),
        price=price,
        trials=len(training),
        trials_at_once=at_once,
        kinds=len(probe.trials),
        steps=probe.steps,
    )


def training_seconds(planned: PlannedTrial, probe: SweepProbe) -> float:
    """Return the seconds from the start of a trial in a running worker to the end of its training."""
    pieces, spec = probe.trials[kind(planned.spec)], planned.spec
    steps = planned.trace.steps
    epochs = steps / steps_per_epoch(planned)
    checkpoints = min(steps, epochs / spec.execution.checkpoint_every_epochs) + 1.0
    alone = (
        pieces.begin
        + steps * pieces.step
        + norm_passes(planned) * pieces.refresh
        + (epochs + 1.0) * pieces.evaluation  # the finished model is evaluated once more
        + checkpoints * pieces.checkpoint
    )
    return alone + _attacks(planned, pieces) + (_TRIAL + epochs * _REPORT) * probe.worker


def _attacks(planned: PlannedTrial, pieces: TrialProbe) -> float:
    """Return the seconds to train the reference models: half of all examples each, for as many epochs as the trial."""
    rmia, data = planned.spec.attacks.rmia, planned.dataset
    if rmia is None:
        return 0.0
    share = (data.train_size + data.test_size) / 2.0 / data.train_size
    return rmia.reference_models * share * planned.trace.steps * pieces.step


def _accounting_seconds(plan: Plan, probe: SweepProbe, capacity: Capacity) -> list[float]:
    """Return the seconds to account each private trial. One process per CPU accounts and caches the tables of each
    trace.
    """
    processes, seen = math.ceil(capacity.cpus), Counter[object]()
    found = []
    for planned in plan.trials:
        if not planned.spec.is_private:
            continue
        measured = probe.accounting[run_kind(planned)]
        seen[planned.trace] += 1
        is_new = seen[planned.trace] <= processes
        examples = planned.dataset.train_size * measured.example
        groups = measured.groups if seen[planned.trace] == 1 else 0.0
        found.append(examples + (measured.tables if is_new else 0.0) + groups)
    return found


def side_by_side(
    trials: Sequence[tuple[float, ResourceSettings]], capacity: Capacity, most: int | None
) -> tuple[float, int]:
    """Return the seconds until the last trial ends, and the most trials at once, if each starts in order as soon as it
    fits.

    `trials`: seconds and reserved resources of each. `most`: limit of trials at once, or None.

    >>> one = ResourceSettings()
    >>> side_by_side([(3.0, one), (1.0, one), (1.0, one), (1.0, one)], Capacity(2.0), None)
    (3.0, 2)
    >>> side_by_side([(3.0, ResourceSettings(gpus=1.0)), (1.0, one), (1.0, one)], Capacity(2.0, 1.0), 1)
    (5.0, 1)
    """
    now, largest, cpus, gpus = 0.0, 0, capacity.cpus + _SLACK, capacity.gpus + _SLACK
    running: list[tuple[float, float, float]] = []
    for seconds, needs in trials:
        while needs.cpus > cpus or needs.gpus > gpus or len(running) == most:
            now, more_cpus, more_gpus = heapq.heappop(running)
            cpus, gpus = cpus + more_cpus, gpus + more_gpus
        heapq.heappush(running, (now + seconds, needs.cpus, needs.gpus))
        cpus, gpus, largest = cpus - needs.cpus, gpus - needs.gpus, max(largest, len(running))
    return max((end for end, _, _ in running), default=0.0), largest
