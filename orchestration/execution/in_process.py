"""Run a sweep in this process, one trial after the other, without Ray: for debuggers and tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import final

from dpsweep.accounting.errors import InvalidInput
from dpsweep.accounting.jobs.examples import Part, PartwiseJob, Result, account_in_process
from dpsweep.orchestration.execution.backend import (
    AuditedCopy,
    OnEpoch,
    Opening,
    TrainingObserver,
    TrialContext,
    audit_here,
    lighter,
)
from dpsweep.orchestration.execution.completion import close_here
from dpsweep.orchestration.execution.environment import IN_PROCESS
from dpsweep.orchestration.execution.session import private_session
from dpsweep.orchestration.execution.storage_checks import train_patiently
from dpsweep.orchestration.store.status_snapshot import SweepSnapshot
from dpsweep.orchestration.sweeps.planned import PlannedTrial
from dpsweep.workers.evaluation.attack_results import AuditResult
from dpsweep.workers.machine.devices import missing_gpu
from dpsweep.workers.training.history import Progress
from dpsweep.workers.training.less_memory import LackOfMemory


class _Halted(Exception):
    """This run of the sweep must stop; another run continues the trial."""


def _report(observer: TrainingObserver, key: str, progress: Progress) -> None:
    observer.progressed(key, progress)
    if observer.must_stop and progress.step < progress.total_steps:
        raise _Halted


@final
class InProcess:
    """A `Backend` that trains and accounts in the calling process. A trial that kills the process ends the sweep."""

    trials_at_once = 1

    def __init__(self, context: TrialContext) -> None:
        self._context = context

    def train(self, trials: Sequence[PlannedTrial], observer: TrainingObserver, name: str) -> None:
        for planned in trials:
            attempt: PlannedTrial | None = planned
            while attempt is not None and not observer.must_stop:
                attempt = self._attempt(attempt, observer)

    def _attempt(self, planned: PlannedTrial, observer: TrainingObserver) -> PlannedTrial | None:
        """Train the trial; return the trial to train in its place after a lack of memory, else None."""
        observer.started(planned.key)
        try:
            train_patiently(
                planned,
                self._context.files.trial(planned.key).root,
                self._context.code,
                partial(_report, observer, planned.key),
            )
        except _Halted:
            return None
        except (Exception, SystemExit) as error:  # user code may raise anything
            smaller = lighter(planned, observer) if isinstance(error, LackOfMemory) else None
            if smaller is None:
                observer.failed(planned.key, self._context.failure(planned.key, error))
            return smaller
        observer.ended(planned.key)
        return None

    def scatter(self, job: PartwiseJob[Part, Result], parts: Sequence[Part]) -> Iterator[Result]:
        return account_in_process(job, parts)

    def close(self, planned: PlannedTrial, step: int) -> tuple[()]:
        close_here(planned, step, self._context, self._context.code)
        return ()

    def audit(self, copy: AuditedCopy, on_epoch: OnEpoch) -> AuditResult:
        return audit_here(copy, self._context.files, self._context.code, on_epoch)

    def give_up(self) -> None:
        return  # a part ends in its own thread

    def show(self, snapshot: SweepSnapshot) -> None:
        return

    def cluster(self, waiting: Sequence[str], training: int) -> None:
        return None


@contextlib.contextmanager
def in_process(asked: Opening) -> Iterator[InProcess]:
    """Yield the backend for ``--address in-process``.

    Raises: InvalidInput for a scheduler that compares parallel trials, and for trials on several ranks.
    """
    sweep = asked.sweep
    if (most := max((each.processes for each in sweep.resources), default=1)) > 1:
        raise InvalidInput(
            f"resources give a trial {most} ranks, but --address {IN_PROCESS} trains in one process; leave --address "
            "out, or give trials one rank"
        )
    if any(each.gpus for each in sweep.resources) and not sweep.execution.allow_cpu and (reason := missing_gpu()):
        raise InvalidInput(f"trials reserve a GPU, but {reason}; execution.allow_cpu: true lets them train on the CPU")
    if sweep.scheduler.name != "fifo":
        raise InvalidInput(
            f"scheduler {sweep.scheduler.name!r} compares trials that run side by side, but --address {IN_PROCESS} "
            "runs one after the other; use scheduler fifo, or another --address"
        )
    with (
        private_session(),
        nothing_left(asked) as backend,
    ):  # whose folder keeps what trials share, as features of texts
        yield backend


@contextlib.contextmanager
def nothing_left(asked: Opening) -> Iterator[InProcess]:
    """Yield the backend for a sweep whose trials all have results: it accepts any scheduler and starts no cluster."""
    yield InProcess(TrialContext(asked.files, asked.sweep.disclosure, asked.code))
