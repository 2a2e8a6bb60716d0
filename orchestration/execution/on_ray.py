"""Run a sweep on Ray: trials train under Ray Tune, and one queue of tasks accounts the parts of all trials.

Numbers of ``status.json`` are gauges of the cluster, for Prometheus. Ray serves them on every node, with the prefix
``ray_``, until the driver ends. They show nothing beyond the snapshot.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import ray
from ray.util.metrics import Gauge

from dpsweep.accounting.errors import DpsweepError
from dpsweep.accounting.jobs.examples import Part, PartwiseJob, Result
from dpsweep.accounting.jobs.parallel import AccountingQueue
from dpsweep.orchestration.execution.backend import (
    AuditedCopy,
    OnEpoch,
    Opening,
    TrainingObserver,
    TrialContext,
    Warn,
    audit_here,
)
from dpsweep.orchestration.execution.cluster import (
    check_keys,
    check_ranks,
    check_resources,
    check_shared_storage,
    check_versions,
    connected,
)
from dpsweep.orchestration.execution.completion import close_here
from dpsweep.orchestration.execution.nodes import check_gpus, cluster_now
from dpsweep.orchestration.execution.ray_tune import train
from dpsweep.orchestration.execution.storage_checks import OnSharedStorage, Probe
from dpsweep.orchestration.execution.turns import Turns
from dpsweep.orchestration.store.published import TrialState
from dpsweep.orchestration.store.release_modes import shown_error
from dpsweep.orchestration.store.status_snapshot import ClusterSnapshot, SweepSnapshot
from dpsweep.orchestration.sweeps.planned import PlannedTrial
from dpsweep.orchestration.sweeps.schema import SweepSpec
from dpsweep.orchestration.sweeps.sections import LEAST_QUANTITY, AccountingSettings, ResourceSettings
from dpsweep.orchestration.sweeps.user_code import unpacked
from dpsweep.workers.evaluation.attack_results import AuditResult

_RETRIES: Final = 8
"""Most repetitions of a task whose process or node was lost."""
_LOOK: Final = 0.5
"""Seconds from one look at a task to the next."""


def _task(function: Callable[..., Any], reserved: ResourceSettings) -> Any:
    bundle = reserved.bundle
    return ray.remote(function).options(
        num_cpus=bundle.get("CPU", 0.0),
        num_gpus=bundle.get("GPU", 0.0),
        max_retries=_RETRIES,
        **({"label_selector": dict(reserved.labels)} if reserved.labels else {}),
    )


def _found(task: Any) -> Any:
    try:
        return ray.get(task)
    except ray.exceptions.RayError as error:
        raise DpsweepError(f"its process was lost too often ({type(error).__name__})") from error


def _close(planned: PlannedTrial, step: int, context: TrialContext, ranks: int) -> DpsweepError | None:
    """Close the trial in this process; return the error that ended it, with only the text that may be shown."""
    try:
        context.require_node()
        close_here(planned, step, context, unpacked(context.code), ranks)
    except BaseException as error:  # user code may raise anything, and Ray would store its text
        return context.shown(planned.key, error)
    return None


def _audit(copy: AuditedCopy, context: TrialContext) -> AuditResult | DpsweepError:
    """Audit the copy in this process; errors are returned as by `_close`."""
    try:
        context.require_node()
        return audit_here(copy, context.files, unpacked(context.code), lambda key, now: None)
    except BaseException as error:  # as in `_close`
        return DpsweepError(shown_error(error, context.disclosure))


_JOIN_TIMEOUT = 10.0
"""Seconds to wait for nodes to join a running cluster before the sweep is refused for lack of resources."""


@final
class OnRay:
    """A `Backend` on the Ray cluster that this process is connected to."""

    trials_at_once = 64
    """Enough to keep the nodes busy with trials of one part each; the queue limits the concurrent work."""

    def __init__(
        self,
        sweep: SweepSpec,
        context: TrialContext,
        queue: AccountingQueue,
        warn: Warn,
        turns: Turns | None = None,
    ) -> None:
        """Train and account on the connected cluster. turns: the sweeps that share it; None if no other does."""
        self._sweep, self._context, self._queue, self._warn, self._turns = sweep, context, queue, warn, turns
        self._gauges = Gauges()
        self._amounts: dict[str, Mapping[str, float]] = {}

    def train(self, trials: Sequence[PlannedTrial], observer: TrainingObserver, name: str) -> None:
        self._amounts |= {planned.key: self._sweep.reserved(planned.spec).on_each_node for planned in trials}
        train(trials, observer, self._sweep, self._context, name, self._turns)

    def scatter(self, job: PartwiseJob[Part, Result], parts: Sequence[Part]) -> Iterator[Result]:
        """Scatter as `Backend.scatter`. Raises: InvalidInput, naming the nodes, if some that joined later lack the
        storage.
        """
        probe = self._context.probe
        if probe is None:
            yield from self._queue.scatter(job, parts)
            return
        try:
            yield from self._queue.scatter(OnSharedStorage(job, probe), parts)
        except Exception:  # a node that no longer finds the trial's files raises anything
            check_shared_storage(probe, self._warn)
            raise

    def close(self, planned: PlannedTrial, step: int) -> Iterator[None]:
        """Close as `Backend.close`, on a node that fits one of the trial's ranks.

        Left early, the task ends with the driver; closing can be repeated. Raises: StorageError or DpsweepError, with
        the text that may be shown.
        """
        reserved = self._sweep.reserved(planned.spec)
        closing = _task(_close, reserved).remote(planned, step, self._context, reserved.processes)
        while not ray.wait([closing], timeout=_LOOK)[0]:
            yield
        failure = _found(closing)
        if failure is not None:
            raise failure

    def audit(self, copy: AuditedCopy, on_epoch: OnEpoch) -> AuditResult:
        """Audit as `Backend.audit`, on a node that fits one of the trial's ranks."""
        found = _found(_task(_audit, self._sweep.reserved(copy.spec)).remote(copy, self._context))
        if isinstance(found, DpsweepError):
            raise found
        assert isinstance(found, AuditResult), "the task returns one of both"
        return found

    def give_up(self) -> None:
        self._queue.close()

    def show(self, snapshot: SweepSnapshot) -> None:
        self._gauges.show(snapshot)

    def cluster(self, waiting: Sequence[str], training: int) -> ClusterSnapshot | None:
        if self._turns is not None:
            self._turns.renew()
        return cluster_now([self._amounts[key] for key in waiting if key in self._amounts], training)


@contextlib.contextmanager
def embedded(asked: Opening) -> Iterator[OnRay]:
    """Yield the backend on a Ray cluster started for the sweep. Raises: InvalidInput if its resources do not
    suffice.
    """
    sweep, warn = asked.sweep, asked.warn
    with connected(asked.address, asked.files.log, asked.code, asked.connect) as shipped:
        part = {"CPU": sweep.accounting.cpus or 0.0}
        check_resources({**_needs_of_trials(sweep), "accounting a part": part})
        check_ranks(sweep.resources)
        check_gpus(sweep, warn)
        with _queue(sweep.accounting, part, warn) as queue:
            yield OnRay(sweep, TrialContext(asked.files, sweep.disclosure, shipped), queue, warn)


@contextlib.contextmanager
def on_cluster(asked: Opening) -> Iterator[OnRay]:
    """Yield the backend on a running Ray cluster.

    Raises: InvalidInput if its resources do not suffice, or a node cannot read the sweep's files or has another key.
    """
    sweep, warn = asked.sweep, asked.warn
    with connected(asked.address, asked.files.log, asked.code, asked.connect) as shipped:
        custom = {sweep.accounting.resource: 1.0} if sweep.accounting.resource else {}
        part = {"CPU": reserved_cpus(sweep.accounting), **custom}
        check_resources({**_needs_of_trials(sweep), "accounting a part": part}, _JOIN_TIMEOUT)
        check_ranks(sweep.resources, _JOIN_TIMEOUT)
        check_versions(warn)
        check_gpus(sweep, warn)
        probe = Probe.written(asked.files.probe)
        check_shared_storage(probe, warn)
        context = TrialContext(asked.files, sweep.disclosure, shipped, probe=probe)
        check_keys(context.key_check, warn)
        turns = Turns(f"{sweep.name} {asked.files.root}", asked.turn)
        with _queue(sweep.accounting, part, warn) as queue:
            try:
                yield OnRay(sweep, context, queue, warn, turns)
            finally:
                turns.leave()


def _needs_of_trials(sweep: SweepSpec) -> dict[str, Mapping[str, float]]:
    """Return the resources that each kind of trial reserves, by a description for error messages."""
    return {
        " ".join(
            ["a trial", *(f"with {place} {' or '.join(names)}" for place, names in each.when.items())]
        ): each.on_each_node
        for each in sweep.resources
    }


def _queue(settings: AccountingSettings, part: Mapping[str, float], warn: Warn) -> AccountingQueue:
    custom = {name: amount for name, amount in part.items() if name != "CPU"}
    return AccountingQueue(part["CPU"], custom, settings.actors, warn)


def reserved_cpus(settings: AccountingSettings) -> float:
    """Return CPUs that accounting a part reserves on a running cluster; more than 0, so that a head without CPUs gets
    none.

    With a custom resource, which keeps parts off the head as well, 0 is allowed.

    >>> reserved_cpus(AccountingSettings()), reserved_cpus(AccountingSettings(cpus=0.0))
    (1.0, 0.0001)
    >>> reserved_cpus(AccountingSettings(cpus=0.0, resource="accounting"))
    0.0
    """
    if settings.cpus is None:
        return 1.0
    return settings.cpus or (0.0 if settings.resource else LEAST_QUANTITY)


Labelled = tuple[dict[str, str], float]
"""Tags of a gauge besides ``sweep``, and its value."""


@dataclass(frozen=True)
class SweepGauge:
    """A gauge: name, description, its values in a snapshot, and its tags besides ``sweep``."""

    name: str
    description: str
    values: Callable[[SweepSnapshot], Iterable[Labelled]]
    tags: tuple[str, ...] = ()


def _trials(snapshot: SweepSnapshot) -> Iterable[Labelled]:
    counts = snapshot.counts()
    return [({"state": state.value}, float(counts[state])) for state in TrialState]


def _epsilon(snapshot: SweepSnapshot) -> Iterable[Labelled]:
    known = [trial.epsilon for trial in snapshot.trials if trial.epsilon is not None]
    return [({}, max(known))] if known else []


SWEEP_GAUGES: Final = (
    SweepGauge("dpsweep_trials", "Trials by state.", _trials, ("state",)),
    SweepGauge("dpsweep_steps", "Steps trained, of all trials.", lambda s: [({}, float(s.steps))]),
    SweepGauge(
        "dpsweep_steps_per_second",
        "Steps trained per second, lately.",
        lambda s: [] if s.steps_per_second is None else [({}, s.steps_per_second)],
    ),
    SweepGauge("dpsweep_parts_accounted", "Parts accounted by this driver.", lambda s: [({}, float(s.parts))]),
    SweepGauge("dpsweep_epsilon", "Largest upper bound on epsilon of a private trial so far.", _epsilon),
    SweepGauge(
        "dpsweep_shard_bytes",
        "Bytes of the norm shards by now, before compression, as planned.",
        lambda s: [({}, float(s.shard_bytes))],
    ),
)


@final
class Gauges:
    """The gauges of one sweep; Ray must be initialised."""

    def __init__(self) -> None:
        self._gauges = [(each, Gauge(each.name, each.description, ("sweep", *each.tags))) for each in SWEEP_GAUGES]

    def show(self, snapshot: SweepSnapshot) -> None:
        """Set every gauge to its value in the snapshot."""
        for each, gauge in self._gauges:
            for tags, value in each.values(snapshot):
                gauge.set(value, {"sweep": snapshot.name, **tags})
