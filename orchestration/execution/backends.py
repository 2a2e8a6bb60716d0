"""The choice, by ``--address``, of a backend, and of where the sweep is planned."""

from __future__ import annotations

from pathlib import Path

from dpsweep.accounting.calibration.planned_runs import PROCESSES, Solver
from dpsweep.accounting.records.files import exists
from dpsweep.orchestration.execution.apart import run_apart
from dpsweep.orchestration.execution.backend import Open
from dpsweep.orchestration.execution.environment import EMBEDDED, IN_PROCESS
from dpsweep.orchestration.store.layout import SweepFiles
from dpsweep.orchestration.sweeps.grid import Past
from dpsweep.orchestration.sweeps.planned import Plan
from dpsweep.orchestration.sweeps.schema import SweepSpec
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


def plan_at(address: str, sweep: SweepSpec, code: UserCode, past: Past, log: Path) -> Plan:
    """Return the plan of a sweep that runs at ``address``; for a running cluster, it is made in another process.

    Most of a driver's memory is torch's, which that process takes with it. Drivers share the head of a running cluster,
    and need torch for the plan alone, as their trials train on the nodes. Many noise calibrations are solved by the
    nodes, too, and elsewhere by processes on this machine. log: of the sweep.

    Raises: as `dpsweep.orchestration.sweeps.plan.plan_sweep`, and DpsweepError if that process is killed.
    """
    if address in (IN_PROCESS, EMBEDDED):
        return _plan(sweep, code, past, PROCESSES)
    from dpsweep.orchestration.execution.calibrations import OnCluster  # late: it imports ray

    return run_apart("planned the sweep", _plan, sweep, code, past, OnCluster(address, log))


def _plan(sweep: SweepSpec, code: UserCode, past: Past, solver: Solver) -> Plan:
    from dpsweep.orchestration.sweeps.plan import plan_sweep  # late: it imports torch

    return plan_sweep(sweep, code, past, solver)
