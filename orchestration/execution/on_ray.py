"""Run a sweep on Ray: trials train under Ray Tune, and a pool of actors accounts their parts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import final

from accounting.parallel import AccountingJob, AccountingPool, PartResult
from orchestration.execution.backend import TrainingObserver, TrialContext
from orchestration.execution.cluster import check_resources, check_shared_storage, connected
from orchestration.execution.tune import train
from orchestration.records.layout import SweepFiles
from orchestration.sweeps.plan import PlannedTrial
from orchestration.sweeps.schema import SweepSpec
from workers.imports import UserCode


@final
class OnRay:
    """A `Backend` on the Ray cluster that this process is connected to."""

    def __init__(self, sweep: SweepSpec, context: TrialContext, pool: AccountingPool) -> None:
        self._sweep, self._context, self._pool = sweep, context, pool

    def train(self, trials: Sequence[PlannedTrial], observer: TrainingObserver, name: str) -> None:
        train(trials, observer, self._sweep.resources, self._sweep.scheduler, self._context, name)

    def scatter(self, job: AccountingJob, parts: Sequence[int]) -> Iterator[PartResult]:
        return self._pool.scatter(job, parts)


@contextlib.contextmanager
def embedded(address: str, sweep: SweepSpec, files: SweepFiles, code: UserCode) -> Iterator[OnRay]:
    """The backend on a Ray cluster started for the sweep. Raises: InvalidInput if its resources do not suffice."""
    with connected(address, files.log, code) as shipped:
        check_resources(sweep.resources, sweep.accounting)
        with _opened(sweep, files, shipped) as backend:
            yield backend


@contextlib.contextmanager
def on_cluster(address: str, sweep: SweepSpec, files: SweepFiles, code: UserCode) -> Iterator[OnRay]:
    """The backend on a running Ray cluster. Raises: InvalidInput if a node cannot read the sweep's files."""
    with connected(address, files.log, code) as shipped:
        check_shared_storage(files.probe)
        with _opened(sweep, files, shipped) as backend:
            yield backend


@contextlib.contextmanager
def _opened(sweep: SweepSpec, files: SweepFiles, code: UserCode) -> Iterator[OnRay]:
    with AccountingPool(sweep.accounting.actors, num_cpus=sweep.accounting.cpus) as pool:
        yield OnRay(sweep, TrialContext(files, sweep.disclosure, code), pool)
