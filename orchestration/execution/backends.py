"""The choice, by ``--address``, of a backend, and of where the sweep is planned."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from dpsweep.accounting.calibration.planned_runs import PROCESSES, Calibration, Solver, solved
from dpsweep.accounting.records.files import closed_to_strangers, exists
from dpsweep.orchestration.execution.apart import run_apart
from dpsweep.orchestration.execution.backend import Backend, Open, Opening, Warn
from dpsweep.orchestration.execution.environment import EMBEDDED, IN_PROCESS
from dpsweep.orchestration.execution.shared_connection import own_connection
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.store.ownership import exclusive
from dpsweep.orchestration.sweeps.grid import Past
from dpsweep.orchestration.sweeps.planned import Plan
from dpsweep.orchestration.sweeps.schema import SweepSpec
from dpsweep.orchestration.sweeps.sections import ResourceSettings, SchedulerSettings
from dpsweep.workers.own_code.imports import UserCode


def backend(address: str, plan: Plan, files: SweepFiles) -> Open:
    """Return the backend for ``--address``: this process, a Ray cluster started for the sweep, or a running cluster.

    No cluster is started for a sweep whose trials all have results.
    """
    if address == EMBEDDED and all(exists(files.trial(planned.key).result) for planned in plan.trials):
        from dpsweep.orchestration.execution.in_process import nothing_left

        return nothing_left
    return opening(address)


def opening(address: str) -> Open:
    """As `backend`, for work that needs a cluster even if all trials have results, such as accounting them again."""
    if address == IN_PROCESS:
        from dpsweep.orchestration.execution.in_process import in_process

        return in_process
    from dpsweep.orchestration.execution.on_ray import embedded, on_cluster  # late: it imports ray

    return embedded if address == EMBEDDED else on_cluster


@contextlib.contextmanager
def on_stored(
    files: SweepFiles,
    sweep: SweepSpec,
    resources: tuple[ResourceSettings, ...],
    address: str,
    code: UserCode,
    warn: Warn,
) -> Iterator[Backend]:
    """Open a backend for work on a stored sweep other than its training, in whose folder then no other driver runs.

    resources: those that this work reserves. Raises: InvalidInput as `exclusive`, and as the backend.
    """
    alone = sweep.model_copy(update={"resources": resources, "scheduler": SchedulerSettings()})
    asked = Opening(address, alone, files, code, warn, own_connection)
    with closed_to_strangers(), exclusive(files), opening(address)(asked) as execution:
        yield execution


def plan_at(address: str, sweep: SweepSpec, code: UserCode, past: Past, files: SweepFiles) -> Plan:
    """Return the plan of a sweep that runs at ``address``; for a running cluster, it is made in another process.

    Most of a driver's memory is torch's, which that process takes with it. Drivers share the head of a running cluster,
    and need torch for the plan alone, as their trials train on the nodes. Many noise calibrations are solved by the
    nodes, too, and elsewhere by processes on this machine. files: of the sweep.

    Raises: as `dpsweep.orchestration.sweeps.plan.plan_sweep`, and DpsweepError if that process is killed.
    """
    if address in (IN_PROCESS, EMBEDDED):
        return _plan(sweep, code, past, PROCESSES)
    return run_apart("planned the sweep", _plan, sweep, code, past, OnCluster(address, files.log))


def _plan(sweep: SweepSpec, code: UserCode, past: Past, solver: Solver) -> Plan:
    from dpsweep.orchestration.sweeps.plan import plan_sweep  # late: it imports torch

    return plan_sweep(sweep, code, past, solver)


_JOIN_TIMEOUT: Final = 10.0
"""Seconds to wait for a node with a CPU to join the cluster."""
_RETRIES: Final = 8
"""Most repetitions of a calibration whose node was lost."""


@final
@dataclass(frozen=True)
class OnCluster:
    """A `Solver` that connects to the cluster at ``address`` when called and runs one Ray task per calibration.

    log: file for Ray's log, which would otherwise go to the terminal.
    """

    address: str
    log: Path

    @property
    def at_once(self) -> int:
        """More than one machine has cores; the size of the cluster is unknown before connecting."""
        return 64

    def __call__(self, asked: Sequence[Calibration]) -> list[float | None]:
        """Solve on the cluster; calibrations whose nodes are lost too often are solved in this process.

        Raises: InvalidInput if no cluster answers, or none of its nodes has a CPU.
        """
        import ray  # late, as in `opening`

        from dpsweep.orchestration.execution.cluster import check_resources, connected

        with connected(self.address, self.log):
            check_resources({"a calibration": {"CPU": 1.0}}, _JOIN_TIMEOUT)
            task = ray.remote(solved).options(num_cpus=1, scheduling_strategy="SPREAD", max_retries=_RETRIES)
            pending = [task.remote(each) for each in asked]
            return [_result(each, reference) for each, reference in zip(asked, pending, strict=True)]


def _result(asked: Calibration, reference: Any) -> float | None:
    import ray
    from ray.exceptions import RayError

    try:
        found: float | None = ray.get(reference)
    except RayError:
        return solved(asked)
    return found
