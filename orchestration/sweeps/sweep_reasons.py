"""Decides why the epsilons of a sweep's trials are estimates and no guarantees.

Everything that makes a trial not private is decided here: what its specification and its data say
(`dpsweep.workers.spec`), and how its sweep tunes and schedules. Reasons from the course of a run are
in its trace (`dpsweep.accounting.mechanism.trace.Trace.reasons`).
"""

from __future__ import annotations

from collections.abc import Iterable

from dpsweep.accounting.mechanism.reasons import Reason, union
from dpsweep.orchestration.sweeps.schema import SweepSpec
from dpsweep.workers.spec import TrialSpec
from dpsweep.workers.training.history import reasons_of_trial


def reasons_of(sweep: SweepSpec, spec: TrialSpec, of_data: Iterable[Reason]) -> tuple[Reason, ...]:
    """Return why every epsilon of the trial ``spec`` of ``sweep`` is an estimate; none for a trial without noise.

    `of_data`: what was read off the rows, from the description of the data or from the trial's result.
    """
    of_sweep: dict[Reason, bool] = {
        "not_confirmed": sweep.drafted,
        "unaccounted_tuning": sweep.tune is not None and sweep.tune.privacy == "unaccounted",
        "unaccounted_scheduler": sweep.selects_unaccounted,
    }
    chosen = (reason for reason, holds in of_sweep.items() if holds and spec.is_private)
    return union((reasons_of_trial(spec, of_data), chosen))
