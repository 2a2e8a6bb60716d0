"""Plan a sweep where its driver runs: in this process, or in a separate one, which takes torch with it when it ends.

Most of a driver's memory is torch's, and drivers share the head of a running cluster. A driver there needs torch for
its plan alone, as its trials train on the nodes.
"""

from __future__ import annotations

from dpsweep.accounting.calibration.planned_runs import Solver
from dpsweep.orchestration.execution.apart import run_apart
from dpsweep.orchestration.execution.environment import EMBEDDED, IN_PROCESS
from dpsweep.orchestration.sweeps.grid import Past
from dpsweep.orchestration.sweeps.planned import Plan
from dpsweep.orchestration.sweeps.schema import SweepSpec
from dpsweep.workers.own_code.imports import UserCode


def plan_at(address: str, sweep: SweepSpec, code: UserCode, past: Past, solver: Solver) -> Plan:
    """Return the plan of a sweep that runs at ``address``; for a running cluster, it is made in another process.

    Raises: as `dpsweep.orchestration.sweeps.plan.plan_sweep`, and DpsweepError if that process is killed.
    """
    if address in (IN_PROCESS, EMBEDDED):
        return _plan(sweep, code, past, solver)
    return run_apart("planned the sweep", _plan, sweep, code, past, solver)


def _plan(sweep: SweepSpec, code: UserCode, past: Past, solver: Solver) -> Plan:
    from dpsweep.orchestration.sweeps.plan import plan_sweep  # late: it imports torch

    return plan_sweep(sweep, code, past, solver)
