"""Plan a sweep where its driver runs: in this process, or in a separate one, which takes torch with it when it ends.

Most of a driver's memory is torch's, and drivers share the head of a running cluster. A driver there needs torch for
its plan alone, as its trials train on the nodes.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from typing import Any, Final

from dpsweep.accounting.calibration.planned_runs import Solver
from dpsweep.accounting.errors import DpsweepError
from dpsweep.orchestration.execution.environment import EMBEDDED, IN_PROCESS
from dpsweep.orchestration.sweeps.grid import Past
from dpsweep.orchestration.sweeps.planned import Plan
from dpsweep.orchestration.sweeps.schema import SweepSpec
from dpsweep.workers.own_code.imports import UserCode

_CODE: Final = "from dpsweep.orchestration.execution.planning import _serve; _serve()"


def plan_at(address: str, sweep: SweepSpec, code: UserCode, past: Past, solver: Solver) -> Plan:
    """Return the plan of a sweep that runs at ``address``; for a running cluster, it is made in another process.

    Raises: as `dpsweep.orchestration.sweeps.plan.plan_sweep`, and DpsweepError if that process is killed.
    """
    if address not in (IN_PROCESS, EMBEDDED):
        return _in_process((sweep, code, past, solver))
    from dpsweep.orchestration.sweeps.plan import plan_sweep  # late: it imports torch

    return plan_sweep(sweep, code, past, solver)


def _in_process(asked: tuple[Any, ...]) -> Plan:
    planner = subprocess.run(
        [sys.executable, "-P", "-c", _CODE],
        input=pickle.dumps(asked),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the other one
        check=False,
    )
    if planner.returncode:
        raise DpsweepError(
            f"the process that planned the sweep ended with {planner.returncode}; its error is above, or the memory of "
            "this machine did not suffice for the data and the models"
        )
    found: Plan | BaseException = pickle.loads(planner.stdout)
    if isinstance(found, BaseException):
        raise found
    return found


def _serve() -> None:
    """Plan the sweep given on standard input, and write the plan, or the error, to standard output."""
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what the user's code prints
    from dpsweep.orchestration.sweeps.plan import plan_sweep

    sweep, code, past, solver = pickle.load(sys.stdin.buffer)
    found: Plan | DpsweepError
    try:
        found = plan_sweep(sweep, code, past, solver)
    except DpsweepError as error:
        found = error
    with answer:
        pickle.dump(found, answer)
